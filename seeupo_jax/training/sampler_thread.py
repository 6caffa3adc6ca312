"""A sampler in a thread of the trainer's process, beside training."""

from __future__ import annotations

import contextlib
import threading

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.rollout.asynchronous.local_work import LocalWork
from seeupo_jax.rollout.asynchronous.sampling_loop import SamplingLoop
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import PublishedPolicy
from seeupo_jax.training.sampler_parts import SamplerParts


class SamplerThread:
    """Plays a book's tickets with the policies that it is offered; the part of `Samplers` that
    does not depend on where they are sampled.

    Args:
      parts: what samples; nothing else uses them. mesh: of their devices.
    """

    def __init__(
        self, config: Config, parts: SamplerParts, mesh: jax.sharding.Mesh, book: TicketBook
    ):
        self._config, self._parts, self._mesh = config, parts, mesh
        self._work = LocalWork(book, config.rollout.max_lag)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def offer(self, policy: PublishedPolicy) -> None:
        """Lets it sample with a policy from now on; begins with the first one."""
        self._work.publish(policy)
        if self._thread.ident is None:
            self._thread.start()

    def check(self) -> None:
        """Raises the error that ended the thread."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """See `Samplers`."""
        self._work.close()

    def close(self) -> None:
        """See `Samplers`."""
        self._work.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._parts.close()

    def _run(self) -> None:
        try:
            with contextlib.suppress(Stopped), jax.set_mesh(self._mesh):
                seed, max_lag = self._config.seed, self._config.rollout.max_lag
                SamplingLoop(self._parts.worker, self._work, seed=seed, max_lag=max_lag).run()
        except BaseException as error:  # the trainer's thread raises it
            self._error = error
