"""Training: a warm start if there is no policy yet, then reinforcement learning (SeeUPO).

    python -m seeupo_jax.train --config=FILE.py [--config.FIELD=VALUE ...] --workdir=DIR [--explain]

--explain prints what would run, and runs nothing; with --devices=64 --device_memory=95GiB it does
so for devices, a model and benchmark files that need not be on this machine. Rerunning the command
of a stopped run resumes it from its last checkpoint and reproduces the same results.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from seeupo_jax.checkpoint import Checkpoints, check_shared, exclusive_run, find_directory, reason
from seeupo_jax.configuration.flags import Flags
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import Progress
from seeupo_jax.display.run_summary import learning_curve, print_summary
from seeupo_jax.errors import WriteError, is_full, sentence_errors
from seeupo_jax.metrics.run_manifest import Launch
from seeupo_jax.parallel.cluster import errors_end_at_once
from seeupo_jax.parallel.stop_signal import Stopped, StopRequest
from seeupo_jax.planning.explain_training import explain_training
from seeupo_jax.planning.explanation import EXPLAIN, print_explanation
from seeupo_jax.planning.planned_devices import add_planned_flags, plan_devices
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.runtime import build
from seeupo_jax.runtime.checks import check_config, check_planned
from seeupo_jax.runtime.cli import (
    add_cluster_flags,
    add_run_flags,
    check_places,
    join_cluster,
    prepare_xla,
    quiet_logs,
    read_config,
)
from seeupo_jax.runtime.training.run import UNKNOWN, Run, begin_run
from seeupo_jax.runtime.training.run_checkpoints import RunState
from seeupo_jax.runtime.training.stagnation import NotLearning
from seeupo_jax.runtime.training.warm_starting import start_policy


def train(config: Config, workdir: str | Path, launch: Launch = UNKNOWN) -> None:
    """Runs a whole training, or what is left of it, or as much as it is let.

    Args:
      launch: what was typed, for the record of the run.

    Raises:
      NotLearning: it has nothing to learn from; all is saved.
      WriteError: there is no room for what it writes; the sentence says what is kept.
    """
    workdir = Path(workdir).absolute()
    with contextlib.ExitStack() as held:
        with sentence_errors():
            held.enter_context(exclusive_run(workdir, config.checkpoint))
        with _room(config, workdir):
            _train(config, workdir, launch)


@contextlib.contextmanager
def _room(config: Config, workdir: Path) -> Iterator[None]:
    """Says what is kept where a full disk ends a run."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:  # libraries have errors of their own for it
        if not is_full(error):
            raise
        newest = Checkpoints(find_directory(config.checkpoint, workdir), 1).finished()
        kept = "no checkpoint was saved yet"
        if newest is not None:
            kept = f"checkpoint {newest} is intact; rerun the command to resume from it"
        place = getattr(error, "filename", None) or workdir
        raise WriteError(f"{place} could not be written: {reason(error)}; {kept}.") from error


def _train(config: Config, workdir: Path, launch: Launch) -> None:
    shows = jax.process_index() == 0
    with (
        StopRequest() as request,
        open(os.devnull, "w") as nowhere,
        Progress(
            config.iterations, config.telemetry.display, stream=None if shows else nowhere
        ) as progress,
    ):
        with sentence_errors():
            config, plan = choose_remat(config)
            if plan is not None:
                progress.log(str(plan))
            try:
                start = start_policy(config, workdir, progress, lambda: request.asked)
            except Stopped as stopped:
                return progress.log(f"stopped {stopped}; rerun the command to start it again")
            policy, params = build.load_policy(config, start)
            run, state = begin_run(config, workdir, progress, request, policy, params, launch)
        with jax.set_mesh(policy.mesh), run:
            ended = iterate(run, state)
    if shows and ended:
        learning_curve(workdir, split=config.evaluation.split)
        print_summary(workdir, split=config.evaluation.split)


def iterate(run: Run, state: RunState) -> bool:
    """Rollout, sweep, evaluation and checkpoint, iteration after iteration.

    Returns: False where the run was asked to stop; all is saved.

    Raises:
      NotLearning: as of `train`.
    """
    config = run.parts.config
    try:
        if state.done < config.iterations:
            state = run.compile(state)
        if not state.evaluated:
            state = run.evaluate(state)
        for iteration in range(state.done + 1, config.iterations + 1):
            with run.profiled(iteration):
                collected = run.rollout(iteration, state)
                state, metrics, stats = run.sweep(iteration, state, collected)
            run.record(state, collected, metrics, stats)
            if run.due(iteration, config.evaluation.every):
                state = run.evaluate(state)
            if run.due(iteration, config.checkpoint.every):
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
    return flags


def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
    quiet_logs()
    prepare_xla()
    with errors_end_at_once():
        with sentence_errors():
            planned = plan_devices(given)
            config, workdir = read_config(given), given.workdir
            check_places(config, workdir, make=not given.explain)
            if planned is not None:
                config, missing = check_planned(config)
                return print_explanation(
                    explain_training(config, workdir, planned, missing), runs_here=False
                )
            join_cluster(config, given)
            check_config(config)
            if given.explain:
                return print_explanation(explain_training(config, workdir))
            if config.checkpoint.directory is None:
                check_shared(workdir)
            else:
                check_shared(config.checkpoint.directory, "config.checkpoint.directory")
        with sentence_errors((WriteError, NotLearning), code=1):
            train(config, workdir, Launch.of_command("train", given.config))


if __name__ == "__main__":
    main()
