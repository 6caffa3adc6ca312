"""Which turns of an iteration began from the same state of their environment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from seeupo_jax.types import CONTEXT, Segment, Trajectory

NAMES = "states"  # of `info`: where an environment names the states itself


def turn_states(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """The state that each turn began from; equal numbers are equal states.

    A state is the context tokens between the action before and this one, or before the first one of
    a segment all of them; or what the environment names it: `info["states"]` lists the states
    before each of its steps so far.

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


def _states(trajectory: Trajectory) -> Iterator[tuple[int, str | bytes]]:
    """Each turn and its state's name, or the bytes of its tokens."""
    read = (pair for segment in trajectory.segments for pair in _read(segment))
    if NAMES not in trajectory.info:
        return read
    names = _named(trajectory)
    # A step that hung named no state: there it is what was read.
    return itertools.chain(enumerate(names), (pair for pair in read if pair[0] >= len(names)))


def _named(trajectory: Trajectory) -> Sequence[str]:
    names, turns = trajectory.info[NAMES], trajectory.turns
    texts = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not texts or len(names) not in (turns, turns - trajectory.timeout_counts):
        got = f"{len(names)} names" if texts else repr(names)
        raise ValueError(
            f'info["{NAMES}"] of task {trajectory.task_id!r}: got {got}; allowed: a list of texts,'
            f" one for each of its {turns} turns."
        )
    return names


def _read(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """Each turn of a segment, and the bytes of what was read just before it."""
    turn_L, tokens_L = segment.turn_L, np.asarray(segment.tokens_L, np.int32)
    begins = np.flatnonzero(np.diff(turn_L, prepend=CONTEXT))
    ends = np.flatnonzero(np.diff(turn_L, append=CONTEXT)) + 1
    begins, ends = begins[turn_L[begins] != CONTEXT], ends[turn_L[ends - 1] != CONTEXT]
    for begin, previous in zip(begins, [0, *ends], strict=False):
        yield int(turn_L[begin]), tokens_L[previous:begin].tobytes()
