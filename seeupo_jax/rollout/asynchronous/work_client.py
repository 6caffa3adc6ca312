"""A worker's connection to its trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seeupo_jax.rollout.asynchronous.work import FinishedMember, PublishedPolicy, Ticket

_LOGGER = logging.getLogger(__name__)


class TrainerLost(RuntimeError):
    """The trainer was not reached within the patience; the text is a sentence."""

    exit_code = 1


class WorkClient:
    """A `WorkSource` of a trainer in another process, which may be restarted meanwhile.

    Every method but `close` waits while the trainer is away, for `patience_s` at most, and raises
    `TrainerLost` then, or ValueError where the trainer refuses this worker (one sentence).

    Args:
      workdir: of the trainer, where WORKDIR/workers.json tells its address and key, and where
        WORKDIR/weights may be read; None: not shared with it.
      address: http://HOST:PORT where the workdir is not shared; the key is SEEUPO_ROLLOUT_KEY then.
      name: for logs; workers of one name are told apart.
      sampling_hash: of this worker's configuration.
      read_policy: the parameters of a folder WORKDIR/weights/VERSION.
      downloads: a folder for weights where the trainer's is not shared.
    """

    def __init__(
        self,
        *,
        workdir: Path | None = None,
        address: str | None = None,
        name: str,
        sampling_hash: str,
        read_policy: Callable[[Path], Any],
        downloads: Path,
        patience_s: float = 600.0,
        log: Callable[[str], None] = _LOGGER.warning,
    ): ...

    def lease(self, conversations: int) -> list[Ticket]:
        """See `WorkSource`."""
        raise NotImplementedError

    def deliver(self, finished: Sequence[FinishedMember], usage: Mapping[str, float]) -> None:
        """See `WorkSource`; acknowledged when it returns."""
        raise NotImplementedError

    def newer_policy(self, than: int | None) -> PublishedPolicy | None:
        """See `WorkSource`; after a restart of the trainer its version may be lower than `than`."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether the run is over; asks the trainer at most once a second."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives back what is leased, and ends the thread that reports that this worker lives."""
        raise NotImplementedError
