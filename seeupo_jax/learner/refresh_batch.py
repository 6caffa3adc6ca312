"""The batch with which turn t's step refreshes the weights M by turn t+1's ratios."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from seeupo_jax.learner.batching import (
    ActionSpan,
    Layout,
    SegmentBatch,
    Shapes,
    TargetSlots,
    check_slots,
)


class RefreshBatch(NamedTuple):
    """The spans of turn t+1, whose ratios after their step turn t's step multiplies in.

    Every span of turn t+1 continues a span of turn t: from that one's last token to its own. Such
    continuations of a row's spans lie in chunks [Q, C] of tokens: each is a tree below a token of
    the row, and all of one chunk are computed together.

    tokens_MQRC, depth_MQRC, end_MQRC: as in TurnBatch, indices within the chunk.
    at_MQRC: int32, index in the row of the token that the continuation follows.
    parent_MQRC, target_MQRC: as in TurnBatch.
    slot_PA: int32, where in the flattened [M, Q, R, C] each action token is predicted.
    chunks_M: int32, how many chunks of each microbatch hold any.
    mask_PA, old_logp_PA, trajectory_P: as in TurnBatch.
    expert_MQRCG: as its `expert_MRLG`.
    """

    tokens_MQRC: jax.Array
    depth_MQRC: jax.Array
    end_MQRC: jax.Array
    at_MQRC: jax.Array
    parent_MQRC: jax.Array
    target_MQRC: jax.Array
    slot_PA: jax.Array
    mask_PA: jax.Array
    trajectory_P: jax.Array
    old_logp_PA: jax.Array
    chunks_M: jax.Array
    expert_MQRCG: jax.Array | None = None


def make_refresh_batch(
    rows: SegmentBatch,
    layout: Layout,
    previous: Sequence[ActionSpan],
    shapes: Shapes,
    old_logp: Sequence[np.ndarray],
) -> tuple[RefreshBatch, list[ActionSpan]]:
    """The refresh that the step laid out does for the step on `previous` before it.

    Returns: the refresh, and the previous spans that it cannot hold: those that do not continue a
      span of this step, all spans of a trajectory that has several in one step (their ratios
      multiply first), those longer than a chunk, and those for which a row has
      no chunk left.
    """
    P, A = shapes.spans(len(previous)), shapes.action
    slot, mask = np.zeros((P, A), np.int32), np.zeros((P, A), np.float32)
    old, trajectory = np.zeros((P, A), np.float32), np.full(P, rows.trajectories, np.int32)
    chunks = _Chunks(shapes, layout, rows)
    continued = _continued(rows, layout.spans, previous)
    remaining: list[ActionSpan] = []
    for place, span in enumerate(previous):
        now = continued.get(span.segment)
        slot_A = None if now is None else chunks.add(span, now)
        if slot_A is None:
            remaining.append(span)
            continue
        slot[place, : slot_A.size], mask[place, : slot_A.size] = slot_A, 1
        old[place, : slot_A.size] = old_logp[span.segment][span.position_A]
        trajectory[place] = rows.trajectory_S[span.segment]
    batch = RefreshBatch(
        **chunks.fields(), slot_PA=slot, mask_PA=mask, trajectory_P=trajectory, old_logp_PA=old
    )
    return batch, remaining


def refresh_shapes(rows: SegmentBatch, shapes: Shapes, length: int) -> RefreshBatch:
    """Shape structs of the refresh of a step in rows of a length; see `make_refresh_batch`.

    Nothing is allocated, as by `batch_shapes`.

    Raises:
      ValueError: more tokens than int32 counts.
    """
    MQRC, PA = _chunk_shape(shapes, length), (shapes.spans(), shapes.action)
    check_slots(math.prod(MQRC[:3]), shapes.chunk)
    struct = jax.ShapeDtypeStruct
    return RefreshBatch(
        *(struct(MQRC, np.int32),) * 6,
        slot_PA=struct(PA, np.int32),
        mask_PA=struct(PA, np.float32),
        trajectory_P=struct(PA[:1], np.int32),
        old_logp_PA=struct(PA, np.float32),
        chunks_M=struct(MQRC[:1], np.int32),
        expert_MQRCG=None if rows.experts is None else rows.experts.struct(*MQRC),
    )


def _chunk_shape(shapes: Shapes, length: int, rows: int = 0) -> tuple[int, int, int, int]:
    """[M, Q, R, C] of the chunks of a step with so many rows of a length."""
    C = shapes.chunk
    return shapes.microbatches(length, rows), 1 + 2 * (length // C), shapes.rows, C


def _continued(
    rows: SegmentBatch, spans: Sequence[ActionSpan], previous: Sequence[ActionSpan]
) -> dict[int, int]:
    """The span that each segment's continues, if its trajectory has one span in both steps."""
    alone = _alone(rows, spans) & _alone(rows, previous)
    owner_S = rows.trajectory_S
    return {p.segment: place for place, p in enumerate(spans) if int(owner_S[p.segment]) in alone}


