"""Information gain: the rise in probability of the task's reference answer by each turn.

b_t = exp(mean log π of the answer's tokens) behind the context of turn t, under the policy that
begins the sweep; the gain of turn t is b_(t+1) - b_t (IGPO, arXiv:2510.14967). The answers are
branches of the trajectories' token trees: one pass computes them, and each token that they share
with the trajectories once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from seeupo_jax.learner.batching import (
    ActionSpan,
    Layout,
    SegmentBatch,
    Shapes,
    lay_out,
    turn_batch,
)
from seeupo_jax.types import CONTEXT, Segment, Trajectory, TurnBatch


class AnswerTokens(NamedTuple):
    """A reference answer as the closing message of a conversation.

    tokens_L: int32, up to the answer's last one. scored_L: bool, True at the answer's own.
    """

    tokens_L: np.ndarray
    scored_L: np.ndarray


# By task; a task without one has no gains.
References = Mapping[str, AnswerTokens]


class Branches(NamedTuple):
    """Contexts of turns, each followed by the answer; index B.

    rows: the sweep's segments, followed by one for each branch. spans: the answers' own tokens.
    trajectory_B, turn_B: the trajectory and the turn of the context.
    """

    rows: SegmentBatch
    spans: list[ActionSpan]
    trajectory_B: list[int]
    turn_B: list[int]


def answer_branches(
    rows: SegmentBatch, trajectories: Sequence[Trajectory], references: References, shapes: Shapes
) -> Branches:
    """A branch for every turn's context, where a row has room for the answer.

    An answer that is longer than the longest trajectory has no branch.
    """
    tokens: list[np.ndarray] = []
    experts: list[np.ndarray] = []
    branches = Branches(rows, [], [], [])
    group_of = dict(zip(rows.trajectory_S.tolist(), rows.group_S.tolist(), strict=True))
    for owner in group_of:
        answer = references.get(trajectories[owner].task_id)
        if answer is None or np.count_nonzero(answer.scored_L) > shapes.longest:
            continue
        for turn, context in _contexts(trajectories[owner]):
            start = len(context.tokens_L)
            end = start + answer.tokens_L.size
            if start == 0 or end > shapes.lengths[-1]:
                continue
            position_A = start + np.flatnonzero(answer.scored_L)
            branches.spans.append(ActionSpan(len(rows.tokens) + len(tokens), position_A))
            branches.trajectory_B.append(owner)
            branches.turn_B.append(turn)
            tokens.append(np.concatenate([context.tokens_L, answer.tokens_L]))
            if rows.experts is not None:  # nothing sampled the answer
                none = rows.experts.unknown(answer.tokens_L.size)
                experts.append(np.concatenate([context.expert_LG, none]))
    no_actions = [np.full(len(tokens_L), CONTEXT, np.int32) for tokens_L in tokens]
    owner_B = np.array(branches.trajectory_B, np.int32)
    group_B = np.array([group_of[owner] for owner in branches.trajectory_B], np.int32)
    more = dataclasses.replace(
        rows,
        masked_S=None,  # of no concern to scores
        tokens=(*rows.tokens, *tokens),
        turn=(*rows.turn, *no_actions),
        logp=(*rows.logp, *(np.zeros(len(tokens_L), np.float32) for tokens_L in tokens)),
        trajectory_S=np.concatenate([rows.trajectory_S, owner_B]),
        group_S=np.concatenate([rows.group_S, group_B]),
        experts=None if rows.experts is None else rows.experts.with_more(experts),
    )
    return branches._replace(rows=more)


def _contexts(trajectory: Trajectory) -> Iterator[tuple[int, Segment]]:
    """Each turn, and the context of its action."""
    for segment in trajectory.segments:
        for turn in np.unique(segment.turn_L[segment.turn_L != CONTEXT]).tolist():
            yield turn, segment.until(int((segment.turn_L == turn).argmax()))


def branch_batch(
    branches: Branches, spans: Sequence[ActionSpan], shapes: Shapes
) -> tuple[TurnBatch, list[tuple[int, int]], Layout]:
    """A batch of the sweep's spans, one in each row of [P, A], followed by the answers.

    Returns: the batch; where in [P, A] each answer begins; and how the batch is laid out.
    """
    layout = lay_out(branches.rows, [*spans, *branches.spans], shapes, shapes.long)
    span_slots = [(place, 0) for place in range(len(spans))]
    row, column = shapes.spans(len(spans)), 0
    for span in branches.spans:
        size = span.position_A.size
        if column + size > shapes.longest:
            row, column = row + 1, 0
        span_slots.append((row, column))
        column += size
    batch = turn_batch(
        branches.rows,
        layout,
        shapes,
        {},
        action=shapes.longest,
        span_slots=span_slots,
        copies=2,
    )
    return batch, span_slots[len(spans) :], layout


def information_gain(
    branches: Branches,
    span_slots: Sequence[tuple[int, int]],
    logp_PA: np.ndarray,
    trajectories: Sequence[Trajectory],
) -> list[np.ndarray]:
    """The gain of each turn, float32 [K] of every trajectory; NaN where an end was not scored.

    The last turn has none: no context follows it.
    """
    progress = [np.full(t.turns + 1, np.nan) for t in trajectories]  # b
    for place, (row, column) in enumerate(span_slots):
        logp_A = logp_PA[row, column : column + branches.spans[place].position_A.size]
        progress[branches.trajectory_B[place]][branches.turn_B[place]] = np.exp(
            np.mean(logp_A, dtype=np.float64)
        )
    return [np.diff(b_K).astype(np.float32) for b_K in progress]


def describe_gains(gains: Sequence[np.ndarray], rows: SegmentBatch) -> dict[str, float]:
    """The mean gain of a turn, and the share of the turns with a next one that have a gain."""
    included = [gains[owner][:-1] for owner in np.unique(rows.trajectory_S)]
    gain_M = np.concatenate([*included, np.zeros(0, np.float32)])
    scored_M = ~np.isnan(gain_M)
    some = bool(scored_M.any())
    return {
        "sweep/gain_mean": float(gain_M[scored_M].mean()) if some else float("nan"),
        "sweep/gain_scored": float(scored_M.mean()) if gain_M.size else float("nan"),
    }
