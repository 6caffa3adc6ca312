"""One training run: its parts, what it records, how it stops and how it resumes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from seeupo_jax import envs
from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import Progress
from seeupo_jax.envs import gate
from seeupo_jax.learner.optimizer import make_optimizer
from seeupo_jax.learner.programs import compile_programs
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.metrics.run_manifest import Launch
from seeupo_jax.metrics.statistics import evaluation_prefix
from seeupo_jax.parallel.distributed import agree
from seeupo_jax.parallel.stop_signal import Stopped, StoppedCompiling, StopRequest
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.runtime import build
from seeupo_jax.runtime.evaluation import evaluate
from seeupo_jax.runtime.policy_folder import write_policy
from seeupo_jax.runtime.resume_check import check_same_run
from seeupo_jax.runtime.run_log import RunLog
from seeupo_jax.runtime.selection import selection_split, selection_warning
from seeupo_jax.runtime.stagnation import NotLearning, Stagnation, check_groups
from seeupo_jax.runtime.trajectory_source import Origin, Stored, TrajectorySource
from seeupo_jax.types import TrainState, TrajectoryStats

UNKNOWN = Launch()  # nobody said how the run was begun


class Run:
    """What the training loop works with; a context that closes all of it.

    With several processes each calls everything, and process 0 writes.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        progress: Progress,
        request: StopRequest,
        policy: build.Policy,
        params: Any,
        launch: Launch = UNKNOWN,
    ):
        self.config, self.policy = config, policy
        self._workdir, self._progress, self._request = workdir, progress, request
        self._writes = jax.process_index() == 0
        optimizer = make_optimizer(config.optimizer, total_steps=build.total_steps(config))
        self._fresh: TrainState | None = build.new_state(config, policy, optimizer, params)
        self.ref_params = build.place_reference(config, params)
        self.learner = build.build_learner(config, policy, optimizer, self._fresh)
        self.engine = build.build_engine(config, policy)
        self.pool = build.build_pool(config, self.engine.concurrency)
        self._environment = envs.make(config.env.name, **config.env.options)
        self._selects_on = selection_split(config, self._environment)
        self.source = TrajectorySource(
            config,
            workdir,
            policy,
            self.engine,
            self.pool,
            gate.task_ids(self._environment, "train"),
            progress,
            self._asked,
        )
        platform = policy.mesh.devices.flat[0].platform
        progress.log(
            f"attention: {policy.network.arch.attention}"
            f" (model.attention={config.model.attention} on {platform})"
        )
        progress.log(str(self.engine.plan))
        if (warning := selection_warning(config, self._selects_on)) is not None:
            progress.log(warning)
        kept, folder = config.checkpoint, find_directory(config.checkpoint, workdir)
        self._checkpoints = Checkpoints(folder, kept.keep, kept.keep_best, log=progress.log)
        self._stopped_folder = f"{folder}/stopped"  # a sweep that was stopped between two turns
        self._stopped = Checkpoints(self._stopped_folder, 1, 0, log=progress.log)
        self._resume: tuple[int, Mapping[str, Any], Mapping[str, Any]] | None = None
        self._stored: Stored | None = None  # the trajectories of the sweep to resume
        self._log = RunLog(config, workdir, progress, policy.tokenizer)
        self._launch = launch
        self._stagnation = Stagnation(config.stop_after_idle, warn=progress.log)
        self._stats: Sequence[TrajectoryStats | None] = ()  # of this iteration's trajectories
        # The last iteration whose sweep is over, its state, and whether these are evaluated, saved.
        self._done, self._state = 0, self._fresh
        self.evaluated, self._saved = False, True
        self._score: float | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as parts:  # all are closed, even where one of them fails
            for part in (
                self.pool,
                self._log,
                self._checkpoints,
                self._stopped,
                self.source,
            ):
                parts.callback(part.close)

    def due(self, iteration: int, every: int) -> bool:
        """Whether something done `every` so many iterations, and after the last, is due."""
        return iteration == self.config.iterations or bool(every and iteration % every == 0)

    def restore(self) -> tuple[TrainState, int]:
        """The state to resume from and its iteration; a fresh one and 0 without a checkpoint."""
        state, self._fresh = self._fresh, None  # one copy is enough
        found = self._checkpoints.restore(state)
        if found is not None:
            self._done, state, notes = found
            check_same_run(self.config, notes["config"])
            self._stagnation.idle = notes.get("idle_iterations", 0)
            self._tell_remat(notes)
            self._tell_selection(notes)
            # Older versions saved after they evaluated, and did not say so.
            self._saved, self.evaluated = True, notes.get("evaluated", True)
            self._progress.log(f"resuming after iteration {self._done}")
        state = self._restore_stopped(state)
        self._state = state
        fresh = found is None and self._resume is None
        self._log.resume_from(0 if fresh else self._done + 1)
        self._log.describe(self._launch, self.policy, state.params, resumed=not fresh)
        return state, self._done

    def _restore_stopped(self, state: TrainState) -> TrainState:
        """The state in the middle of a sweep, where a run was stopped in one; else `state`."""
        step = self._stopped.latest()
        if step is None or step <= self._done:
            return state
        known = self._stopped.newest({}, partial=True)
        origin = {} if known is None else known[1].get("trajectories", {})
        stored = self.source.stored(step, Origin(**origin)) if origin else None
        if stored is None:
            self._progress.log(
                f"the stopped sweep of iteration {step} starts again: its trajectories are missing"
            )
            return state
        example = stopped_arrays(self.learner, state, stored.collected.trajectories)
        found = self._stopped.restore(example)
        if found is None:
            return state
        _, arrays, notes = found
        check_same_run(self.config, notes["config"])
        self._resume, self._stored = (step, arrays, notes["sweep"]), stored
        self._stagnation.idle = notes.get("idle_iterations", 0)
        self._done, self._saved, self.evaluated = step - 1, True, True
        self._progress.log(f"resuming in the sweep of iteration {step}")
        return arrays["state"]

    def compile(self, state: TrainState) -> TrainState:
        """Compiles all programs ahead; the state comes back bit for bit.

        Raises:
          StoppedCompiling: the run was asked to stop; the state that was given may be gone.
        """
        rollout = self.config.rollout
        count = rollout.tasks * rollout.group_size

        def between() -> None:
            if agree([self._asked()])[0]:
                raise StoppedCompiling("stopped while programs were compiled")

        self.source.compile(state.params)
        with self.phase("rollout"):
            self.engine.compile(self.policy.whole(state.params), between)
        with self.phase("sweep"):
            state = compile_programs(self.learner, state, self.ref_params, count, between)
        for part in ("rollout", "sweep"):
            programs, seconds = (
                self._log.spent[f"{part}/programs_compiled"],
                self._log.spent[f"time/{part}_s"],
            )
            self._progress.log(f"compiled the {part}: {programs} programs in {seconds:.0f} s")
        self._state = state
        return state

    def rollout(self, iteration: int, state: TrainState) -> Collected:
        """The iteration's trajectories; see `TrajectorySource.of`.

        Raises:
          Stopped: the run was asked to stop.
          NotLearning: none of them counts; a resumed run samples them again.
        """
        stopped, self._stored = self._stored, None
        collected = self.source.of(
            iteration,
            state.params,
            saves=self.due(iteration, self.config.checkpoint.every),
            evaluates=self.due(iteration, self.config.evaluation.every),
            stopped=stopped,
        )
        try:
            check_groups(iteration, collected, grouped=self.config.algorithm.grouped)
        except NotLearning:
            self.source.forget(iteration)
            raise
        return collected

    def sweep(
        self, iteration: int, state: TrainState, collected: Collected
    ) -> tuple[TrainState, dict[str, float]]:
        """Updates the policy turn by turn; resumes a sweep that was stopped.

        Raises:
          SweepStopped: the run was asked to stop.
        """
        resume = None
        if self._resume is not None and self._resume[0] == iteration:
            resume, self._resume = self._resume[1:], None
        state, metrics, self._stats, _ = sweep(
            self.learner,
            state,
            self.ref_params,
            collected.trajectories,
            iteration=iteration,
            stop=lambda: bool(agree([self._asked()])[0]),
            resume=resume,
            on_step=self._progress.step,
        )
        self._done, self._state, self._saved, self._score = iteration, state, False, None
        self.evaluated = not self.due(iteration, self.config.evaluation.every)
        return state, metrics

    def save(self, iteration: int, state: TrainState) -> None:
        """Saves a checkpoint in the background."""
        extra = self._notes() | {"evaluated": self.evaluated}
        with self._log.timed("checkpoint"):
            self._checkpoints.save(iteration, state, extra, self._score)
            self._saved = True
            self._forget()

    def _forget(self) -> None:
        """Removes what the newest checkpoint that is on disk covers."""
        covered, stopped = self._checkpoints.latest(), self._stopped.latest()
        if covered is None:
            return
        self.source.forget(covered)
        if stopped is not None and stopped <= covered and self._writes:
            epath.Path(self._stopped_folder).rmtree()

    def save_stopped(self, stopped: Stopped | NotLearning) -> None:
        """Saves all that is needed to resume this run where it was stopped."""
        where = f"after iteration {self._done}"
        if isinstance(stopped, SweepStopped):
            where = f"in the sweep of iteration {self._done + 1}, {stopped.notes['done']} turns in"
            origin = self.source.origin
            extra = self._notes() | {"sweep": stopped.notes, "trajectories": origin._asdict()}
            self.source.wait()  # what was stopped is nothing without its trajectories
            self._stopped.save(self._done + 1, stopped.arrays, extra)
            self._stopped.wait()
        elif isinstance(stopped, StoppedCompiling):
            where = (
                f"before iteration {self._done + 1}, while programs were compiled; {self._kept()}"
            )
        elif not self._saved:
            self.save(self._done, self._state)
        self.source.save_ahead()
        self._checkpoints.wait()
        self._progress.log(f"stopped {where}; rerun the command to resume")

    def _kept(self) -> str:
        """What holds the state of a run that has done nothing yet."""
        if self._resume is not None:
            return f"nothing has changed since it was stopped in the sweep of {self._resume[0]}"
        newest = self._checkpoints.latest()
        if newest is None:
            return "nothing was saved, since no iteration was started"
        return f"nothing has changed since checkpoint {newest}"

    def finish(self, state: TrainState) -> None:
        """Waits for the last checkpoint and leaves the trained policy in WORKDIR/policy."""
        self._checkpoints.wait()
        self._forget()
        if self.config.checkpoint.export:
            folder = self._workdir / "policy"
            write_policy(self.config, self.policy, state.params, folder)
            self._progress.log(f"wrote {folder}")

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A part of an iteration: shown, timed, and its compilations counted."""
        return self._log.phase(name)

    @contextlib.contextmanager
    def profiled(self, iteration: int) -> Iterator[None]:
        """Writes a trace of an iteration that `config.profile.steps` names."""
        if not self._writes or iteration not in self.config.profile.steps:
            yield
            return
        folder = self._workdir / "profile" / f"iteration{iteration}"
        with jax.profiler.trace(str(folder)):
            yield
        self._progress.log(f"wrote the trace {folder}")

    def record(
        self,
        iteration: int,
        state: TrainState,
        collected: Collected,
        sweep_metrics: dict[str, float],
    ) -> None:
        """Writes and shows an iteration: its metrics and its trajectories.

        Raises:
          NotLearning: it is one too many that moved no parameter.
        """
        more: dict[str, Any] = dict(sweep_metrics)
        versions = [t.policy_version for t in collected.trajectories]
        more["rollout/policy_lag"] = iteration - 1 - min(versions)
        if self.config.log_checksum:
            more["state/checksum"] = checksum(state)
        tasks = {t.task_id for t in collected.sampled}
        labels = gate.labels_of(self._environment, tasks, self._progress.log)
        self._log.iteration(iteration, collected, self._stats, labels, more)
        self._stagnation.check(iteration, collected, sweep_metrics)

    def evaluate(self, state: TrainState, iteration: int) -> None:
        """Evaluates on the held-out split; before and after training on the extra splits too.

        What is going to be saved is evaluated on the split that checkpoints are chosen on.
        """
        config, selects_on = self.config.evaluation, self._selects_on
        splits = [config.split]
        if iteration in (0, self.config.iterations):
            splits += config.extra_splits
        selects = selects_on is not None and iteration > 0
        selects = selects and self.due(iteration, self.config.checkpoint.every)
        if selects and selects_on not in splits:
            splits.append(selects_on)
        self._progress.phase("evaluation")
        values: dict[str, float] = {}
        with self._log.timed("evaluation"):
            for split in splits:
                values |= evaluate(
                    self.config,
                    self.engine,
                    self.pool,
                    self.policy.tokenizer,
                    self.policy.whole(state.params),
                    split=split,
                    k=config.k,
                    iteration=iteration,
                    stop=self._asked,
                    on_played=functools.partial(self._log.episodes, iteration, split),
                    watch=self._progress.watch,
                )
        if selects:
            self._score = values[f"{evaluation_prefix(config.split, selects_on)}/avg@{config.k}"]
            values["eval/selected_on"] = float(selects_on == config.split)
        self._log.evaluation(iteration, values)
        self.evaluated = True

    def _asked(self) -> bool:
        """Whether this process was asked to stop; the others may not know."""
        return self._request.asked

    def _notes(self) -> dict[str, Any]:
        """What every checkpoint says of its run."""
        position = self._done * self.config.rollout.tasks
        random = {"seed": self.config.seed, "iteration": self._done}
        remat = self.policy.network.arch.remat
        about = {"config": to_dict(self.config), "random": random, "remat": remat}
        about |= {"data_position": position, "idle_iterations": self._stagnation.idle}
        return about | {"selected_on": self._selects_on}

    def _tell_selection(self, notes: Mapping[str, Any]) -> None:
        """Warns where checkpoints so far were chosen on another split than from now on."""
        own, before = self._selects_on, notes.get("selected_on", self.config.evaluation.split)
        if None not in (own, before) and own != before:
            self._progress.log(
                f"checkpoints are selected on split {own!r} from now on, and were on {before!r}:"
                " the best one is selected by figures of both"
            )

    def _tell_remat(self, notes: Mapping[str, Any]) -> None:
        """Says where other activations are computed again than before, as on other devices."""
        own = self.policy.network.arch.remat
        theirs = notes.get("remat", own)  # older versions did not say
        if theirs != own:
            self._progress.log(
                f"remat: {own}, and {theirs} when the checkpoint was made: results are the same up"
                f" to rounding; with model.remat={theirs} they are bitwise the same"
            )
