"""A run's checkpoints, and the sweep that it was stopped in: written, found again, removed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.errors import NotLearning
from seeupo_jax.evaluation.missing import remaining_splits, selection_notice
from seeupo_jax.learner.credit.role_baselines import Baselines
from seeupo_jax.learner.credit.running_rewards import Moments, Statistics
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.metrics.run_manifest import note_checkpoints
from seeupo_jax.parallel.stop_signal import Stopped, StoppedCompiling
from seeupo_jax.policy_io.resume_check import (
    adapters_note,
    check_same_run,
    check_training,
    score_conditions,
)
from seeupo_jax.policy_io.resuming import (
    chat_note,
    check_same_chat,
    check_same_sweep,
    resume_message,
)
from seeupo_jax.training.early_stopping import Progress, read_progress
from seeupo_jax.training.iteration_source import SamplingOrigin, StoppedTrajectories
from seeupo_jax.training.run_components import RunComponents
from seeupo_jax.training.teacher_files import check_same_teachers, teachers_note
from seeupo_jax.trajectories.forks import fill_up
from seeupo_jax.types import TrainState


class StoppedSweep(NamedTuple):
    """A sweep that was stopped between two turns, and is to be resumed.

    arrays, notes: of its `SweepStopped`. stored: the trajectories that it is of.
    """

    arrays: Mapping[str, Any]
    notes: Mapping[str, Any]
    stored: StoppedTrajectories


class RunState(NamedTuple):
    """Where a run is between two iterations.

    done: the last iteration whose sweep is over; 0: none is.
    train: the training state after it, or in the middle of the next sweep: see `stopped_sweep`.
    evaluated, saved: whether what is due after `done` of these two has been done.
    score: avg@k on the split that checkpoints are selected on, where `done` was evaluated on it.
    left: the splits to evaluate `done` on; None: all of `evaluated_splits`.
    stopped_sweep: of iteration `done + 1`, where the run was stopped in it.
    statistics: of the rewards of turns up to `done`, where the estimator reads them.
    baselines: of roles after `done`, where the estimator reads them.
    steps_V: optimizer steps behind the newest versions of the policy, the last that of `done`.
    progress: of the evaluations up to `done`. ended: whether the run was over after `done`, before
      its last iteration, and all that belongs to an end was evaluated.
    """

    done: int
    train: TrainState
    evaluated: bool = False
    saved: bool = True
    score: float | None = None
    left: Sequence[str] | None = None
    stopped_sweep: StoppedSweep | None = None
    statistics: Statistics | None = None
    progress: Progress = Progress()
    ended: bool = False
    baselines: Baselines | None = None
    steps_V: tuple[int, ...] = ()


class RunCheckpoints:
    """All of a run that outlives its process; with several processes each calls every method."""

    def __init__(self, parts: RunComponents):
        self._parts = parts
        settings, log = parts.config.checkpoint, parts.progress.log
        folder = find_directory(settings, parts.workdir)
        self._checkpoints = Checkpoints(
            folder, settings.keep, settings.keep_best, measured=score_conditions, log=log
        )
        self._folder, self._stopped_folder = folder, f"{folder}/stopped"
        self._stopped = Checkpoints(self._stopped_folder, keep=1, keep_best=0, log=log)
        # Of files, which may be gone when a checkpoint is written.
        self._made_with = {
            "adapters": adapters_note(parts.config),
            "chat": chat_note(parts.config, parts.workdir),
            "teachers": teachers_note(parts.config),
        }

    def restore(self, example: TrainState) -> RunState | None:
        """The run as its newest checkpoint has it; None where there is none.

        Raises:
          ValueError: it is of another run.
        """
        newest = self._checkpoints.newest({}, partial=True, optional=True)
        if newest is not None:  # of another run its arrays may be others too
            self._check_same_run(newest[1])
        restored = self._checkpoints.restore(example)
        if restored is None:
            return None
        done, train, notes = restored
        self._resume_from(done, notes)
        self._print_remat(notes)
        config, selects_on = self._parts.config, self._parts.selects_on
        notice = selection_notice(config, selects_on, notes)
        if notice is not None:
            self._parts.progress.log(notice)
        self._parts.progress.log(resume_message("iteration", done, config.iterations))
        score = self._checkpoints.score(done)
        left = remaining_splits(config, selects_on, done, notes, score)
        return RunState(
            done,
            train,
            evaluated=not left,
            saved=True,
            score=score,
            left=left,
            statistics=_statistics(notes),
            baselines=notes.get("baselines"),
            steps_V=tuple(notes.get("policy_steps", ())),
            progress=read_progress(notes) if notice is None else Progress(),
            ended=notes.get("ended", False),
        )

    def restore_sweep(self, state: RunState) -> RunState:
        """The run in the middle of its next sweep where it was stopped in one; else as it is.

        Raises:
          ValueError: it is of another run, or of another rule of the updates.
        """
        iteration, last = self._stopped.latest(), self._parts.config.iterations
        if iteration is None or iteration <= state.done:
            return state
        if iteration > last:
            self._parts.progress.log(
                f"the stopped sweep of iteration {iteration} is skipped: the last iteration is"
                f" {last}"
            )
            return state
        newest = self._stopped.newest({}, partial=True, optional=True)
        if newest is None:
            return self._sweep_again(iteration, state, "checkpoint is damaged")
        notes = newest[1]
        self._check_same_run(notes)
        check_same_sweep(self._parts.config, iteration, notes["config"], self._stopped_folder)
        origin = notes.get("trajectories", {})
        stored = self._parts.source.stored(iteration, SamplingOrigin(**origin)) if origin else None
        if stored is None:
            return self._sweep_again(iteration, state, "trajectories are missing")
        room = self._parts.config.rollout.trajectories
        trajectories = fill_up(stored.collected.trajectories, room)
        example = stopped_arrays(self._parts.learner, state.train, trajectories)
        restored = self._stopped.restore(example, optional=True)
        if restored is None:
            return self._sweep_again(iteration, state, "checkpoint is damaged")
        _, arrays, notes = restored
        self._resume_from(iteration - 1, notes)
        self._parts.progress.log(f"resuming in the sweep of iteration {iteration}")
        stopped_sweep = StoppedSweep(arrays, notes["sweep"], stored)
        return RunState(
            iteration - 1,
            arrays["state"],
            evaluated=True,
            stopped_sweep=stopped_sweep,
            statistics=_statistics(notes),
            baselines=notes.get("baselines"),
            steps_V=tuple(notes.get("policy_steps", ())),
            progress=read_progress(notes),
        )

    def save(self, state: RunState) -> RunState:
        """Saves a checkpoint in the background; the run with that noted."""
        notes = self._notes(state) | {"evaluated": state.evaluated}
        with self._parts.log.timed("checkpoint"):
            self._parts.log.wait()  # a resumed run writes no trajectories of this iteration again
            self._checkpoints.save(state.done, state.train, notes, state.score)
            self._forget_covered()
        return state._replace(saved=True)

    def save_stopped(self, state: RunState, stopped: Stopped | NotLearning) -> None:
        """Saves all that is needed to resume this run where it was stopped."""
        where = f"after iteration {state.done}"
        if isinstance(stopped, SweepStopped):
            where = f"in the sweep of iteration {state.done + 1}, {stopped.notes['done']} turns in"
            self._save_sweep(state, stopped)
        elif isinstance(stopped, StoppedCompiling):
            where = (
                f"before iteration {state.done + 1}, while programs were compiled;"
                f" {self._held(state)}"
            )
        elif not state.saved:
            self.save(state)
        self.wait()
        self._parts.progress.log(f"stopped {where}; rerun the command to resume")

    def best(self) -> int | None:
        """The best checkpoint that is on the disk."""
        self.wait()
        return self._checkpoints.best()

    def wait(self) -> None:
        """Returns when the last checkpoint is on the disk, and removes what it covers."""
        self._checkpoints.wait()
        self._forget_covered()

    def close(self) -> None:
        """Finishes what is being written."""
        with contextlib.ExitStack() as parts:
            for part in (self._checkpoints, self._stopped):
                parts.callback(part.close)

    def _sweep_again(self, iteration: int, state: RunState, why: str) -> RunState:
        self._parts.progress.log(
            f"the stopped sweep of iteration {iteration} starts again: its {why}"
        )
        return state

    def _save_sweep(self, state: RunState, stopped: SweepStopped) -> None:
        source = self._parts.source
        notes = self._notes(state) | {
            "sweep": stopped.notes,
            "trajectories": source.origin._asdict(),
        }
        source.wait()  # what was stopped is nothing without its trajectories
        self._parts.log.wait()
        self._stopped.save(state.done + 1, stopped.arrays, notes)
        self._stopped.wait()

    def _forget_covered(self) -> None:
        """Notes that a checkpoint is on the disk, and removes what the newest one covers."""
        covered, stopped = self._checkpoints.latest(), self._stopped.latest()
        if covered is None:
            return
        if jax.process_index() == 0:
            note_checkpoints(self._parts.workdir, self._folder)
        self._parts.source.forget(covered)
        if stopped is not None and stopped <= covered and jax.process_index() == 0:
            self._stopped.clear()

    def _held(self, state: RunState) -> str:
        """The initial state of a run."""
        if state.stopped_sweep is not None:
            return f"nothing has changed since it was stopped in the sweep of {state.done + 1}"
        newest = self._checkpoints.latest()
        if newest is None:
            return "nothing was saved, since no iteration was started"
        return f"nothing has changed since checkpoint {newest}"

    def _notes(self, state: RunState) -> dict[str, Any]:
        """The notes of a run that every checkpoint has."""
        parts = self._parts
        return (
            parts.source.state(state.done)
            | self._made_with
            | {
                "config": to_dict(parts.config),
                "random": {"seed": parts.config.seed, "iteration": state.done},
                "remat": parts.policy.network.arch.remat,
                "data_position": state.done * parts.config.rollout.tasks,
                "idle_iterations": parts.stagnation.idle,
                "selected_on": parts.selects_on,
                "evaluations": list(state.progress),
                "ended": state.ended,
                "policy_steps": list(state.steps_V),
                **({} if state.statistics is None else {"statistics": dict(state.statistics)}),
                **({} if state.baselines is None else {"baselines": dict(state.baselines)}),
            }
        )

    def _check_same_run(self, notes: Mapping[str, Any]) -> None:
        """ValueError: a checkpoint's notes are of another run."""
        check_training(notes)
        check_same_run(self._parts.config, notes["config"], notes.get("adapters"))
        check_same_chat(self._parts.config, self._parts.workdir, notes)
        check_same_teachers(self._parts.config, notes.get("teachers"))

    def _resume_from(self, done: int, notes: Mapping[str, Any]) -> None:
        """Takes a checkpoint's notes; it was made after iteration `done`, or in the next one."""
        self._parts.stagnation.idle = notes.get("idle_iterations", 0)
        self._parts.source.restore(done, notes)

    def _print_remat(self, notes: Mapping[str, Any]) -> None:
        """Says where rematerialisation is another than before, as on other devices."""
        remat = self._parts.policy.network.arch.remat
        saved = notes.get("remat", remat)  # older versions did not say
        if saved != remat:
            self._parts.progress.log(
                f"remat: {remat}, and {saved} when the checkpoint was made: results are the"
                f" same up to rounding; with model.remat={saved} they are bitwise the same"
            )


def _statistics(notes: Mapping[str, Any]) -> Statistics | None:
    """Statistics in a checkpoint's notes, each number bit for bit; None: it has none."""
    stored = notes.get("statistics")
    return None if stored is None else {name: Moments(*each) for name, each in stored.items()}
