"""Roles of an episode: each one's part of a trajectory, and roles that are not trained."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from seeupo_jax.trajectories.states import EXECUTED, NAMES
from seeupo_jax.types import CONTEXT, HISTORY, RewardRow, RewardTable, Segment, Trajectory


def turn_roles(trajectory: Trajectory) -> list[str]:
    """The role of each turn, in order."""
    roles = [""] * trajectory.turns
    for segment in trajectory.segments:
        for turn in np.unique(segment.turn_L[segment.turn_L != CONTEXT]).tolist():
            roles[turn] = segment.role
    return roles


def played_role(trajectory: Trajectory) -> str:
    """The role of the first turn."""
    return next(iter(turn_roles(trajectory)), "")


def rewards_by_role(trajectory: Trajectory) -> dict[str, float]:
    """The reward of each role that has a turn: the episode's, which all share, and its own."""
    own = trajectory.reward_table.roles
    roles = dict.fromkeys(turn_roles(trajectory) or [""])
    return {role: trajectory.reward + own.get(role, 0.0) for role in roles}


def role_views(trajectories: Sequence[Trajectory], roles: Sequence[str]) -> list[Trajectory]:
    """Each trajectory as each role played it, N x R, the roles of one trajectory side by side.

    A view has the segments, the turns and the reward of its role; its group is of that role alone.
    One of a role without a turn is a failure, which no statistic counts.

    Args:
      roles: of the policy that is trained, each once.
    """
    return [
        _view(trajectory, roles, number)
        for trajectory in trajectories
        for number in range(len(roles))
    ]


def role_number(segment: Segment, roles: Sequence[str]) -> int:
    """The view that a segment is in; one of a frozen role, which has no turn, is in the first."""
    return roles.index(segment.role) if segment.role in roles else 0


def _view(trajectory: Trajectory, roles: Sequence[str], number: int) -> Trajectory:
    role, group = roles[number], trajectory.group * len(roles) + number
    own = [turn for turn, each in enumerate(turn_roles(trajectory)) if each == role]
    segments = tuple(s for s in trajectory.segments if role_number(s, roles) == number)
    table = RewardTable(trajectory.reward_table.total)
    view = replace(trajectory, segments=segments, reward_table=table, parent=None, fork=0)
    view = replace(view, group=group, stop=trajectory.stop if own else "env_error")
    extra = trajectory.reward_table.roles.get(role, 0.0)
    return replace(
        _of_turns(view, trajectory.turns, own),
        reward_table=_of_own_turns(table, own).plus(extra),
    )


def without_frozen(trajectory: Trajectory, frozen: Collection[str]) -> Trajectory:
    """A trajectory whose turns are those of the trained roles; the others' tokens are context.

    The reward of a frozen role's turn is added to the trained turn before it, or to the first one;
    its messages are marked as no turns.

    Args:
      frozen: the roles that are not trained.
    """
    if not any(segment.role in frozen for segment in trajectory.segments):
        return trajectory
    own = [turn for turn, role in enumerate(turn_roles(trajectory)) if role not in frozen]
    return replace(
        _of_turns(trajectory, trajectory.turns, own),
        reward_table=_of_own_turns(trajectory.reward_table, own),
        messages=tuple(_marked(message, frozen) for message in trajectory.messages),
    )


def _marked(message: dict[str, str], frozen: Collection[str]) -> dict[str, str]:
    is_turn = message["role"] == "assistant" and message.get("name") in frozen
    return {HISTORY: "frozen", **message} if is_turn else message


def _of_turns(trajectory: Trajectory, turns: int, own: Sequence[int]) -> Trajectory:
    """The trajectory with its own of so many turns, counted from 0; the others are context."""
    number_K = np.full(turns + 1, CONTEXT, np.int32)  # the last one: of context
    number_K[own] = np.arange(len(own))
    info = dict(trajectory.info)
    for name in (NAMES, EXECUTED):
        if name in info:
            info[name] = [info[name][turn] for turn in own if turn < len(info[name])]
    segments = tuple(_renumbered(segment, number_K) for segment in trajectory.segments)
    return replace(trajectory, segments=segments, info=info)


def _renumbered(segment: Segment, number_K: np.ndarray) -> Segment:
    turn_L = number_K[segment.turn_L]
    logp_L = np.where(turn_L == CONTEXT, np.float32(0), segment.logp_L)
    return replace(segment, turn_L=turn_L, logp_L=logp_L)


def _of_own_turns(table: RewardTable, own: Sequence[int]) -> RewardTable:
    def merged(row: RewardRow) -> RewardRow:
        return row if row.turns is None else row._replace(turns=_merged(row.turns, own))

    named = {name: merged(row) for name, row in table.named.items()}
    return replace(table, total=merged(table.total), named=named)


def _merged(rewards: Sequence[Any], own: Sequence[int]) -> tuple[float, ...]:
    """Rewards of own turns; another turn's is added to the own one before it, or to the first."""
    merged = [0.0] * len(own)
    for turn, reward in enumerate(rewards if own else ()):
        merged[max(0, bisect.bisect_right(own, turn) - 1)] += reward
    return tuple(merged)
