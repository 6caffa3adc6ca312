"""The parts of a training run, built in one place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.agents.agent_tasks import AgentTasks, find_tasks
from seeupo_jax.agents.server_pool import ServerPool
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.envs.tasks import list_task_shares
from seeupo_jax.evaluation.episode_host import build_host
from seeupo_jax.evaluation.evaluation import selection_split, selection_warning
from seeupo_jax.evaluation.frozen_roles import with_frozen_roles
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.policy_io.policy_folder import log_policy
from seeupo_jax.rewards.candidate_judge import make_judge
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.engine.role_engine import RoleEngine
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.player import RolloutWorker
from seeupo_jax.training.build_learner import build_learner
from seeupo_jax.training.callbacks import Callback, Callbacks, RunHandle
from seeupo_jax.training.reference_answers import ReferenceAnswers
from seeupo_jax.training.run_log import RunLog
from seeupo_jax.training.served_rollout import build_server_pool
from seeupo_jax.training.stagnation import Stagnation
from seeupo_jax.training.trajectory_source import TrajectorySource
from seeupo_jax.types import TrainState


@dataclass(frozen=True)
class RunComponents:
    """The parts of a run that last from its beginning to its end; `close` it.

    ref_params: parameters of the reference policy; None where the state has them.
    engine: the policy's; the worker's plays frozen roles too.
    tasks: what is asked for task ids and labels; the same for training and every evaluation.
    references: the tasks' answers, where turns are credited with their gain; None: elsewhere.
    selects_on: the split that checkpoints are selected on; None: none is selected.
    """

    config: Config
    workdir: Path
    progress: ProgressDisplay
    policy: build.Policy
    ref_params: Any
    learner: Learner
    engine: SlotEngine | ServerPool
    worker: RolloutWorker
    tasks: AgentTasks
    references: ReferenceAnswers | None
    selects_on: str | None
    source: TrajectorySource
    log: RunLog
    callbacks: Callbacks
    stagnation: Stagnation

    def close(self) -> None:
        """Closes all of them, also where one fails."""
        with contextlib.ExitStack() as parts:
            worker = self.worker
            judges = [] if worker.judge is None else [worker.judge]
            kinds = RoleEngine, ServerPool
            engines = [e for e in {worker.engine, self.engine} if isinstance(e, kinds)]
            hosts = (worker.host, *engines, worker.rewards, *judges)
            held = (self.tasks, *hosts, self.log, self.source)
            for part in held:
                parts.callback(part.close)


def build_components(
    config: Config,
    workdir: Path,
    progress: ProgressDisplay,
    request: StopRequest,
    policy: build.Policy,
    params: Any,
    callbacks: Sequence[Callback] = (),
) -> tuple[RunComponents, TrainState]:
    """The parts, and the training state before the first step.

    Args:
      params: those of the policy that train.
    """
    learner, train, ref_params = build_learner(config, policy, params)
    if config.rollout.engine == "openai":
        engine = build_server_pool(config, workdir, policy, progress.log)
    else:
        engine = build_engine(config, policy)
    judged = config.algorithm.forks.kind == "candidates"
    judge = make_judge(config.judge, config.env.name) if judged else None
    tasks, references = find_tasks(config), None
    worker = RolloutWorker(
        with_frozen_roles(config, engine, policy.tokenizer),
        build_host(config, engine, tasks, policy.tokenizer, progress.log),
        policy.tokenizer,
        config.env,
        config.rollout,
        make_scorer(config.rewards),
        judge=judge,
        roles=config.roles,
        stop=lambda: request.asked,
        watch=progress.watch,
    )
    if config.algorithm.estimator.scores_answers:
        template = config.algorithm.estimator.gain_template
        references = ReferenceAnswers(tasks, policy.tokenizer, template, progress.log)
    selects_on = selection_split(config, tasks)
    shares = list_task_shares(tasks, "train")
    source = TrajectorySource(config, workdir, policy, worker, shares, progress.log)
    log_policy(config, workdir, policy, progress.log)
    progress.log(str(engine.plan))
    if (warning := selection_warning(config, selects_on)) is not None:
        progress.log(warning)
    parts = RunComponents(
        config=config,
        workdir=workdir,
        progress=progress,
        policy=policy,
        ref_params=ref_params,
        learner=learner,
        engine=engine,
        worker=worker,
        tasks=tasks,
        references=references,
        selects_on=selects_on,
        source=source,
        log=RunLog(config, workdir, progress, policy.tokenizer),
        callbacks=Callbacks(callbacks, RunHandle(config, workdir, request)),
        stagnation=Stagnation(
            config.stop_after_idle,
            warn=progress.log,
            lines=functools.partial(read_metrics, workdir, log=progress.log),
        ),
    )
    return parts, train
