"""The parts of a training run, built in one place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.agents.agent_tasks import AgentTasks, find_tasks
from seeupo_jax.agents.server_pool import ServerPool
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.envs.tasks import list_task_shares
from seeupo_jax.evaluation.evaluation import selection_split, selection_warning
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.mesh import samplers_own_mesh
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import for_evaluations
from seeupo_jax.policy_io.policy_folder import log_policy
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.player import RolloutWorker
from seeupo_jax.training.asynchronous_source import AsynchronousSource, Samplers
from seeupo_jax.training.build_learner import build_learner
from seeupo_jax.training.callbacks import Callback, Callbacks, RunHandle
from seeupo_jax.training.device_sampler import DeviceSampler
from seeupo_jax.training.exact_value import ExactValue
from seeupo_jax.training.iteration_source import IterationSource
from seeupo_jax.training.reference_answers import ReferenceAnswers
from seeupo_jax.training.run_log import RunLog
from seeupo_jax.training.sampler_parts import SamplerParts, build_sampler
from seeupo_jax.training.served_rollout import ServedWeights, build_server_pool
from seeupo_jax.training.server_sampler import ServerSampler
from seeupo_jax.training.stagnation import Stagnation
from seeupo_jax.training.trajectory_source import TrajectorySource
from seeupo_jax.training.worker_processes import WorkerProcesses
from seeupo_jax.types import TrainState


@dataclass(frozen=True)
class RunComponents:
    """The parts of a run that last from its beginning to its end; `close` it.

    ref_params: parameters of the reference policy; None where the state has them.
    sampler: on the devices that train; with samplers of its own it plays evaluations alone.
    tasks: what is asked for task ids and labels; the same for training and every evaluation.
    references: the tasks' answers, where turns are credited with their gain; None: elsewhere.
    selects_on: the split that checkpoints are selected on; None: none is selected.
    exact: of `evaluation.exact`; None: it is off.
    """

    config: Config
    workdir: Path
    progress: ProgressDisplay
    policy: build.Policy
    ref_params: Any
    learner: Learner
    sampler: SamplerParts
    tasks: AgentTasks
    references: ReferenceAnswers | None
    selects_on: str | None
    source: IterationSource
    log: RunLog
    callbacks: Callbacks
    stagnation: Stagnation
    exact: ExactValue | None

    @property
    def engine(self) -> SlotEngine | ServerPool:
        """The policy's engine: on the devices that train, or servers."""
        return self.sampler.engine

    @property
    def worker(self) -> RolloutWorker:
        """What plays episodes on the devices that train."""
        return self.sampler.worker

    def close(self) -> None:
        """Closes all of them, also where one fails."""
        with contextlib.ExitStack() as parts:
            for part in (self.tasks, self.sampler, self.log, self.source):
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
    served = None
    if config.rollout.engine == "openai" and not config.rollout.asynchronous:
        weights = ServedWeights(config, workdir, policy)
        served = build_server_pool(config, policy, weights, progress.log)
    tasks, references = find_tasks(config), None
    sampler = build_sampler(
        for_evaluations(config),
        policy,
        tasks,
        stop=lambda: request.asked,
        watch=progress.watch,
        log=progress.log,
        served=served,
    )
    if config.algorithm.estimator.scores_answers:
        template = config.algorithm.estimator.gain_template
        references = ReferenceAnswers(tasks, policy.tokenizer, template, progress.log)
    selects_on = selection_split(config, tasks)
    source = _build_source(config, workdir, policy, tasks, sampler.worker, served, progress.log)
    log_policy(config, workdir, policy, progress.log)
    progress.log(str(sampler.engine.plan))
    if (warning := selection_warning(config, selects_on)) is not None:
        progress.log(warning)
    parts = RunComponents(
        config=config,
        workdir=workdir,
        progress=progress,
        policy=policy,
        ref_params=ref_params,
        learner=learner,
        sampler=sampler,
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
        exact=ExactValue(config, policy.tokenizer) if config.evaluation.exact else None,
    )
    return parts, train


def _build_source(
    config: Config,
    workdir: Path,
    policy: build.Policy,
    tasks: AgentTasks,
    worker: RolloutWorker,
    served: ServerPool | None,
    log: Callable[[str], None],
) -> IterationSource:
    """The source of trajectories: the devices that train, servers, or samplers beside training."""
    shares = list_task_shares(tasks, "train")
    if not config.rollout.asynchronous:
        return TrajectorySource(config, workdir, policy, worker, shares, log, served=served)
    mesh = samplers_own_mesh(config, policy.mesh)

    def start(book: TicketBook) -> Samplers:
        if mesh is not None:
            return DeviceSampler(config, policy, mesh, tasks, book, stop=worker.stop, log=log)
        if config.rollout.engine == "openai":
            return ServerSampler(config, workdir, policy, tasks, book, stop=worker.stop, log=log)
        return WorkerProcesses(config, workdir, policy, book, log)

    return AsynchronousSource(
        config, workdir, policy, shares, start, log, stop=worker.stop, watch=worker.watch
    )
