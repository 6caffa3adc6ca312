"""Supervised fine-tuning on conversations: loss on assistant messages, as a sampler says them.

    python -m seeupo_jax.sft --config=FILE.py [--config.FIELD=VALUE ...] --workdir=DIR \\
        [--data=FILE.jsonl] [--explain]

--data is a file with a conversation a line (`messages`, and perhaps `tools`), tfds:FOLDER,
tfds:NAME, or demonstrations of the configuration's environment. The policy of the lowest held-out
loss after a step is left in WORKDIR/policy. Rerunning the command of a stopped run resumes it from
its last checkpoint and reproduces the same results.
"""

# Types of jax's own functions are partly unknown.
# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax

from seeupo_jax.checkpoint import exclusive_run
from seeupo_jax.cli.command_line import (
    add_cluster_flags,
    add_run_flags,
    check_places,
    check_shared_places,
    cluster_flags,
    fail_all_processes,
    join_cluster,
    log_to_stderr,
    prepare_xla,
    quiet_logs,
    run_file_errors,
    run_folder,
)
from seeupo_jax.configuration.flags import Flags
from seeupo_jax.configuration.loading import ConfigSource, load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.errors import DataChanged, NotLearning, file_sentences, sentence_errors
from seeupo_jax.metrics.history import History, read_history
from seeupo_jax.metrics.run_manifest import UNKNOWN_LAUNCH, Launch
from seeupo_jax.parallel.cluster import exit_on_error
from seeupo_jax.parallel.stop_signal import Stopped, StopRequest
from seeupo_jax.planning.explain.explain_sft import explain_sft
from seeupo_jax.planning.explain.explanation import EXPLAIN, print_explanation
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.policy_io import build
from seeupo_jax.supervised.data import load_data
from seeupo_jax.supervised.run import SftRun, begin_sft
from seeupo_jax.supervised.sft_components import SftState
from seeupo_jax.supervised.sft_config import check_sft, check_steps, count_steps, supervised_config
from seeupo_jax.training.callbacks import Callback, check_callbacks, notify_callbacks
from seeupo_jax.training.checks import prepare_run


@dataclass(frozen=True)
class SftResult:
    """The result of a supervised run.

    workdir: the run's folder.
    policy: the folder of the policy, which `transformers` loads; None where the run was stopped
      before its end or `checkpoint.export` is off.
    metrics: of every step so far, those of earlier processes too.
    step: of the policy; None where the run was stopped.
    stopped: why the run ended before it was complete, such as `SIGTERM`; None: it is complete, also
      where the held-out loss had stopped falling.
    """

    workdir: Path
    policy: Path | None
    metrics: History
    step: int | None
    stopped: str | None


@quiet_logs()
def sft(
    config: ConfigSource,
    data: str | Path | None,
    workdir: str | Path,
    callbacks: Sequence[Callback] = (),
) -> SftResult:
    """Fine-tunes the configuration's model on conversations, or does what is left of it.

    The same call resumes a run that was stopped, and ends with the same bits. On the main thread
    SIGTERM and the first SIGINT stop the run. In a cluster all processes call it.

    Args:
      config: of `load_config`, or what that takes.
      data: as `config.sft.data`; None: what the configuration says.
      workdir: the folder of the run.
      callbacks: objects that hear of the run and may stop it; an iteration is an optimizer step.

    Raises:
      ValueError: a configuration, a conversation, a folder or a callback that cannot be used.
      NotLearning: gradients are not finite any more; all is saved.
      DataChanged: a ValueError: the data is not what the run began with; all is saved.
      WriteError: a file could not be written or read; the sentence says what is kept.
    """
    check_callbacks(callbacks)
    config, workdir = load_config(config), run_folder(workdir)
    if data is not None:
        config = dataclasses.replace(
            config, sft=dataclasses.replace(config.sft, data=os.path.expanduser(data))
        )
    prepare_run(config, workdir, check_sft)
    return run_sft(config, workdir, callbacks)


