"""Packs ragged trajectories on the host into padded batches of few shapes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import numpy as np

from seeupo_jax.algorithms.distillation import UNTAUGHT
from seeupo_jax.learner.expert_record import ExpertRecord
from seeupo_jax.learner.shapes import Shapes
from seeupo_jax.learner.token_trees import TokenForest, choose_length
from seeupo_jax.policy.architecture import Routing
from seeupo_jax.trajectories.forks import forked, shared_turns
from seeupo_jax.types import CONTEXT, NO_TARGET, Trajectory, TurnBatch, learnable

TOKEN_DTYPES = {"action": np.int32, "teacher_top": np.int32}  # of tokens' fields; float32 else
# Fields that lie where tokens are predicted, once for all spans that share a token: the name in
# `TurnBatch`, and the value where nothing is.
_OF_TARGETS: dict[str, tuple[str, float]] = {
    "teacher_top": ("teacher_top_MRXK", 0),
    "teacher_top_logp": ("teacher_top_logp_MRXJ", UNTAUGHT),
}


@dataclass(frozen=True)
class SegmentBatch:
    """The segments of all trajectories that count; index S below.

    tokens, turn, logp: as in `Segment`, one array a segment; but the turn of forced tokens, and of
      those of a turn that another trajectory owns, is `CONTEXT`.
    version: as of `Segment.versions`, one array a segment.
    adapters: of turns (`LoraAdapters.per_turn`); 1: all turns have the same.
    trajectory_S: the trajectory of a segment. group_S: the trajectory's group, whose members begin
      alike.
    """

    tokens: tuple[np.ndarray, ...]
    turn: tuple[np.ndarray, ...]
    logp: tuple[np.ndarray, ...]
    trajectory_S: np.ndarray
    group_S: np.ndarray
    trajectories: int  # N, those left out included
    turns: int  # K, of the longest trajectory
    forced: int = 0  # sampled tokens of its own turns that count as context
    masked_S: np.ndarray | None = None  # excluded from updates; None: none
    routing: Routing | None = None  # of the policy's routers; None: it has none
    experts: ExpertRecord | None = None  # that the routers replay; None: they choose
    version: tuple[np.ndarray, ...] = ()
    adapters: int = 1

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        *,
        grouped: bool = True,
        truncated: bool = False,
        mask_truncated: bool = False,
        routing: Routing | None = None,
        replays: bool = False,
        adapters: int = 1,
    ) -> SegmentBatch:
        """Segments of the trajectories that an update learns from.

        Args:
          grouped: as for `learnable`.
          truncated: whether actions were drawn from a truncated softmax. Tokens of probability 1
            were then forced: the policy had no choice, and learns nothing from them.
          mask_truncated: whether trajectories that were cut are excluded from updates.
          routing: of the policy's routers.
          replays: whether the routers replay the experts that the sampler recorded.
          adapters: of turns; 1: all turns have the same.
        """
        trained = np.flatnonzero(learnable(trajectories, grouped=grouped))
        pairs = [(i, segment) for i in trained for segment in trajectories[i].segments]
        groups = dict.fromkeys(trajectories[i].group for i in trained)
        number = {group: place for place, group in enumerate(groups)}  # groups are only names
        turn = tuple(segment.turn_L for _, segment in pairs)
        if forked(trajectories):
            owners = {i for i in trained if not (mask_truncated and trajectories[i].truncated)}
            shared = shared_turns(trajectories, [i in owners for i in range(len(trajectories))])
            owned = zip(turn, (shared[i] for i, _ in pairs), strict=True)
            turn = tuple(np.where(turn_L < first, CONTEXT, turn_L) for turn_L, first in owned)
        rows = cls(
            tuple(segment.tokens_L for _, segment in pairs),
            turn,
            tuple(segment.logp_L for _, segment in pairs),
            np.array([i for i, _ in pairs], np.int32),
            np.array([number[trajectories[i].group] for i, _ in pairs], np.int32),
            len(trajectories),
            _turns(turn),
            masked_S=np.array([trajectories[i].truncated for i, _ in pairs], bool)
            if mask_truncated
            else None,
            routing=routing,
            experts=ExpertRecord.of_segments(routing, [segment for _, segment in pairs])
            if replays and routing is not None
            else None,
            version=tuple(s.versions(trajectories[i].policy_version) for i, s in pairs),
            adapters=adapters,
        )
        if not truncated:
            return rows
        drawn = zip(rows.turn, rows.logp, strict=True)
        return rows.without([(turn_L != CONTEXT) & (logp_L == 0) for turn_L, logp_L in drawn])

    def without(self, as_context: Sequence[np.ndarray]) -> SegmentBatch:
        """The rows with some of the action tokens as context.

        Args:
          as_context: bool, one array per segment.
        """
        marked = zip(self.turn, as_context, strict=True)
        turn = tuple(np.where(as_context_L, CONTEXT, turn_L) for turn_L, as_context_L in marked)
        forced = self.forced + int(sum(np.sum(as_context_L) for as_context_L in as_context))
        return replace(self, turn=turn, turns=_turns(turn), forced=forced)

    @functools.cached_property
    def identity(self) -> tuple[np.ndarray, ...]:
        """Numbers of the tokens, one array a segment.

        Two tokens of a group are computed once if they and all before them have equal numbers.
        """
        if self.experts is None:
            return self.tokens
        return self.experts.identity(self.tokens, self.group_S)

    @property
    def updated_S(self) -> np.ndarray:
        """The segments that updates learn from: bool [S]."""
        whole_S = np.ones(len(self.tokens), bool)
        return whole_S if self.masked_S is None else ~self.masked_S

    @property
    def updated_turns(self) -> int:
        """K of the longest trajectory that an update learns from."""
        updated = (
            turn_L for turn_L, updates in zip(self.turn, self.updated_S, strict=True) if updates
        )
        return _turns(tuple(updated))


def _turns(turn: Sequence[np.ndarray]) -> int:
    """K of segments with tokens of these turns."""
    return 1 + max((int(turn_L.max(initial=CONTEXT)) for turn_L in turn), default=CONTEXT)


def forced_fraction(rows: SegmentBatch) -> float:
    """Share of the sampled tokens that were forced; NaN without any."""
    free = sum(int((turn_L != CONTEXT).sum()) for turn_L in rows.turn)
    return rows.forced / (rows.forced + free) if rows.forced + free else float("nan")


@dataclass(frozen=True, eq=False)
class ActionSpan:
    """The action tokens of a segment in a step, by their positions in the segment.

    adapter: of these tokens and of all before them, where adapters are per turn.
    """

    segment: int
    position_A: np.ndarray
    adapter: int = 0

    @property
    def end(self) -> int:
        """One past the last action token; later tokens do not affect the step."""
        return int(self.position_A[-1]) + 1


def action_spans(rows: SegmentBatch, turns: Sequence[int]) -> list[ActionSpan]:
    """The spans of an update of these turns; a trajectory without these turns has none.

    Of a segment that is one for each adapter of its turns.
    """
    updated_S = rows.updated_S
    return [span for span in _spans(rows, turns) if updated_S[span.segment]]


def _spans(rows: SegmentBatch, turns: Sequence[int]) -> list[ActionSpan]:
    spans = []
    for segment, turn_L in enumerate(rows.turn):
        position_A = np.flatnonzero(np.isin(turn_L, turns))
        adapter_A = np.minimum(turn_L[position_A], rows.adapters - 1)
        for adapter in np.unique(adapter_A).tolist():
            spans.append(ActionSpan(segment, position_A[adapter_A == adapter], adapter))
    return spans


def all_actions(rows: SegmentBatch) -> list[ActionSpan]:
    """Every sampled token of every segment, for the passes that score whole trajectories."""
    return _spans(rows, range(rows.turns))


@dataclass(frozen=True, eq=False)
class Layout:
    """The spans of a step packed into rows.

    length: tokens of a row. forest: the spans' segments, each up to its span's end; those of
      different adapters share no token.
    """

    spans: Sequence[ActionSpan]
    length: int
    forest: TokenForest

    @property
    def tokens(self) -> int:
        """Computed tokens, without padding."""
        return sum(map(len, self.forest.tokens))


def lay_out(
    rows: SegmentBatch,
    spans: Sequence[ActionSpan],
    shapes: Shapes,
    lengths: Sequence[int] | None = None,
) -> Layout:
    """Packs spans into rows of one of the listed lengths; ValueError: a span is longer."""
    end = [span.end if shapes.truncate else len(rows.tokens[span.segment]) for span in spans]
    allowed = shapes.allowed(max(end, default=0))
    if lengths is not None:
        allowed = tuple(length for length in lengths if length in allowed)
    return Layout(
        spans,
        *choose_length(
            [rows.tokens[span.segment][:size] for span, size in zip(spans, end, strict=True)],
            [int(rows.group_S[span.segment]) * rows.adapters + span.adapter for span in spans],
            lengths=allowed,
            rows=shapes.rows,
            share=shapes.share,
            identity=[
                rows.identity[span.segment][:size] for span, size in zip(spans, end, strict=True)
            ],
        ),
    )


def turn_batch(
    rows: SegmentBatch,
    layout: Layout,
    shapes: Shapes,
    per_token: Mapping[str, Sequence[np.ndarray]],
    *,
    action: int,
    behind: bool = False,
    span_slots: Sequence[tuple[int, int]] | None = None,
    copies: int = 1,
) -> TurnBatch:
    """Pads spans into a TurnBatch of host arrays.

    Args:
      per_token: fields of every token, by the names of `TurnBatch` without their axes; one
        array a segment, aligned with its tokens.
      action: A of the batch; no span has more.
      behind: whether the result for a token is read from its own hidden state instead of from the
        one that predicts it.
      span_slots: where in [P, A] each span begins; None: every span has a row of its own, in order.
      copies: the batch has room for at least so many times as many rows and spans.
    """
    L, R, forest, spans = layout.length, shapes.rows, layout.forest, layout.spans
    span_slots = [(place, 0) for place in range(len(spans))] if span_slots is None else span_slots
    spans_needed = 1 + max((place for place, _ in span_slots), default=-1)
    M, P = _room(shapes, L, len(forest.tokens), spans_needed, copies=copies)
    predicted = TargetSlots(M * R, L)
    tokens, depth, end = _forest_rows(forest, (M * R, L))
    slot, mask = np.zeros((P, action), np.int32), np.zeros((P, action), np.float32)
    padded, of_targets = _field_arrays(per_token, (P, action), M * R * L)
    trajectory = np.full(P, rows.trajectories, np.int32)
    for number, (span, (place, start)) in enumerate(zip(spans, span_slots, strict=True)):
        columns, index_L = slice(start, start + span.position_A.size), forest.index[number]
        slot[place, columns] = predicted.slots(
            int(forest.row_S[number]),
            index_L[span.position_A],
            index_L[span.position_A if behind else span.position_A - 1],
            rows.tokens[span.segment][span.position_A],
        )
        mask[place, columns] = 1
        for name, array in padded.items():
            array[place, columns] = per_token[name][span.segment][span.position_A]
        for name, array in of_targets.items():
            array[slot[place, columns]] = per_token[name][span.segment][span.position_A]
        trajectory[place] = rows.trajectory_S[span.segment]

    shape = (M, R, L)
    expert = (
        None
        if rows.experts is None
        else rows.experts.rows((M * R, L), [span.segment for span in spans], forest)
    )
    segment = None if shapes.share else np.cumsum(depth == 0, axis=1, dtype=np.int32).reshape(shape)
    return TurnBatch(
        *(x.reshape(shape) for x in (tokens, depth, end, predicted.parent, predicted.target)),
        slot,
        mask,
        trajectory,
        microbatches=np.int32(-(-len(forest.tokens) // R)),
        segment_MRL=segment,
        counted_MRL=None if rows.routing is None else forest.counted((M * R, L)).reshape(shape),
        expert_MRLG=None if expert is None else expert.reshape(M, R, L, -1),
        adapter_MRL=_adapters(rows, layout, shape) if rows.adapters > 1 else None,
        **{f"{name}_PA": array for name, array in padded.items()},
        **{_OF_TARGETS[name][0]: x.reshape(*shape, -1) for name, x in of_targets.items()},
    )


def _adapters(rows: SegmentBatch, layout: Layout, shape: tuple[int, int, int]) -> np.ndarray:
    """The adapter of each token of a layout's rows, int32 [M, R, L]."""
    M, R, L = shape
    adapter_RL = np.full((M * R, L), rows.adapters, np.int32)
    for span, row, index_L in zip(
        layout.spans, layout.forest.row_S, layout.forest.index, strict=True
    ):
        adapter_RL[row, index_L] = span.adapter
    return adapter_RL.reshape(shape)


