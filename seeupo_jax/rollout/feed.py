"""Where a collection that is under way gets more episodes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from seeupo_jax.rollout.episode import EpisodeRequest

FEED_POLL_S = 0.05  # between looks at a feed while there is nothing else to do


class Feed(Protocol):
    """More requests for a collection; the thread that plays it calls all methods.

    The collection asks before each of its steps, so a feed may also change the engine's policy.
    """

    def more(self, room: int, wait_s: float) -> Sequence[EpisodeRequest]:
        """The requests to add now.

        Args:
          room: how many more conversations may be open than are open or wait to begin.
          wait_s: how long to wait at most for something to do; 0 unless the collection has nothing.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether no more will come: the collection ends once its episodes are over."""
        ...

    @property
    def version(self) -> int | None:
        """Sweeps behind the policy that samples now; None: unknown."""
        ...
