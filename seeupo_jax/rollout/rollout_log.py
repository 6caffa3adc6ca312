"""The write-ahead log of an iteration: each finished trajectory as soon as it is delivered."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from seeupo_jax.types import Trajectory

_LOGGER = logging.getLogger(__name__)


class LoggedMember(NamedTuple):
    """A finished trajectory of an iteration.

    group: from 0. sampled_by: fingerprints of the policies that sampled it, by their versions.
    """

    group: int
    member: int
    trajectory: Trajectory
    sampled_by: Mapping[int, str]


class LoggedIteration(NamedTuple):
    """What is stored of an iteration: the task of each group, and by group and member the rest."""

    tasks: tuple[str, ...]
    trajectories: dict[tuple[int, int], Trajectory]
    origins: dict[tuple[int, int], Mapping[int, str]]


class RolloutLog:
    """Append-only files by iteration, in the folder of `RolloutStore`; only process 0 uses it."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sampling_hash: str,
        *,
        log: Callable[[str], None] = _LOGGER.warning,
    ): ...

    def begin(self, iteration: int, tasks: Sequence[str]) -> None:
        """Begins a new file for an iteration whose tasks are drawn; an older one is replaced."""
        raise NotImplementedError

    def append(self, iteration: int, members: Sequence[LoggedMember]) -> None:
        """Writes members; they are on the disk when it returns, or one sentence was logged."""
        raise NotImplementedError

    def load(self, iteration: int) -> LoggedIteration | None:
        """What is stored of an iteration, to the bit; `append` goes on behind it.

        None: nothing, or of other sampling settings, with a sentence; then `begin` it.
        """
        raise NotImplementedError

    def remove(self, iteration: int) -> None:
        """Removes an iteration's file: its `.rollouts` file is on the disk."""
        raise NotImplementedError

    def forget(self, up_to_iteration: int) -> None:
        """Removes the files of all iterations up to this one."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the files."""
        raise NotImplementedError