def _room(
    shapes: Shapes, length: int, rows: int = 0, spans: int = 0, *, copies: int
) -> tuple[int, int]:
    """M and P of a batch of so many rows of a length and so many spans."""
    if copies > 1:
        rows = max(rows, (copies - 1) * shapes.microbatches(length) * shapes.rows + 1)
        spans = max(spans, (copies - 1) * shapes.spans() + 1)
    return shapes.microbatches(length, rows), shapes.spans(spans)


def batch_shapes(
    rows: SegmentBatch,
    shapes: Shapes,
    per_token: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    *,
    length: int,
    action: int,
    copies: int = 1,
) -> TurnBatch:
    """Shape structs of a batch with the listed number of rows and spans; see `turn_batch`.

    Nothing is allocated, so a program can be compiled for batches that this host could not hold.

    Args:
      per_token: the shape of a token's value in each field; (): it is a number.

    Raises:
      ValueError: more tokens than int32 counts.
    """
    M, P = _room(shapes, length, copies=copies)
    check_slots(M * shapes.rows, length)
    routing, struct = rows.routing, jax.ShapeDtypeStruct
    MRL, PA = (M, shapes.rows, length), (P, action)
    of_tokens = struct(MRL, np.int32)
    return TurnBatch(
        *(of_tokens,) * 5,
        slot_PA=struct(PA, np.int32),
        mask_PA=struct(PA, np.float32),
        trajectory_P=struct((P,), np.int32),
        microbatches=struct((), np.int32),
        segment_MRL=None if shapes.share else of_tokens,
        counted_MRL=None if routing is None else struct(MRL, np.bool_),
        expert_MRLG=None if rows.experts is None else rows.experts.struct(*MRL),
        adapter_MRL=of_tokens if rows.adapters > 1 else None,
        **_field_structs(per_token, PA, MRL),
    )


