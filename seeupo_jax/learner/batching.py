"""From ragged trajectories on the host to padded batches of few shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from seeupo_jax.types import Trajectory, TurnBatch, learnable

_KINDS = {"action": np.int32}  # of what is known of tokens; float32 else


class RefreshBatch(NamedTuple):
    """What turn t's step needs to refresh the weights that turn t+1's step has changed.

    Each row continues the row of the same place in the step's `TurnBatch`, from that row's last
    token (which predicts the first one after it) to the end of turn t+1's action.

    tokens_MRS: int32. start_MR: int32, position of tokens_MRS[..., 0].
    position_MRA: int32, where in tokens_MRS each action token stands (>= 1).
    mask_MRA, old_logp_MRA: as in TurnBatch; a row without mask keeps its weight.
    """

    tokens_MRS: jax.Array
    start_MR: jax.Array
    position_MRA: jax.Array
    mask_MRA: jax.Array
    old_logp_MRA: jax.Array


@dataclass(frozen=True)
class Rows:
    """The segments of all trajectories that count, side by side; index S below.

    tokens, turn, logp: as in `Segment`, one array a segment. trajectory_S: whose segment it is.
    """

    tokens: tuple[np.ndarray, ...]
    turn: tuple[np.ndarray, ...]
    logp: tuple[np.ndarray, ...]
    trajectory_S: np.ndarray
    trajectories: int  # N, those left out included
    turns: int  # K, of the longest trajectory

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Rows:
        """Segments of the trajectories that an update learns from."""
        kept = np.flatnonzero(learnable(trajectories))
        pairs = [(i, segment) for i in kept for segment in trajectories[i].segments]
        return cls(
            tuple(segment.tokens_L for _, segment in pairs),
            tuple(segment.turn_L for _, segment in pairs),
            tuple(segment.logp_L for _, segment in pairs),
            np.array([i for i, _ in pairs], np.int32),
            len(trajectories),
            max((trajectories[i].turns for i in kept), default=0),
        )


@dataclass(frozen=True, eq=False)
class Piece:
    """The action that one row contributes to a step: where its tokens stand in the segment."""

    segment: int
    position_A: np.ndarray

    @property
    def end(self) -> int:
        """One past the last action token: nothing after it matters to the step."""
        return int(self.position_A[-1]) + 1


def pieces_of(rows: Rows, turns: Sequence[int]) -> list[Piece]:
    """The rows that have any of these turns; a trajectory without one is null: it is nowhere."""
    pieces = []
    for segment, turn_L in enumerate(rows.turn):
        position_A = np.flatnonzero(np.isin(turn_L, turns))
        if position_A.size:
            pieces.append(Piece(segment, position_A))
    return pieces


def all_actions(rows: Rows) -> list[Piece]:
    """Every sampled token of every row: what one pass for old and reference policies needs."""
    return pieces_of(rows, range(rows.turns))


@dataclass(frozen=True)
class Shapes:
    """The short list of shapes that batches are padded to: each is one compiled program.

    lengths: rising row lengths. action: action tokens of a row, at the most. rows: of a
    microbatch. microbatches: for a full set of rows. turns: of a trajectory, at the most.
    """

    lengths: tuple[int, ...]
    action: int
    rows: int
    microbatches: int
    turns: int = 1

    def length(self, tokens: int) -> int:
        """The smallest listed length that holds so many tokens.

        Raises:
          ValueError: none does.
        """
        if tokens > self.lengths[-1]:
            raise ValueError(
                f"a row has {tokens} tokens; allowed: at most {self.lengths[-1]}, the longest of"
                " config.batching.buckets or else rollout.max_context."
            )
        return next(length for length in self.lengths if length >= tokens)

    def long(self, tokens: int) -> int:
        """The same among the middle and the last length, for passes that run once a sweep."""
        middle = self.lengths[len(self.lengths) // 2]
        return middle if tokens <= middle else self.lengths[-1]


def turn_batch(
    rows: Rows,
    pieces: Sequence[Piece],
    shapes: Shapes,
    known: Mapping[str, Sequence[np.ndarray]],
    *,
    length: int,
    action: int,
) -> TurnBatch:
    """Pads pieces into a TurnBatch of host arrays.

    Args:
      known: what is known of every token, by the names of `TurnBatch` without their axes; one array
        a segment, aligned with its tokens.
      length, action: L and A of the batch; no piece is longer.
    """
    L, A = length, action
    # Segments can outnumber trajectories: whole multiples keep the list of shapes short.
    full = shapes.microbatches * shapes.rows
    M = shapes.microbatches * max(1, -(-len(pieces) // full))
    count = M * shapes.rows
    tokens = np.zeros((count, L), np.int32)
    position = np.ones((count, A), np.int32)
    mask = np.zeros((count, A), np.float32)
    padded = {name: np.zeros((count, A), _KINDS.get(name, np.float32)) for name in known}
    trajectory = np.full(count, rows.trajectories, np.int32)
    for row, piece in enumerate(pieces):
        size = piece.position_A.size
        tokens[row, : piece.end] = rows.tokens[piece.segment][: piece.end]
        position[row, :size] = piece.position_A
        mask[row, :size] = 1
        for name, source in known.items():
            padded[name][row, :size] = source[piece.segment][piece.position_A]
        trajectory[row] = rows.trajectory_S[piece.segment]
    fold = lambda x: x.reshape(M, shapes.rows, *x.shape[1:])  # noqa: E731
    used = np.int32(-(-len(pieces) // shapes.rows))
    return TurnBatch(
        *map(fold, (tokens, position, mask, trajectory)),
        microbatches=used,
        **{f"{name}_MRA": fold(array) for name, array in padded.items()},
    )


def refresh_batch(
    rows: Rows,
    batch: TurnBatch,
    pieces: Sequence[Piece],
    previous: Sequence[Piece],
    shapes: Shapes,
    old_logp: Sequence[np.ndarray],
) -> tuple[RefreshBatch, list[Piece]]:
    """The refresh that a step on `pieces` does for the step on `previous` before it.

    Returns: the refresh, aligned with `batch`, and the previous pieces that it cannot hold: those
      that do not continue a row of this step, all pieces of a trajectory that has several in one
      step (their ratios multiply first), and those longer than the shortest listed length.
    """
    row_of = {piece.segment: row for row, piece in enumerate(pieces)}
    alone = _alone(rows, pieces) & _alone(rows, previous)

    def continues(piece: Piece) -> bool:
        row = row_of.get(piece.segment)
        known = row is not None and piece.end > pieces[row].end
        return known and int(rows.trajectory_S[piece.segment]) in alone

    same = [piece for piece in previous if continues(piece)]
    left = [piece for piece in previous if not continues(piece)]
    M, R = batch.trajectory_MR.shape
    longest = [p.end - pieces[row_of[p.segment]].end + 1 for p in same]
    S, A = shapes.lengths[0], shapes.action
    tokens = np.zeros((M * R, S), np.int32)
    start = np.zeros(M * R, np.int32)
    position = np.ones((M * R, A), np.int32)
    mask, old = (np.zeros((M * R, A), np.float32) for _ in range(2))
    for piece, needed in zip(same, longest, strict=True):
        if needed > S:
            left.append(piece)
            continue
        row, size = row_of[piece.segment], piece.position_A.size
        start[row] = pieces[row].end - 1
        tokens[row, :needed] = rows.tokens[piece.segment][start[row] : piece.end]
        position[row, :size] = piece.position_A - start[row]
        mask[row, :size] = 1
        old[row, :size] = old_logp[piece.segment][piece.position_A]
    fold = lambda x: x.reshape(M, R, *x.shape[1:])  # noqa: E731
    return RefreshBatch(*map(fold, (tokens, start, position, mask, old))), left


def _alone(rows: Rows, pieces: Sequence[Piece]) -> set[int]:
    """The trajectories that have exactly one of these pieces."""
    count = Counter(int(rows.trajectory_S[piece.segment]) for piece in pieces)
    return {trajectory for trajectory, times in count.items() if times == 1}


def empty_batch(
    rows: Rows, shapes: Shapes, known: Sequence[str] = (), *, length: int, action: int
) -> TurnBatch:
    """A batch without any row, of the shapes that a real one would have.

    Args:
      known: names of what a real one knows of its tokens.
    """
    nothing: dict[str, list[np.ndarray]] = {name: [] for name in known}
    return turn_batch(rows, [], shapes, nothing, length=length, action=action)
