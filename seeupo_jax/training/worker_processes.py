"""Samplers in processes of their own (`--role=rollout`), which come to the trainer for work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.errors import WriteError
from seeupo_jax.parallel.compiling import Between
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.resume_check import sampling_hash
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work_server import WorkServer
from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.versions import FOLDER, versions

_REMIND_S = 60.0  # between two lines that no worker is there


class WorkerProcesses:
    """Serves a ticket book to worker processes, and publishes policies as files; see `Samplers`.

    Args:
      book: whose tickets they play; only that of process 0 has any.

    Raises:
      ValueError: the address cannot be listened on.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        policy: Policy,
        book: TicketBook,
        log: Callable[[str], None],
    ):
        self._config, self._workdir, self._policy = config, workdir, policy
        self._book, self._log, self._server = book, log, None
        self._remind_at = 0.0
        self._finishing: threading.Thread | None = None
        if jax.process_index() == 0:
            self._server = WorkServer(
                book,
                workdir,
                sampling_hash(config),
                max_lag=config.rollout.max_lag,
                log=log,
            )
            address = self._server.start(config.rollout.host, config.rollout.port or 0)
            log(f"workers get their work at {address}")

    def compile(self, params: Any, between: Between) -> None:
        """Nothing: workers compile their own programs."""

    def publish(self, params: Any, version: int) -> None:
        """See `Samplers`.

        Raises:
          WriteError: it could not be written; the trajectories of later iterations need it.
        """
        int8 = self._config.rollout.quantize == "int8"
        published = publish(
            self._workdir / FOLDER, params, version, self._policy.network, int8=int8
        )
        if published.failure is not None:
            raise WriteError(published.failure)
        if self._server is not None:
            self._server.publish(version)

    def resume(self, version: int) -> None:
        """See `Samplers`; its files are there unless the folder was emptied."""
        if self._server is not None and version in versions(self._workdir / FOLDER):
            self._server.publish(version)

    def metrics(self) -> Mapping[str, float]:
        """See `Samplers`."""
        return {}

    def check(self) -> None:
        """Says once a minute that no worker is there while the trainer waits for one."""
        now = time.monotonic()
        if self._book.counts().workers:
            self._remind_at = 0.0
        elif now >= self._remind_at:
            self._remind_at = now + _REMIND_S
            self._log(
                "waiting for workers, of which none is there; to start one, on this machine or"
                f" another: seeupo-train --role=rollout --workdir={self._workdir} and this run's"
                " --config"
            )

    def finish(self) -> None:
        """See `Samplers`; in the background, since workers take a moment to ask."""
        if self._server is not None and self._finishing is None:
            self._finishing = threading.Thread(target=self._server.finish, name="finish workers")
            self._finishing.start()

    def close(self) -> None:
        """See `Samplers`; workers wait for the next trainer unless the run is over."""
        if self._finishing is not None:
            self._finishing.join()
        if self._server is not None:
            self._server.close()