def _field_structs(
    per_token: Mapping[str, tuple[int, ...]], by_span: tuple[int, ...], by_target: tuple[int, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape structs of fields, by their names in `TurnBatch`."""
    structs = {}
    for name, shape in per_token.items():
        dtype = TOKEN_DTYPES.get(name, np.float32)
        if name in _OF_TARGETS:
            structs[_OF_TARGETS[name][0]] = jax.ShapeDtypeStruct((*by_target, *shape), dtype)
        else:
            structs[f"{name}_PA"] = jax.ShapeDtypeStruct(by_span, dtype)
    return structs


def _forest_rows(forest: TokenForest, shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Tokens, depths and ends of a forest's rows, padded."""
    tokens, depth = (np.zeros(shape, np.int32) for _ in range(2))
    end = np.tile(np.arange(1, shape[1] + 1, dtype=np.int32), (shape[0], 1))
    for row, sources in enumerate(zip(forest.tokens, forest.depth, forest.end, strict=True)):
        for target, source in zip((tokens, depth, end), sources, strict=True):
            target[row, : source.size] = source
    return tokens, depth, end


def _field_arrays(
    per_token: Mapping[str, Sequence[np.ndarray]], shape: tuple[int, int], targets: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Arrays without any token: of the fields by span [P, A], and of those by predicted token."""
    by_span, by_target = {}, {}
    for name, source in per_token.items():
        dtype = TOKEN_DTYPES.get(name, np.float32)
        if name in _OF_TARGETS:
            size = targets, *source[0].shape[1:]
            by_target[name] = np.full(size, _OF_TARGETS[name][1], dtype)
        else:
            by_span[name] = np.zeros(shape, dtype)
    return by_span, by_target


def scatter(
    numbers: Sequence[np.ndarray], spans: Sequence[ActionSpan], scored_PA: np.ndarray
) -> None:
    """Writes a batch's numbers of action tokens [P, A, ...] to the tokens of their segments."""
    for span, scored_A in zip(spans, scored_PA, strict=False):
        numbers[span.segment][span.position_A] = scored_A[: span.position_A.size]


def check_slots(rows: int, length: int) -> None:
    """ValueError: the rows have more tokens than int32 counts."""
    if rows * length > np.iinfo(np.int32).max:
        raise ValueError(
            f"a step has {rows} rows of {length} tokens, padding included; allowed: fewer than"
            " 2**31 tokens, which int32 counts: lower config.rollout.tasks, group_size or"
            " max_context."
        )


class TargetSlots:
    """The slots of rows in which tokens are predicted; spans that share a token share its slot."""

    def __init__(self, rows: int, length: int):
        check_slots(rows, length)
        self.parent = np.zeros((rows, length), np.int32)
        self.target = np.full((rows, length), NO_TARGET, np.int32)
        # Of each token of a row, one more than its slot: zeros take no memory before they are used.
        self._next = np.zeros((rows, length), np.int32)
        self._count = np.zeros(rows, np.int64)

    def slots(
        self, row: int, index_A: np.ndarray, parent_A: np.ndarray, token_A: np.ndarray
    ) -> np.ndarray:
        """The slots, in the flattened rows, of the tokens at some indices of a row."""
        new_A = self._next[row, index_A] == 0
        first, count = int(self._count[row]), int(new_A.sum())
        self._next[row, index_A[new_A]] = np.arange(first + 1, first + count + 1)
        self.parent[row, first : first + count] = parent_A[new_A]
        self.target[row, first : first + count] = token_A[new_A]
        self._count[row] += count
        return row * self.target.shape[1] + self._next[row, index_A] - 1
