"""Training: a warm start if there is no policy yet, then reinforcement learning (SeeUPO).

    python -m seeupo_jax.train --config=FILE.py [--config.FIELD=VALUE ...] --workdir=DIR [--explain]
    python -m seeupo_jax.train --role=rollout --config=FILE.py --workdir=DIR [--trainer=HOST:PORT]

--explain prints what would run, and runs nothing; with --devices=64 --device_memory=95GiB it does
so for devices, a model and benchmark files that need not be on this machine. Rerunning the command
of a stopped run resumes it from its last checkpoint and reproduces the same results.

--role=rollout samples for a trainer whose config.rollout.port is set, until its run is over. The
folder is the trainer's, where the two share one; else it is of this machine, and --trainer says
where the trainer is.
"""

# Types of jax's own functions are partly unknown.
# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax

from seeupo_jax.agents.server_pool import NoServerLeft
from seeupo_jax.checkpoint import Checkpoints, exclusive_run, find_directory
from seeupo_jax.cli.command_line import (
    add_cluster_flags,
    add_run_flags,
    check_places,
    check_shared_places,
    cluster_flags,
    fail_all_processes,
    join_cluster,
    log_to_stderr,
    missing_places,
    prepare_xla,
    quiet_logs,
    read_config,
    run_file_errors,
    run_folder,
)
from seeupo_jax.configuration.flags import Flags, one_of, positive
from seeupo_jax.configuration.loading import ConfigSource, load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.display.run_summary import learning_curve, print_summary
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.envs.pool import ServerFull
from seeupo_jax.errors import NameTaken, NotLearning, file_sentences, sentence_errors
from seeupo_jax.evaluation.evaluation import is_due, is_evaluated
from seeupo_jax.metrics.history import History, read_history
from seeupo_jax.metrics.run_manifest import UNKNOWN_LAUNCH, Launch
from seeupo_jax.parallel.cluster import exit_on_error
from seeupo_jax.parallel.mesh import training_mesh
from seeupo_jax.parallel.stop_signal import Stopped, StopRequest
from seeupo_jax.planning.explain.explain_training import explain_training
from seeupo_jax.planning.explain.explanation import EXPLAIN, print_explanation
from seeupo_jax.planning.planned_devices import add_planned_flags, plan_devices
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.resume_check import score_conditions
from seeupo_jax.rollout.asynchronous.work_client import TrainerLost
from seeupo_jax.supervised.warm_starting import start_policy
from seeupo_jax.training.callbacks import Callback, check_callbacks, notify_callbacks
from seeupo_jax.training.checks import check_config, check_planned, prepare_run
from seeupo_jax.training.rollout_role import PATIENCE_S, check_rollout, run_rollout
from seeupo_jax.training.run import Run, begin_run
from seeupo_jax.training.run_checkpoints import RunState

# Flags of one role only.
_OF_TRAINER = ("explain", "coordinator", "process_id", "num_processes", "devices", "device_memory")
_OF_ROLLOUT = ("trainer", "patience")


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    workdir: the run's folder.
    policy: the folder of the trained policy, which `transformers` loads; None where the run was
      stopped before its end or `checkpoint.export` is off.
    metrics: every iteration so far, those of earlier processes too.
    best_iteration: of the checkpoint with the best avg@k on the split that checkpoints are selected
      on; None where none has one.
    stopped: why the run ended before its last iteration, such as `SIGTERM` or a callback's reason;
      None: it is complete.
    """

    workdir: Path
    policy: Path | None
    metrics: History
    best_iteration: int | None
    stopped: str | None


@quiet_logs()
def train(
    config: ConfigSource, workdir: str | Path, callbacks: Sequence[Callback] = ()
) -> TrainResult:
    """Runs a whole training, or what is left of it, or as much as it is let.

    The same call resumes a run that was stopped, and ends with the same bits. On the main thread
    SIGTERM and the first SIGINT stop the run. In a cluster all processes call it.

    Args:
      config: of `load_config`, or what that takes.
      workdir: the folder of the run.
      callbacks: objects that hear of the run and may stop it.

    Raises:
      ValueError: a configuration, a folder or a callback that cannot be used, before long work.
      NotLearning: the run has nothing to learn from; all is saved.
      NameTaken: a reward function has the name of a reward that the environment pays.
      WriteError: a file could not be written or read; the sentence says what is kept.
    """
    check_callbacks(callbacks)
    config, workdir = load_config(config), run_folder(workdir)
    prepare_run(config, workdir, check_config)
    return run_training(config, workdir, callbacks)


def run_training(
    config: Config,
    workdir: Path,
    callbacks: Sequence[Callback] = (),
    *,
    launch: Launch = UNKNOWN_LAUNCH,
    preparing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> TrainResult:
    """As `train`, for a configuration that is checked and processes that have met.

    Args:
      launch: what was typed, for the record of the run.
      preparing: around what comes before the first iteration, where a ValueError is a user's.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(run_file_errors(config, workdir))
        with preparing():
            held.enter_context(exclusive_run(workdir, config.checkpoint))
        stopped = _train(config, workdir, callbacks, launch, preparing)
        if jax.process_index() == 0 and stopped is None:
            learning_curve(workdir, split=config.evaluation.split)
        directory = find_directory(config.checkpoint, workdir)
        best = Checkpoints(directory, 1, measured=score_conditions).best()
    written = config.checkpoint.export and stopped is None
    return TrainResult(
        workdir=workdir,
        policy=workdir / "policy" if written else None,
        metrics=read_history(workdir),
        best_iteration=best,
        stopped=stopped,
    )


