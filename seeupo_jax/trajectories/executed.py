"""Which of a trajectory's actions its environment could execute."""

from __future__ import annotations

from collections.abc import Sequence

from seeupo_jax.trajectories.states import of_steps
from seeupo_jax.types import Trajectory

EXECUTED = "executed"  # of `info`: where an environment says which


def executed_turns(trajectory: Trajectory) -> Sequence[bool]:
    """Of each turn whether its action was executed; True where the environment does not say.

    `info["executed"]` lists it for each of its steps so far. A step that hung was not executed.

    Raises:
      ValueError: it lists another number of turns than there are, or something else.
    """
    if EXECUTED not in trajectory.info:
        return [True] * trajectory.turns
    named = of_steps(trajectory, EXECUTED, bool, "True and False")
    return [*named, *[False] * (trajectory.turns - len(named))]
