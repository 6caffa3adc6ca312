"""One training run: what its loop calls, each a step from one `RunState` to the next."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.checkpoint.process_sync import on_primary
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.display.view import COMPILING
from seeupo_jax.envs.tasks import labels_by_task
from seeupo_jax.errors import NotLearning
from seeupo_jax.evaluation.evaluation import (
    Labels,
    evaluate_split,
    evaluated_splits,
    is_evaluated,
    scored_split,
)
from seeupo_jax.learner.credit.role_baselines import next_baselines
from seeupo_jax.learner.credit.running_rewards import running_statistics
from seeupo_jax.learner.program_warming import compile_programs
from seeupo_jax.learner.state_layout import final_params
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.metrics.policy_lag import policy_lag, remember_steps
from seeupo_jax.metrics.run_manifest import UNKNOWN_LAUNCH, Launch, note_end
from seeupo_jax.metrics.statistics import evaluation_prefix
from seeupo_jax.parallel.distributed import max_over_processes
from seeupo_jax.parallel.stop_signal import StoppedCompiling, StopRequest
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.policy_folder import write_policy
from seeupo_jax.policy_io.resuming import check_no_lost_checkpoints
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.training.callbacks import Callback
from seeupo_jax.training.early_stopping import why_ended
from seeupo_jax.training.run_checkpoints import RunCheckpoints, RunState
from seeupo_jax.training.run_components import RunComponents, build_components
from seeupo_jax.training.stagnation import check_groups, check_reward_values
from seeupo_jax.trajectories.forks import fill_up
from seeupo_jax.trajectories.reader import TRAIN, evaluation_label
from seeupo_jax.types import Trajectory, TrajectoryStats


def begin_run(
    config: Config,
    workdir: Path,
    progress: ProgressDisplay,
    request: StopRequest,
    policy: Policy,
    params: Any,
    launch: Launch = UNKNOWN_LAUNCH,
    callbacks: Sequence[Callback] = (),
) -> tuple[Run, RunState]:
    """A run, and where it begins: anew, after its newest checkpoint, or in a stopped sweep.

    Raises:
      ValueError: the workdir holds another run.
    """
    parts, train = build_components(config, workdir, progress, request, policy, params, callbacks)
    run = Run(parts, RunCheckpoints(parts))
    with contextlib.ExitStack() as opened:  # what does not begin is closed
        opened.enter_context(run)
        restored = run.checkpoints.restore(train)
        resumed = restored is not None
        state = RunState(0, train, steps_V=(int(train.step),)) if restored is None else restored
        del train, restored  # `restore_sweep` may load another state: keep one copy meanwhile
        state = run.checkpoints.restore_sweep(state)
        resumed = resumed or state.stopped_sweep is not None
        if not resumed:
            on_primary(lambda: check_no_lost_checkpoints(config, workdir))
        progress.resumed(state.done)
        parts.log.resume_from(state.done + 1 if resumed else 0)
        resumes = (state.done, state.stopped_sweep is not None) if resumed else None
        parts.log.describe(launch, policy, state.train.params, resumes=resumes)
        opened.pop_all()
    return run, state


class Run:
    """The run that the training loop steps; a context that closes its parts.

    With several processes each calls everything, and process 0 writes.
    """

    def __init__(self, parts: RunComponents, checkpoints: RunCheckpoints):
        self.parts, self.checkpoints = parts, checkpoints

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as closing:  # both are closed, even where one of them fails
            closing.callback(self.parts.close)
            closing.callback(self.checkpoints.close)

    def compile(self, state: RunState) -> RunState:
        """Compiles all programs ahead; the training state comes back bit for bit.

        Raises:
          StoppedCompiling: the run was asked to stop; the state that was given may be gone.
        """
        parts, count = self.parts, self.parts.config.rollout.trajectories
        params = state.train.params

        def between(done: int, total: int) -> None:
            parts.progress.step(done, total)
            if max_over_processes([parts.worker.stop()])[0]:
                raise StoppedCompiling("stopped while programs were compiled")

        parts.progress.phase(COMPILING)
        parts.source.compile(params)
        with parts.log.counted("rollout"):
            parts.source.compile_samplers(params, between)
            if parts.config.evaluation.tasks or not parts.config.rollout.asynchronous:
                parts.engine.compile(parts.policy.merged(params), between)
        parts.progress.phase(COMPILING)
        with parts.log.counted("sweep"):
            train = compile_programs(parts.learner, state.train, parts.ref_params, count, between)
        for part in ("rollout", "sweep"):
            programs = parts.log.spent[f"{part}/programs_compiled"]
            seconds = parts.log.spent[f"time/{part}_s"]
            parts.progress.log(f"compiled the {part}: {programs} programs in {seconds:.0f} s")
        return state._replace(train=train)

    def rollout(self, iteration: int, state: RunState) -> Collected:
        """The iteration's trajectories; see `IterationSource.of`.

        Raises:
          Stopped: the run was asked to stop.
          NotLearning: none of them counts, or one has a reward that the estimator is not for; a
            resumed run samples them again.
        """
        config, source, stopped = self.parts.config, self.parts.source, state.stopped_sweep
        with self.parts.log.phase("rollout"):
            collected = source.of(
                iteration,
                state.train.params,
                evaluates=is_evaluated(config, iteration),
                stopped=None if stopped is None else stopped.stored,
            )
            try:
                check_groups(iteration, collected, grouped=config.algorithm.grouped)
                check_reward_values(iteration, collected, config.algorithm)
            except NotLearning:
                source.forget(iteration)
                raise
        self.parts.callbacks.trajectories(iteration, TRAIN, collected.trajectories)
        return collected

    def sweep(
        self, iteration: int, state: RunState, collected: Collected
    ) -> tuple[RunState, dict[str, float], Sequence[TrajectoryStats | None]]:
        """Updates the policy turn by turn; resumes a sweep that was stopped.

        Returns: the run after it, and the sweep's metrics and the trajectories' statistics.

        Raises:
          SweepStopped: the run was asked to stop.
        """
        parts, stopped = self.parts, state.stopped_sweep

        def on_step(done: int, steps: int) -> None:
            parts.progress.step(done, steps)
            parts.callbacks.step(iteration, done, steps)

        labels = references = None
        if parts.config.teacher.by_task:
            tasks = [t.task_id for t in collected.trajectories]
            by_task = labels_by_task(parts.tasks, {*tasks}, parts.progress.log)
            labels = [by_task[task] for task in tasks]
        if parts.references is not None:
            references = parts.references.of([t.task_id for t in collected.trajectories])
        algorithm, baselines = parts.config.algorithm, state.baselines
        statistics = state.statistics
        if algorithm.keeps_statistics:
            statistics = running_statistics(collected.trajectories, statistics)
        with parts.log.phase("sweep"):
            train, metrics, stats, _ = sweep(
                parts.learner,
                state.train,
                parts.ref_params,
                fill_up(collected.trajectories, parts.config.rollout.trajectories),
                iteration=iteration,
                stop=lambda: bool(max_over_processes([parts.worker.stop()])[0]),
                resume=None if stopped is None else (stopped.arrays, stopped.notes),
                on_step=on_step,
                references=references,
                statistics=statistics,
                labels=labels,
                baselines=baselines,
            )
        if algorithm.keeps_baselines:
            decay, roles = algorithm.estimator.decay, parts.learner.roles
            baselines = next_baselines(collected.trajectories, roles, baselines, decay)
        if "sweep/tokens" in metrics:  # else no step was taken
            # What was done before a stop took none of the time that is counted here.
            done = metrics["sweep/tokens"] - (0 if stopped is None else stopped.notes["tokens"])
            metrics["sweep/tokens_per_second"] = done / parts.log.spent["time/sweep_s"]
        evaluated = not is_evaluated(parts.config, iteration)
        stats = stats[: len(collected.trajectories)]
        steps_V = remember_steps(state.steps_V, int(train.step))
        after = RunState(iteration, train, evaluated=evaluated, saved=False, steps_V=steps_V)
        after = after._replace(statistics=statistics, baselines=baselines, progress=state.progress)
        return after, metrics, stats

    def record(
        self,
        state: RunState,
        collected: Collected,
        sweep_metrics: dict[str, float],
        stats: Sequence[TrajectoryStats | None],
    ) -> None:
        """Writes and shows the iteration that is done: its metrics and its trajectories.

        Raises:
          NotLearning: it is one too many that moved no parameter.
        """
        parts, iteration = self.parts, state.done
        more: dict[str, Any] = dict(sweep_metrics) | parts.source.metrics
        more |= policy_lag(collected.trajectories, iteration - 1, state.steps_V[:-1])
        if parts.config.log_checksum:
            more["state/checksum"] = checksum(state.train)
        more |= self._exact_value(state)
        tasks = {t.task_id for t in collected.sampled}
        labels = labels_by_task(parts.tasks, tasks, parts.progress.log)
        values = parts.log.iteration(iteration, collected, stats, labels, more)
        parts.callbacks.iteration(iteration, values)
        parts.stagnation.check(iteration, collected, sweep_metrics)

    def evaluate(self, state: RunState) -> RunState:
        """Evaluates on the splits of `evaluated_splits`, or those that are left of them."""
        parts, config = self.parts, self.parts.config.evaluation
        iteration, splits = state.done, state.left
        if splits is None:
            splits = evaluated_splits(parts.config, parts.selects_on, iteration)
        if not splits:
            return state._replace(evaluated=True)
        parts.progress.phase("evaluation")
        params = parts.policy.merged(final_params(state.train))
        values: dict[str, float] = {} if state.train.ema is None else {"eval/ema": 1.0}
        with parts.log.apart("evaluation") as spent, parts.worker.engine.one_policy():
            for split in splits:
                values |= evaluate_split(
                    parts.config,
                    parts.worker,
                    params,
                    tasks=parts.tasks,
                    split=split,
                    k=config.k,
                    iteration=iteration,
                    on_played=functools.partial(self._on_played, iteration, split),
                )
        score, progress = None if parts.selects_on is None else state.score, state.progress
        selects_on = scored_split(parts.config, parts.selects_on, iteration)
        if selects_on is not None and selects_on in splits:
            score = values[f"{evaluation_prefix(config.split, selects_on)}/avg@{config.k}"]
            values["eval/selected_on"] = float(selects_on == config.split)
            progress = progress.after(score)
            values["eval/worse"] = progress.worse
        if iteration == 0:  # later ones are with those of the iteration
            values |= self._exact_value(state)
        parts.callbacks.evaluation(iteration, parts.log.evaluation(iteration, values | spent))
        return state._replace(evaluated=True, score=score, left=None, progress=progress)

    def _exact_value(self, state: RunState) -> dict[str, float]:
        exact = self.parts.exact
        return {} if exact is None else exact.metrics(self.parts.learner, state.train.params)

    def _on_played(
        self, iteration: int, split: str, trajectories: Sequence[Trajectory], labels: Labels
    ) -> None:
        self.parts.log.episodes(iteration, split, trajectories, labels)
        self.parts.callbacks.trajectories(iteration, evaluation_label(split), trajectories)

    def is_over(self, state: RunState) -> bool:
        """Whether patience ends the run before its last iteration."""
        return state.done < self.parts.config.iterations and state.progress.ends(self.parts.config)

    def end_early(self, state: RunState) -> RunState:
        """Evaluates and saves what belongs to the end of a run; once."""
        config, selects_on = self.parts.config, self.parts.selects_on
        if state.ended:
            return state
        had = evaluated_splits(config, selects_on, state.done)
        left = [s for s in evaluated_splits(config, selects_on, config.iterations) if s not in had]
        state = state._replace(ended=True)
        if left:
            state = self.evaluate(state._replace(left=left))
        return self.checkpoints.save(state)

    def finish(self, state: RunState) -> None:
        """Leaves the trained policy in WORKDIR/policy, and warns where success never moved."""
        parts, best = self.parts, self.checkpoints.best()
        parts.source.finish()
        early = self.is_over(state)
        if early:
            parts.progress.log(why_ended(parts.config, state.progress, state.done, best))
        reason = "patience" if early else "iterations"
        on_primary(lambda: note_end(parts.workdir, state.done, reason, best))
        if parts.config.checkpoint.export:
            folder = parts.workdir / "policy"
            write_policy(parts.config, parts.policy, final_params(state.train), folder)
            parts.progress.log(f"wrote {folder}")
        parts.stagnation.check_outcome()

    @contextlib.contextmanager
    def profiled(self, iteration: int) -> Iterator[None]:
        """Writes a trace of an iteration that `config.profile.steps` names."""
        parts = self.parts
        if jax.process_index() or iteration not in parts.config.profile.steps:
            yield
            return
        folder = parts.workdir / "profile" / f"iteration{iteration}"
        with jax.profiler.trace(str(folder)):
            yield
        parts.progress.log(f"wrote the trace {folder}")
