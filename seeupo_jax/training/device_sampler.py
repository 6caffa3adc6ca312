"""A sampler on devices of the trainer's process that do not train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from seeupo_jax.agents.agent_tasks import AgentTasks
from seeupo_jax.configuration.schema import Config
from seeupo_jax.parallel.compiling import Between
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import PublishedPolicy
from seeupo_jax.rollout.watch import Watch
from seeupo_jax.rollout.weights.device_copy import copy_to
from seeupo_jax.training.sampler_parts import build_sampler
from seeupo_jax.training.sampler_thread import SamplerThread


class DeviceSampler(SamplerThread):
    """Plays a book's tickets on devices of its own; see `Samplers`.

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
        self._int8 = config.rollout.quantize == "int8"
        self._network, self._mesh, self._log = policy.network, mesh, log
        self._policy = dataclasses.replace(policy, mesh=mesh, frozen=self._copy(policy.frozen))
        parts = build_sampler(config, self._policy, tasks, stop=stop, watch=Watch(), log=log)
        super().__init__(config, parts, mesh, book)
        log(f"sampler on {mesh.size} devices of its own: {parts.engine.plan}")

    def compile(self, params: Any, between: Between) -> None:
        """See `Samplers`."""
        self._parts.engine.compile(self._policy.merged(self._copy(params)), between)

    def publish(self, params: Any, version: int) -> None:
        """See `Samplers`."""
        self.offer(PublishedPolicy(version, self._policy.merged(self._copy(params))))

    def resume(self, version: int) -> None:
        """See `Samplers`; the policy has changed since, and nothing else holds it."""
        self._log(f"nothing is sampled until the sweep is over: policy {version} is gone")

    def metrics(self) -> Mapping[str, float]:
        """See `Samplers`."""
        return {}

    def _copy(self, params: Any) -> Any:
        return copy_to(params, self._network, self._mesh, int8=self._int8).params
