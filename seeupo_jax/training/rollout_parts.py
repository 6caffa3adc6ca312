"""The parts of a process that samples: the engine and what plays episodes with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from seeupo_jax.agents.agent_tasks import AgentTasks, find_tasks
from seeupo_jax.configuration.schema import Config
from seeupo_jax.evaluation.episode_host import build_host
from seeupo_jax.evaluation.frozen_roles import with_frozen_roles
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.rewards.candidate_judge import make_judge
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.engine.role_engine import RoleEngine
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.player import RolloutWorker
from seeupo_jax.rollout.watch import Watch


@dataclass(frozen=True)
class RolloutParts:
    """The parts that sample; `close` them.

    engine: the policy's; the worker's plays frozen roles too.
    tasks: what is asked for task ids and labels.
    """

    engine: SlotEngine
    worker: RolloutWorker
    tasks: AgentTasks

    def close(self) -> None:
        """Closes all of them, also where one fails."""
        worker = self.worker
        judges = [] if worker.judge is None else [worker.judge]
        engines = [worker.engine] if isinstance(worker.engine, RoleEngine) else []
        with contextlib.ExitStack() as parts:
            for part in (self.tasks, worker.host, *engines, worker.rewards, *judges):
                parts.callback(part.close)


def build_rollout(
    config: Config,
    policy: build.Policy,
    *,
    stop: Callable[[], bool],
    watch: Watch,
    log: Callable[[str], None],
) -> RolloutParts:
    """Builds what samples with a policy.

    Args:
      stop: whether this process was asked to stop. watch: shows its progress to other threads.

    Raises:
      ValueError: as of `build_engine`, `with_frozen_roles` and `build_host`.
    """
    engine = build_engine(config, policy)
    judged = config.algorithm.forks.kind == "candidates"
    judge = make_judge(config.judge, config.env.name) if judged else None
    tasks = find_tasks(config)
    worker = RolloutWorker(
        with_frozen_roles(config, engine, policy.tokenizer),
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
    return RolloutParts(engine, worker, tasks)
