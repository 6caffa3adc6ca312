"""Segments and trajectories as credit is assigned to them: those of each role apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.trajectories.roles import role_number, role_views, turn_roles
from seeupo_jax.types import CONTEXT, Trajectory


def by_role(
    rows: SegmentBatch, trajectories: Sequence[Trajectory], roles: Sequence[str]
) -> tuple[SegmentBatch, Sequence[Trajectory]]:
    """The same segments in the same order, whose trajectories are those of `role_views`.

    Args:
      roles: as of `Learner`; without any nothing changes.
    """
    if not roles:
        return rows, trajectories
    owners = rows.trajectory_S.tolist()
    played = dict.fromkeys(owners)
    segments = [segment for i in played for segment in trajectories[i].segments]
    role_S = np.array([role_number(segment, roles) for segment in segments], np.int32)
    numbers = {i: _turns_by_role(trajectories[i]) for i in played}
    split = replace(
        rows,
        turn=tuple(numbers[i][turn_L] for i, turn_L in zip(owners, rows.turn, strict=True)),
        trajectory_S=rows.trajectory_S * len(roles) + role_S,
        trajectories=rows.trajectories * len(roles),
    )
    return split, role_views(trajectories, roles)


def _turns_by_role(trajectory: Trajectory) -> np.ndarray:
    """The index of each turn among its role's, int32 [K + 1]; the last one is of context."""
    roles = turn_roles(trajectory)
    among = [roles[:turn].count(role) for turn, role in enumerate(roles)]
    return np.array([*among, CONTEXT], np.int32)
