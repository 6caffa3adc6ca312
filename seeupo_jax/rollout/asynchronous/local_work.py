"""Work for a sampler in the trainer's own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import FinishedMember, PublishedPolicy, Ticket

NAME = "this process"  # of the worker, in the book


class LocalWork:
    """A `WorkSource` over a ticket book; the trainer calls `publish` and `close`."""

    def __init__(self, book: TicketBook):
        self._book = book
        self._newest: PublishedPolicy | None = None
        self._used: int | None = None  # the version that the worker was given last
        self._closed = False

    def publish(self, policy: PublishedPolicy) -> None:
        """Offers a policy, in place of the one before."""
        self._newest = policy

    def close(self) -> None:
        """There will be no more tickets."""
        self._closed = True

    def lease(self, conversations: int) -> list[Ticket]:
        """See `WorkSource`; none while a newer policy waits, which must begin what is admitted."""
        newest = self._newest
        if self._closed or newest is None or newest.version != self._used:
            return []
        return self._book.lease(NAME, conversations)

    def deliver(self, finished: Sequence[FinishedMember], usage: Mapping[str, float]) -> None:
        """See `WorkSource`."""
        self._book.deliver(NAME, finished, usage)

    def newer_policy(self, than: int | None) -> PublishedPolicy | None:
        """See `WorkSource`."""
        newest = self._newest
        if newest is None or (than is not None and newest.version <= than):
            return None
        self._used = newest.version
        return newest

    @property
    def closed(self) -> bool:
        """See `WorkSource`."""
        return self._closed
