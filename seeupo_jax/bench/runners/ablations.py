"""The techniques that make a sweep cheap; each can be left out, and the numbers stay the same."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seeupo_jax.learner import sweep as sweep_module
from seeupo_jax.learner.batching import (
    ActionSpan,
    Layout,
    Rows,
    Shapes,
    action_spans,
    all_actions,
    choose_length,
    lay_out,
    turn_batch,
)
from seeupo_jax.learner.learner import Learner, score_program
from seeupo_jax.policy.kernels import attention
from seeupo_jax.types import TurnBatch


def _as_they_are(learner: Learner) -> Learner:
    return learner


def _nothing(learner: Learner, rows: Rows) -> None:
    pass


@dataclass(frozen=True)
class Switch:
    """One technique left out.

    words: what is done instead.
    fields: of the configuration. shaped: changes the learner's shapes. adapt: its programs, given
    the rows of the sweep. active: what must hold whenever the learner runs.
    """

    words: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    shaped: Callable[[Learner], Learner] = _as_they_are
    adapt: Callable[[Learner, Rows], None] = _nothing
    active: Callable[[], AbstractContextManager[Any]] = nullcontext


def _one_length(learner: Learner) -> Learner:
    shapes = dataclasses.replace(learner.shapes, lengths=learner.shapes.lengths[-1:])
    return dataclasses.replace(learner, shapes=shapes)


def _score_by_turn(learner: Learner, rows: Rows) -> None:
    """What one pass gives for all turns, from a pass over each turn's contexts."""
    one_pass, shapes, whole = learner.score, learner.shapes, all_actions(rows)
    place = {span.segment: number for number, span in enumerate(whole)}

    def score(params: Any, batch: TurnBatch) -> np.ndarray:
        found_PA = np.zeros(batch.mask_PA.shape, np.float32)
        for turn in range(rows.turns):
            spans = action_spans(rows, [turn])
            own = turn_batch(rows, lay_out(rows, spans, shapes), shapes, {}, action=shapes.action)
            for span, logp_A in zip(spans, np.asarray(one_pass(params, own)), strict=False):
                row = place[span.segment]
                column = np.searchsorted(whole[row].position_A, span.position_A)
                found_PA[row, column] = logp_A[: column.size]
        return found_PA

    vars(learner)["score"] = score


def _lay_out_whole(
    rows: Rows, spans: Sequence[ActionSpan], shapes: Shapes, lengths: Sequence[int] | None = None
) -> Layout:
    """`batching.lay_out`, but every span's segment stands there to its end."""
    tokens = [rows.tokens[span.segment] for span in spans]
    allowed = shapes.allowed(max(map(len, tokens), default=0))
    if lengths is not None:
        allowed = tuple(length for length in lengths if length in allowed)
    groups = rows.group_S[[span.segment for span in spans]]
    packed = choose_length(tokens, groups, lengths=allowed, rows=shapes.rows, share=shapes.share)
    return Layout(spans, *packed)


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(module)[name]
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def _dense_attention() -> Iterator[None]:
    def whole(*arrays: Any, window: int | None, longest: int | None) -> Any:
        return attention.all_pairs(*arrays, window=window)

    dense = {**attention.OF_TREES, "xla": whole}
    with _replaced(attention, "OF_TREES", dense), contextlib.ExitStack() as stack:
        # All learners of a network share the program that scores: this one's must be its own.
        score_program.cache_clear()
        stack.callback(score_program.cache_clear)
        yield


ALL_ON = Switch("")
SWITCHES = {
    "share_prefixes": Switch(
        "every member of a group has its own copy of the prompt",
        {"batching.share_prefixes": False},
    ),
    "fused_refresh": Switch(
        "new log-probabilities from a pass after each step", {"algorithm.refresh": "separate"}
    ),
    "one_old_pass": Switch(
        "old and reference log-probabilities from a pass for each turn", adapt=_score_by_turn
    ),
    "truncation": Switch(
        "a turn's rows reach to the end of their trajectories",
        active=lambda: _replaced(sweep_module, "lay_out", _lay_out_whole),
    ),
    "buckets": Switch("rows are padded to one length", shaped=_one_length),
    "tree_attention": Switch("scores of all pairs of tokens, and a mask", active=_dense_attention),
}


def chosen(names: Sequence[str]) -> dict[str, Switch]:
    """Those that `--without` names; `all` is every one.

    Raises:
      ValueError: an unknown one.
    """
    names = tuple(SWITCHES) if tuple(names) == ("all",) else tuple(names)
    wrong = [name for name in names if name not in SWITCHES]
    if wrong:
        allowed = ", ".join(("all", *SWITCHES))
        raise ValueError(f"--without: got {wrong[0]!r}; allowed: {allowed}.")
    return {name: SWITCHES[name] for name in names}