def run_sft(
    config: Config,
    workdir: Path,
    callbacks: Sequence[Callback] = (),
    *,
    launch: Launch = UNKNOWN_LAUNCH,
    preparing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> SftResult:
    """As `sft`, for a configuration that is checked and processes that have met.

    Args:
      launch: what was typed, for the record of the run.
      preparing: around what comes before the first step, where a ValueError is a user's.
    """
    display = config.telemetry.display
    with contextlib.ExitStack() as held:
        held.enter_context(run_file_errors(config, workdir))
        with preparing():
            held.enter_context(exclusive_run(workdir, config.checkpoint))
        request = held.enter_context(StopRequest())
        shown = jax.process_index() == 0
        progress = held.enter_context(ProgressDisplay(0, display, shown=shown))
        with preparing():
            try:
                data = load_data(config, progress, lambda: request.asked)
            except Stopped as stopped:
                progress.log(f"stopped {stopped}; rerun the command to begin again")
                return SftResult(workdir, None, read_history(workdir), None, request.reason)
            steps = count_steps(config, len(data.training))
            check_steps(config, steps)
            given = dataclasses.replace(config, iterations=steps)
            config, plan = choose_remat(supervised_config(config, steps))
            if plan is not None:
                progress.log(str(plan))
            progress.phase("model")
            policy, params = build.load_policy(config, str(config.model.path))
            run, state = begin_sft(
                config,
                given,
                workdir,
                progress,
                request,
                policy=policy,
                params=params,
                data=data,
                launch=launch,
                callbacks=callbacks,
            )
            del params
        with jax.set_mesh(policy.mesh), notify_callbacks(run, run.parts.callbacks, state.done):
            step = iterate(run, state)
    written = config.checkpoint.export and step is not None
    return SftResult(
        workdir=workdir,
        policy=workdir / "policy" if written else None,
        metrics=read_history(workdir),
        step=step,
        stopped=None if step is not None else request.why,
    )


def iterate(run: SftRun, state: SftState) -> int | None:
    """Step after step, with evaluations and checkpoints, until the last or as patience ends.

    Returns: after which step the policy is; None where the run was asked to stop; all is saved.

    Raises:
      NotLearning, DataChanged: as of `sft`; all is saved.
    """
    try:
        if not state.evaluated:
            state = run.evaluate(state)
            if state.done and run.due_to_save(state):  # it was saved before: without its loss
                state = run.checkpoints.save(state)
        run.parts.progress.phase("steps", state.done)
        while state.done < run.parts.steps and not run.exhausted(state):
            run.prepare_step(state)
            state = run.step(state)
            run.check_learns(state)
            if not state.evaluated:
                state = run.evaluate(state)
            if run.due_to_save(state):
                state = run.checkpoints.save(state)
        return run.finish(state)
    except (Stopped, NotLearning, DataChanged) as stopped:
        run.stopped(state)
        if not isinstance(stopped, Stopped):
            raise
        return None


def _flags() -> Flags:
    flags = Flags("sft", __doc__)
    add_run_flags(flags)
    flags.flag("data", "conversations, in place of config.sft.data.")
    add_cluster_flags(flags)
    flags.switch("explain", EXPLAIN)
    return flags


@safe_output()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
    log_to_stderr()
    with exit_on_error(), file_sentences():
        with sentence_errors():
            data_override = () if given.data is None else (f"sft.data={given.data!r}",)
            overrides, workdir = (*given.override, *data_override), given.workdir
            config = fail_all_processes(given, lambda: load_config(given.config, overrides))
            prepare_xla(small=build.is_small_policy(config))
            fail_all_processes(given, lambda: check_places(config, workdir, make=False))
            join_cluster(config, **cluster_flags(given))
            check_sft(config)
            if given.explain:
                return print_explanation(explain_sft(config, workdir))
            check_places(config, workdir)
            check_shared_places(config, workdir)
        launch = Launch.of_command("sft", given.config)
        with sentence_errors((NotLearning, DataChanged), code=1):
            run_sft(config, workdir, launch=launch, preparing=sentence_errors)


if __name__ == "__main__":
    main()
