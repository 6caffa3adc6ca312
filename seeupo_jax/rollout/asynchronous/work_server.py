"""The trainer's side of its workers' connections: tickets and weights over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook

_LOGGER = logging.getLogger(__name__)
KEY_VARIABLE = "SEEUPO_ROLLOUT_KEY"


class WorkServer:
    """Serves a ticket book to workers, in threads of its own, from `start` to `close`.

    Args:
      book: whose tickets are leased; lost workers are removed from it.
      workdir: WORKDIR/workers.json is written there, and WORKDIR/weights/VERSION/ is served.
      sampling_hash: of the run; a worker with another one is refused.
      patience_s: a worker that is not heard for so long is lost.
    """

    def __init__(
        self,
        book: TicketBook,
        workdir: Path,
        sampling_hash: str,
        *,
        patience_s: float = 60.0,
        log: Callable[[str], None] = _LOGGER.warning,
    ): ...

    def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens, and writes WORKDIR/workers.json: {"address": "http://HOST:PORT", "key": ...}.

        Raises:
          ValueError: the address is not available.
        """
        raise NotImplementedError

    def publish(self, version: int, identity: str) -> None:
        """Offers WORKDIR/weights/VERSION/, which is complete, to all workers.

        Args:
          identity: fingerprint of the parameters. After a restart of the trainer, equal versions
            may have other parameters.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """The run is over: `closed` is true for every worker that asks from now on."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all threads and connections, and removes WORKDIR/workers.json."""
        raise NotImplementedError
