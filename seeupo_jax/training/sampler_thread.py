"""A sampler on devices of the trainer's process, in a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax

from seeupo_jax.agents.agent_tasks import AgentTasks
from seeupo_jax.configuration.schema import Config
from seeupo_jax.parallel.compiling import Between
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.rollout.asynchronous.local_work import LocalWork
from seeupo_jax.rollout.asynchronous.sampling_loop import SamplingLoop
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import PublishedPolicy
from seeupo_jax.rollout.watch import Watch
from seeupo_jax.rollout.weights.device_copy import copy_to
from seeupo_jax.training.sampler_parts import build_sampler


class SamplerThread:
    """Plays a book's tickets on devices that do not train; see `Samplers`.

    Args:
      policy: on the trainer's mesh. mesh: the sampler's.
      tasks: of the run, for agents.
      stop: whether the run was asked to stop.

    Raises:
      ValueError: as `build_sampler`.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        mesh: jax.sharding.Mesh,
        tasks: AgentTasks,
        book: TicketBook,
        *,
        stop: Callable[[], bool],
        log: Callable[[str], None],
    ):
        self._config, self._mesh, self._network, self._log = config, mesh, policy.network, log
        self._work = LocalWork(book, config.rollout.max_lag)
        frozen = self._copy(policy.frozen)
        self._policy = dataclasses.replace(policy, mesh=mesh, frozen=frozen)
        self._parts = build_sampler(config, self._policy, tasks, stop=stop, watch=Watch(), log=log)
        log(f"sampler on {mesh.size} devices of its own: {self._parts.engine.plan}")
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def compile(self, params: Any, between: Between) -> None:
        """See `Samplers`."""
        self._parts.engine.compile(self._policy.merged(self._copy(params)), between)

    def publish(self, params: Any, version: int) -> None:
        """See `Samplers`."""
        merged = self._policy.merged(self._copy(params))
        self._work.publish(PublishedPolicy(version, merged))
        if self._thread.ident is None:
            self._thread.start()

    def resume(self, version: int) -> None:
        """See `Samplers`; the policy has changed since, and nothing else holds it."""
        self._log(f"nothing is sampled until the sweep is over: policy {version} is gone")

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

    def _copy(self, params: Any) -> Any:
        int8 = self._config.rollout.quantize == "int8"
        return copy_to(params, self._network, self._mesh, int8=int8).params

    def _run(self) -> None:
        try:
            with contextlib.suppress(Stopped), jax.set_mesh(self._mesh):
                seed, max_lag = self._config.seed, self._config.rollout.max_lag
                SamplingLoop(self._parts.worker, self._work, seed=seed, max_lag=max_lag).run()
        except BaseException as error:  # the trainer's thread raises it
            self._error = error
