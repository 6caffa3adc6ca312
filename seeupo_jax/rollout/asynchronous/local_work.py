"""Work for a sampler in the trainer's own process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import FinishedMember, PublishedPolicy, Ticket

_NAME = "this process"  # of the worker, in the book


class LocalWork:
    """A `WorkSource` over a ticket book, for one sampler; the trainer calls `publish` and `close`.

    Args:
      max_lag: a sampler with version v plays iterations up to v + max_lag + 1.
    """

    def __init__(self, book: TicketBook, max_lag: int):
        self._book, self._max_lag = book, max_lag
        self._lock = threading.Lock()  # guards the next
        self._newest: PublishedPolicy | None = None
        self._used: int | None = None  # the version that the sampler was given last
        self._closed = False

    def publish(self, policy: PublishedPolicy) -> None:
        """Offers a policy, in place of the one before."""
        with self._lock:
            self._newest = policy

    def close(self) -> None:
        """There will be no more tickets."""
        self._closed = True

    def lease(self, conversations: int) -> list[Ticket]:
        """See `WorkSource`."""
        if self._closed or self._used is None:
            return []
        return self._book.lease(_NAME, conversations, self._used + self._max_lag + 1)

    def deliver(self, finished: Sequence[FinishedMember], usage: Mapping[str, float]) -> None:
        """See `WorkSource`."""
        self._book.deliver(_NAME, finished, usage)

    def newer_policy(self, than: int | None) -> PublishedPolicy | None:
        """See `WorkSource`; each policy once."""
        with self._lock:
            newest, self._newest = self._newest, None  # its parameters are the sampler's now
        if newest is not None:
            self._used = newest.version
        return newest

    @property
    def closed(self) -> bool:
        """See `WorkSource`."""
        return self._closed
