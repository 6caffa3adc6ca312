"""What samples in a process: an engine, what plays its episodes, and what scores them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from seeupo_jax.agents.agent_tasks import AgentTasks
from seeupo_jax.agents.server_pool import ServerPool
from seeupo_jax.configuration.schema import Config
from seeupo_jax.evaluation.episode_host import build_host
from seeupo_jax.evaluation.frozen_roles import with_frozen_roles
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.rewards.candidate_judge import make_judge
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.engine.role_engine import RoleEngine
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.player import RolloutWorker
from seeupo_jax.rollout.watch import Watch


class SamplerParts(NamedTuple):
    """A sampler on the devices of a policy's mesh, or servers; `close` it.

    engine: the policy's; the worker's plays frozen roles too.
    """

    engine: SlotEngine | ServerPool
    worker: RolloutWorker

    def close(self) -> None:
        """Closes all of them, also where one fails."""
        worker = self.worker
        judges = [] if worker.judge is None else [worker.judge]
        kinds = RoleEngine, ServerPool
        engines = [e for e in {worker.engine, self.engine} if isinstance(e, kinds)]
        with contextlib.ExitStack() as parts:
            for part in (worker.host, *engines, worker.rewards, *judges):
                parts.callback(part.close)


def build_sampler(
    config: Config,
    policy: Policy,
    tasks: AgentTasks,
    *,
    stop: Callable[[], bool],
    watch: Watch,
    log: Callable[[str], None],
    served: ServerPool | None = None,
) -> SamplerParts:
    """Builds a sampler.

    Args:
      tasks: of the run; agents get their data.
      stop, watch: as of `RolloutWorker`.
      served: what samples instead of the mesh's devices.

    Raises:
      ValueError: it does not fit into the memory that is left, or its endpoint's address cannot be
        had.
    """
    engine = build_engine(config, policy) if served is None else served
    judged = config.algorithm.forks.kind == "candidates"
    judge = make_judge(config.judge, config.env.name) if judged else None
    worker = RolloutWorker(
        with_frozen_roles(config, engine, policy.tokenizer, policy.mesh),
        build_host(config, engine, tasks, policy.tokenizer, log),
        policy.tokenizer,
        config.env,
        config.rollout,
        make_scorer(config.rewards),
        judge=judge,
        roles=config.roles,
        stop=stop,
        watch=watch,
    )
    return SamplerParts(engine, worker)