def _alone(rows: SegmentBatch, spans: Sequence[ActionSpan]) -> set[int]:
    """The trajectories that have exactly one of these spans."""
    count = Counter(int(rows.trajectory_S[span.segment]) for span in spans)
    return {trajectory for trajectory, times in count.items() if times == 1}


class _Chunks:
    """The chunks [M, Q, R, C] of a step's rows: each row's are filled one after the other."""

    def __init__(self, shapes: Shapes, layout: Layout, rows: SegmentBatch):
        self._shape = M, Q, R, C = _chunk_shape(shapes, layout.length, len(layout.forest.tokens))
        self._layout, self._rows = layout, rows
        self._experts = None if rows.experts is None else rows.experts.unknown(*self._shape)
        self._predicted = TargetSlots(M * Q * R, C)
        self._tokens, self._depth, self._at = (np.zeros(self._shape, np.int32) for _ in range(3))
        self._end = np.tile(np.arange(1, C + 1, dtype=np.int32), (*self._shape[:3], 1))
        self._used: Counter[int] = Counter()  # tokens of each row, spaces at chunks' ends included
        self._count_M = np.zeros(M, np.int32)

    def add(self, span: ActionSpan, place: int) -> np.ndarray | None:
        """Adds the tokens by which a span continues the one at a place of the layout.

        Returns: where in the flattened chunks its action tokens are predicted; None if no chunk
          holds it.
        """
        _, Q, R, C = self._shape
        tokens_L = self._rows.tokens[span.segment]
        start = self._layout.spans[place].end - 1  # the last token that both have
        size, row = span.end - start, int(self._layout.forest.row_S[place])
        chunk, first = divmod(self._used[row], C)
        if first + size > C:
            chunk, first = chunk + 1, 0
        if not 1 < size <= C or chunk == Q:
            return None
        self._used[row] = chunk * C + first + size
        m, r = divmod(row, R)
        self._count_M[m] = max(self._count_M[m], chunk + 1)
        where = (m, chunk, r, slice(first, first + size))
        self._tokens[where] = tokens_L[start : span.end]
        self._depth[where] = np.arange(start, span.end)
        self._end[where] = first + size
        if self._experts is not None:
            self._experts[where] = self._rows.experts.expert_LG[span.segment][start : span.end]
        self._at[where] = self._layout.forest.index[place][start - 1]
        index_A = first + span.position_A - start
        flat = int(np.ravel_multi_index(where[:3], self._shape[:3]))
        return self._predicted.slots(flat, index_A, index_A - 1, tokens_L[span.position_A])

    def fields(self) -> dict[str, np.ndarray | None]:
        """Fields of a `RefreshBatch`: all but those of action tokens."""
        return {
            "tokens_MQRC": self._tokens,
            "depth_MQRC": self._depth,
            "end_MQRC": self._end,
            "at_MQRC": self._at,
            "parent_MQRC": self._predicted.parent.reshape(self._shape),
            "target_MQRC": self._predicted.target.reshape(self._shape),
            "chunks_M": self._count_M,
            "expert_MQRCG": self._experts,
        }
