"""Which of a trajectory's actions its environment could execute."""

from __future__ import annotations

from collections.abc import Sequence

from seeupo_jax.types import Trajectory

EXECUTED = "executed"  # of `info`: where an environment says which


def executed_turns(trajectory: Trajectory) -> Sequence[bool]:
    """Of each turn whether its action was executed; True where the environment does not say.

    `info["executed"]` lists it for each of its steps so far. A step that hung was not executed.

    Raises:
      ValueError: it lists another number of turns than there are, or something else.
    """
    turns = trajectory.turns
    if EXECUTED not in trajectory.info:
        return [True] * turns
    named = trajectory.info[EXECUTED]
    flags = isinstance(named, list | tuple) and all(isinstance(flag, bool) for flag in named)
    if not flags or len(named) not in (turns, turns - trajectory.timeout_counts):
        got = f"{len(named)} of them" if flags else repr(named)
        raise ValueError(
            f'info["{EXECUTED}"] of task {trajectory.task_id!r}: got {got}; allowed: a list of'
            f" True and False, one for each of its {turns} turns."
        )
    return [*named, *[False] * (turns - len(named))]
