"""A source of work behind a connection, of which no call holds the sampler up."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from seeupo_jax.rollout.asynchronous.work import (
    FinishedMember,
    PublishedPolicy,
    Ticket,
    WorkSource,
)

_POLL_S = 0.25  # between questions for tickets and for a newer policy
_LAST_DELIVERY_S = 3.0  # how long `close` waits until all is delivered


class ClosableSource(WorkSource, Protocol):
    """A `WorkSource` that is closed once, by another thread than the one that calls it."""

    def close(self) -> None: ...


class BackgroundSource:
    """A `WorkSource` whose calls return at once; a thread of its own calls another one.

    So conversations under way go on while the trainer is away, and while weights are read. An error
    of the other source is raised by the next call of any method.

    Args:
      source: its calls may take long. Only the thread calls it.
    """

    def __init__(self, source: ClosableSource):
        self._source = source
        self._changed = threading.Condition()  # guards all that follows
        self._wanted = 0  # conversations to lease tickets for
        self._tickets: list[Ticket] = []  # leased, to be handed out
        self._finished: list[FinishedMember] = []  # to be delivered
        self._usage: Counter[str] = Counter()
        self._version: int | None = None  # of the policy that came last
        self._policy: PublishedPolicy | None = None  # to be handed out
        self._closed = self._ending = self._sending = False
        self._error: Exception | None = None
        # Daemon: a call that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="work", daemon=True)
        self._thread.start()

    def lease(self, conversations: int) -> list[Ticket]:
        """Those that have come since an earlier call asked; more are asked for."""
        with self._changed:
            self._check()
            tickets, self._tickets = self._tickets, []
            came = sum(len(ticket.members) for ticket in tickets)
            self._wanted = max(0, conversations - came)
            self._changed.notify_all()
            return tickets

    def deliver(self, finished: Sequence[FinishedMember], usage: Mapping[str, float]) -> None:
        """As of `WorkSource`, later."""
        with self._changed:
            self._check()
            self._finished += finished
            self._usage.update(usage)
            self._changed.notify_all()

    def newer_policy(self, than: int | None) -> PublishedPolicy | None:
        """The newest that has come, unless it was handed out before."""
        with self._changed:
            self._check()
            policy, self._policy = self._policy, None
            return policy

    @property
    def closed(self) -> bool:
        with self._changed:
            self._check()
            return self._closed

    def close(self) -> None:
        """Delivers what is finished, for some seconds at most, and closes the other source."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            self._changed.wait_for(self._is_through, _LAST_DELIVERY_S)
        self._source.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _is_through(self) -> bool:
        over = self._closed or self._error is not None
        return over or not (self._finished or self._sending)

    def _run(self) -> None:
        try:
            while not self._closed and self._exchange():
                pass
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _exchange(self) -> bool:
        """Asks and delivers once; returns whether there may be more to do."""
        began = time.monotonic()
        self._send()
        with self._changed:
            wanted = 0 if self._ending else self._wanted
            takes = self._policy is None and not self._ending  # one at a time is in memory
        tickets = self._source.lease(wanted) if wanted else []
        policy = self._source.newer_policy(self._version) if takes else None
        closed = self._source.closed
        with self._changed:
            self._tickets += tickets
            self._wanted = 0 if tickets else self._wanted
            if policy is not None:
                self._policy, self._version = policy, policy.version
            self._closed = closed
            self._changed.notify_all()

            def is_due() -> bool:
                return bool(self._finished or self._ending or (self._wanted and not wanted))

            self._changed.wait_for(is_due, max(0.0, began + _POLL_S - time.monotonic()))
            return not (self._ending and not self._finished)

    def _send(self) -> None:
        with self._changed:
            if not self._finished:
                return
            finished, self._finished, self._sending = self._finished, [], True
            usage, self._usage = self._usage, Counter[str]()
        self._source.deliver(finished, usage)
        with self._changed:
            self._sending = False
            self._changed.notify_all()
