"""The techniques that make a sweep cheap; each can be left out, and the numbers stay the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seeupo_jax.learner.batching import (
    Rows,
    Shapes,
    action_spans,
    all_actions,
    lay_out,
    turn_batch,
)
from seeupo_jax.types import TurnBatch

Score = Callable[[Any, TurnBatch], Any]


def _same_shapes(shapes: Shapes) -> Shapes:
    return shapes


def _one_pass(score: Score, rows: Rows, shapes: Shapes) -> Score:
    return score


@dataclass(frozen=True)
class Ablation:
    """One technique left out.

    words: what is done instead.
    fields: of the configuration. shapes: from the learner's shapes to others. score: from the
    program that scores a sweep's trajectories, their rows and the shapes to what is called instead.
    """

    words: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    shapes: Callable[[Shapes], Shapes] = _same_shapes
    score: Callable[[Score, Rows, Shapes], Score] = _one_pass


def _one_length(shapes: Shapes) -> Shapes:
    return dataclasses.replace(shapes, lengths=shapes.lengths[-1:])


def _whole_rows(shapes: Shapes) -> Shapes:
    return dataclasses.replace(shapes, truncate=False)


def _score_by_turn(one_pass: Score, rows: Rows, shapes: Shapes) -> Score:
    """What one pass gives for all turns, from a pass over each turn's contexts."""
    whole = all_actions(rows)
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

    return score


ALL_ON = Ablation("")
ABLATIONS = {
    "share_prefixes": Ablation(
        "every member of a group has its own copy of the prompt",
        {"batching.share_prefixes": False},
    ),
    "fused_refresh": Ablation(
        "new log-probabilities from a pass after each step", {"algorithm.refresh": "separate"}
    ),
    "one_old_pass": Ablation(
        "old and reference log-probabilities from a pass for each turn", score=_score_by_turn
    ),
    "truncation": Ablation(
        "a turn's rows reach to the end of their trajectories", shapes=_whole_rows
    ),
    "buckets": Ablation("rows are padded to one length", shapes=_one_length),
    "tree_attention": Ablation(
        "scores of all pairs of tokens, and a mask", {"model.attention": "all_pairs"}
    ),
}


def chosen(names: Sequence[str]) -> dict[str, Ablation]:
    """Those that `--without` names; `all` is every one.

    Raises:
      ValueError: an unknown one.
    """
    names = tuple(ABLATIONS) if tuple(names) == ("all",) else tuple(names)
    wrong = [name for name in names if name not in ABLATIONS]
    if wrong:
        allowed = ", ".join(("all", *ABLATIONS))
        raise ValueError(f"--without: got {wrong[0]!r}; allowed: {allowed}.")
    return {name: ABLATIONS[name] for name in names}
