"""The environment's view of turns: the state before each, and whether its action was executed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from seeupo_jax.types import CONTEXT, Segment, Trajectory

# Keys of `info`: the states that an environment names, and which actions it executed.
NAMES, EXECUTED = "states", "executed"


def turn_states(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """The state that each turn began from; equal numbers are equal states.

    A state is named by the environment, if `info["states"]` lists one before each of its steps so
    far. Otherwise it is the context tokens between the previous action and this one; for the first
    action of a segment, all tokens before it.

    Returns: int32 [N, K], K of the longest trajectory; -1 where there is no such turn, and for all
      turns of a trajectory that failed.

    Raises:
      ValueError: an environment named another number of states than there are turns.
    """
    shape = len(trajectories), max((t.turns for t in trajectories), default=0)
    state_NK = np.full(shape, -1, np.int32)
    numbers: dict[str | bytes, int] = {}
    for row, trajectory in enumerate(trajectories):
        for turn, state in () if trajectory.failed else _states(trajectory):
            state_NK[row, turn] = numbers.setdefault(state, len(numbers))
    return state_NK


def executed_turns(trajectory: Trajectory) -> Sequence[bool]:
    """For each turn whether its action was executed; True if the environment does not report it.

    `info["executed"]` lists it for each of its steps so far. A step that hung was not executed.

    Raises:
      ValueError: it lists another number of turns than there are, or something else.
    """
    if EXECUTED not in trajectory.info:
        return [True] * trajectory.turns
    named = of_steps(trajectory, EXECUTED, bool, "True and False")
    return [*named, *[False] * (trajectory.turns - len(named))]


def _states(trajectory: Trajectory) -> Iterator[tuple[int, str | bytes]]:
    """Each turn and its state's name, or the bytes of its tokens."""
    read = (pair for segment in trajectory.segments for pair in _read(segment))
    if NAMES not in trajectory.info:
        return read
    names = of_steps(trajectory, NAMES, str, "texts")
    # A step that hung named no state: the tokens read before it are its state.
    return itertools.chain(enumerate(names), (pair for pair in read if pair[0] >= len(names)))


def of_steps(trajectory: Trajectory, name: str, kind: type, words: str) -> Sequence[Any]:
    """The list `info[name]` with one entry per step; a last step that hung may have none.

    Args:
      kind, words: the elements of the list, as a type and in words.

    Raises:
      ValueError: another number of them than there are turns, or something else.
    """
    given, turns = trajectory.info[name], trajectory.turns
    listed = isinstance(given, list | tuple) and all(isinstance(one, kind) for one in given)
    if not listed or len(given) not in (turns, turns - trajectory.timeout_counts):
        got = f"{len(given)} of them" if listed else repr(given)
        raise ValueError(
            f'info["{name}"] of task {trajectory.task_id!r}: got {got}; allowed: a list of {words},'
            f" one for each of its {turns} turns."
        )
    return given


def _read(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """Each turn of a segment, with the bytes of the context read just before it."""
    turn_L, tokens_L = segment.turn_L, np.asarray(segment.tokens_L, np.int32)
    begins = np.flatnonzero(np.diff(turn_L, prepend=CONTEXT))
    ends = np.flatnonzero(np.diff(turn_L, append=CONTEXT)) + 1
    begins, ends = begins[turn_L[begins] != CONTEXT], ends[turn_L[ends - 1] != CONTEXT]
    for begin, previous in zip(begins, [0, *ends], strict=False):
        yield int(turn_L[begin]), tokens_L[previous:begin].tobytes()
