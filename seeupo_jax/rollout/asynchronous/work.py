"""What a rollout worker and its trainer exchange: tickets, finished episodes, policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from seeupo_jax.types import UNKNOWN_VERSION, Trajectory


@dataclass(frozen=True)
class Ticket:
    """A group to play: conversations of one task that begin alike.

    number: of the group, from 0, over the whole run. iteration: that trains on it, from 1.
    group: its number within that iteration.
    task_id: of its task. members: that are still to be played, as `EpisodeRequest.member` counts.
    """

    number: int
    iteration: int
    group: int
    task_id: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class FinishedMember:
    """A finished conversation of a ticket's group.

    trajectory: its `group` is the ticket's number until an iteration takes it.
    """

    number: int
    member: int
    trajectory: Trajectory


def versions_of(trajectory: Trajectory) -> set[int]:
    """The versions of the policies that sampled its tokens, as far as they are known."""
    of_segments = (segment.versions(trajectory.policy_version) for segment in trajectory.segments)
    return {int(version) for version_L in of_segments for version in np.unique(version_L)} - {
        UNKNOWN_VERSION
    }


class PublishedPolicy(NamedTuple):
    """The parameters that a sampler uses, all of them, and the number of sweeps behind them."""

    version: int
    params: Any


class WorkSource(Protocol):
    """A worker's view of its trainer: in its process, or over a connection.

    One thread calls all methods.
    """

    def lease(self, conversations: int) -> list[Ticket]:
        """The next tickets in the order of their numbers, whose members are at most so many.

        They are this worker's until it has delivered every member, or is lost. A ticket with more
        members than the worker can ever have open at once is leased as well, alone.
        """
        ...

    def deliver(self, finished: Sequence[FinishedMember], usage: Mapping[str, float]) -> None:
        """Hands over finished conversations.

        Args:
          usage: the worker's counts and seconds since the last delivery, by name.
        """
        ...

    def newer_policy(self, than: int | None) -> PublishedPolicy | None:
        """The newest published policy, if it is newer than version `than`; does not wait.

        Args:
          than: None: any.
        """
        ...

    @property
    def closed(self) -> bool:
        """Whether the run is over: there will be no more tickets."""
        ...
