"""The parts of a supervised run, built in one place, and its state between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.learner.imitation.imitation_batches import Batches
from seeupo_jax.learner.imitation.imitation_step import Imitation
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.metrics.metrics_log import MetricsWriter
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.policy_folder import log_policy
from seeupo_jax.supervised.data import SftData
from seeupo_jax.supervised.sft_config import build_imitation
from seeupo_jax.training.callbacks import Callback, Callbacks, RunHandle
from seeupo_jax.training.phase_times import PhaseTimes
from seeupo_jax.types import TrainState


class BestLoss(NamedTuple):
    """The lowest held-out loss so far, in nats per token, and after which step."""

    step: int
    loss: float


class SftState(NamedTuple):
    """Where a run is between two steps.

    done: optimizer steps.
    evaluated, saved: whether what is due after `done` of these two has been done.
    best: None before the first evaluation after a step.
    worse: evaluations in a row that found no lower loss than all before them, also before a step.
    idle: steps in a row that moved no parameter.
    before: held-out loss before the first step, in nats per token; None: not measured.
    """

    done: int
    train: TrainState
    evaluated: bool = False
    saved: bool = True
    best: BestLoss | None = None
    worse: int = 0
    idle: int = 0
    before: float | None = None


@dataclass(frozen=True)
class SftComponents:
    """The parts of a run that last from its beginning to its end.

    config: of `supervised`; given: the user's, with the number of steps.
    held_out: None where nothing is held out.
    """

    config: Config
    given: Config
    workdir: Path
    progress: ProgressDisplay
    request: StopRequest
    policy: build.Policy
    data: SftData
    imitation: Imitation
    schedule: Schedule
    batches: Batches
    held_out: Batches | None
    metrics: MetricsWriter
    times: PhaseTimes
    callbacks: Callbacks

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.iterations


def build_sft_components(
    config: Config,
    given: Config,
    workdir: Path,
    progress: ProgressDisplay,
    request: StopRequest,
    policy: build.Policy,
    params: Any,
    data: SftData,
    callbacks: Sequence[Callback] = (),
) -> tuple[SftComponents, TrainState]:
    """The parts, and the training state before the first step.

    Args:
      config, given: as in `SftComponents`. params: those of the policy that train.
    """
    size = config.sft.batch_size
    optimizer = make_optimizer(config.optimizer, total_steps=config.iterations)
    imitation, train = build_imitation(config, policy, optimizer, params)
    shapes = build.build_shapes(config, policy.mesh, size)
    routing = policy.network.arch.routing
    parts = SftComponents(
        config=config,
        given=given,
        workdir=workdir,
        progress=progress,
        request=request,
        policy=policy,
        data=data,
        imitation=imitation,
        schedule=Schedule(config.optimizer, config.iterations),
        batches=Batches(data.training, shapes, size, config.seed, routing=routing),
        held_out=None
        if data.held_out is None
        else Batches(data.held_out, shapes, size, config.seed, routing=routing),
        metrics=MetricsWriter(workdir, config.telemetry.trackers, log=progress.log),
        times=PhaseTimes(progress),
        callbacks=Callbacks(callbacks, RunHandle(given, workdir, request)),
    )
    log_policy(given, workdir, policy, progress.log)
    return parts, train
