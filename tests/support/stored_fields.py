"""Trajectories that differ from others in some fields."""

from typing import Any

from seeupo_jax.types import Trajectory


def with_fields(trajectory: Trajectory, **fields: Any) -> Trajectory:
    """The trajectory with other values of some stored fields, such as its rewards."""
    return Trajectory.of(**(trajectory.stored_fields() | fields))