def _train(
    config: Config,
    workdir: Path,
    callbacks: Sequence[Callback],
    launch: Launch,
    preparing: Callable[[], AbstractContextManager[None]],
) -> str | None:
    """Returns: why the run was stopped; None: it is complete."""
    display = config.telemetry.display
    with (
        StopRequest() as request,
        ProgressDisplay(config.iterations, display, shown=jax.process_index() == 0) as progress,
    ):
        with preparing():
            mesh = training_mesh(config)
            config, plan = choose_remat(config, mesh)
            if plan is not None:
                progress.log(str(plan))
            try:
                start = start_policy(config, workdir, progress, lambda: request.asked)
            except Stopped as stopped:
                progress.log(f"stopped {stopped}; rerun the command to start it again")
                return request.why
            policy, params = build.load_policy(config, start, mesh)
            run, state = begin_run(
                config, workdir, progress, request, policy, params, launch, callbacks
            )
        with jax.set_mesh(policy.mesh), notify_callbacks(run, run.parts.callbacks, state.done):
            ended = iterate(run, state)
    return None if ended else request.why


def iterate(run: Run, state: RunState) -> bool:
    """Rollout, sweep, evaluation and checkpoint, iteration after iteration.

    Returns: False where the run was asked to stop; all is saved.

    Raises:
      NotLearning: as of `train`.
    """
    config = run.parts.config
    try:
        if state.done < config.iterations and not run.is_over(state):
            state = run.compile(state)
        if not state.evaluated:
            state = run.evaluate(state)
            if state.done:  # it was saved before: without its score
                state = run.checkpoints.save(state)
        for iteration in range(state.done + 1, config.iterations + 1):
            if run.is_over(state):
                state = run.end_early(state)
                break
            with run.profiled(iteration):
                collected = run.rollout(iteration, state)
                state, metrics, stats = run.sweep(iteration, state, collected)
            run.record(state, collected, metrics, stats)
            if is_evaluated(config, iteration):
                state = run.evaluate(state)
            if is_due(config, iteration, config.checkpoint.every):
                state = run.checkpoints.save(state)
        run.finish(state)
    except (Stopped, NotLearning) as stopped:
        run.checkpoints.save_stopped(state, stopped)
        if isinstance(stopped, NotLearning):
            raise
        return False
    return True


def _flags() -> Flags:
    flags = Flags("train", __doc__)
    add_run_flags(flags)
    add_cluster_flags(flags)
    flags.switch("explain", EXPLAIN)
    add_planned_flags(flags)
    flags.flag("role", "what this process does: train, or rollout, to sample for a trainer.",
               one_of("train", "rollout"), default="train")  # fmt: skip
    flags.flag("trainer", "HOST:PORT of the trainer, with --role=rollout and a folder that the two"
               " do not share; SEEUPO_ROLLOUT_KEY is its key.")  # fmt: skip
    flags.flag("patience", "seconds for which the trainer may be away, with --role=rollout;"
               f" default: {PATIENCE_S:g}.", positive)  # fmt: skip
    return flags


def _check_role(given: argparse.Namespace) -> None:
    """ValueError: a flag that does not go with the role."""
    samples = given.role == "rollout"
    for name in _OF_TRAINER if samples else _OF_ROLLOUT:
        value = getattr(given, name)
        if value not in (None, False):
            allowed = "none, since it samples by itself" if samples else "with --role=rollout"
            raise ValueError(f"--{name}: got {value} with --role={given.role}; allowed: {allowed}.")


def _sample(given: argparse.Namespace) -> None:
    """Samples for a trainer, as a process of its own."""
    with sentence_errors(), sentence_errors((TrainerLost, ServerFull, NameTaken), code=1):
        config = read_config(given)
        prepare_xla(small=build.is_small_policy(config))
        check_rollout(config, given.trainer)
        patience_s = PATIENCE_S if given.patience is None else given.patience
        run_rollout(config, given.workdir, trainer=given.trainer, patience_s=patience_s)


@safe_output()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
        _check_role(given)
    log_to_stderr()
    if given.role == "rollout":
        with file_sentences():
            return _sample(given)
    with exit_on_error(), file_sentences():
        with sentence_errors():
            planned = plan_devices(given)
            config, workdir = fail_all_processes(given, lambda: read_config(given)), given.workdir
            prepare_xla(small=planned is None and build.is_small_policy(config))
            if planned is not None:
                places = missing_places(config, workdir)
                config, missing = check_planned(config)
                return print_explanation(
                    explain_training(config, workdir, planned, [*missing, *places]),
                    runs_here=False,
                )
            fail_all_processes(given, lambda: check_places(config, workdir, make=False))
            join_cluster(config, **cluster_flags(given))
            check_config(config)
            if given.explain:
                return print_explanation(explain_training(config, workdir))
            check_places(config, workdir)
            check_shared_places(config, workdir)
        launch = Launch.of_command("train", given.config)
        with sentence_errors((NotLearning, ServerFull, NoServerLeft, NameTaken), code=1):
            result = run_training(config, workdir, launch=launch, preparing=sentence_errors)
        if jax.process_index() == 0 and result.stopped is None:
            split, display = config.evaluation.split, config.telemetry.display
            settings = [f"--config={given.config}", *(f"--config.{o}" for o in given.override)]
            print_summary(workdir, split=split, display=display, settings=settings)


if __name__ == "__main__":
    main()
