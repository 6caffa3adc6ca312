"""Callbacks of a training run, and how an application stops one."""

# Types of jax's own functions are partly unknown.
# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import located, near_misses, public_functions, shown
from seeupo_jax.errors import NotLearning
from seeupo_jax.parallel.distributed import broadcast_from_primary
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.types import Trajectory

_LOGGER = logging.getLogger(__name__)


class RunHandle:
    """A training run as its callbacks see it.

    config, workdir: the run's.
    """

    def __init__(self, config: Config, workdir: Path, request: StopRequest):
        self.config, self.workdir, self._request = config, workdir, request

    @property
    def stopping(self) -> str | None:
        """Why the run was asked to stop; None: it was not, or another process was."""
        return self._request.reason

    def stop(self, reason: str = "a callback asked") -> None:
        """Asks the run to stop, from any thread; the same `train` resumes it bit for bit.

        It stops between two turns of a sweep, two steps of a rollout or an evaluation, or two
        programs that are compiled, and saves its state. With several processes all of them stop.
        """
        self._request.ask(reason)


@runtime_checkable
class Callback(Protocol):
    """Is called at the events of a run; by default each method does nothing.

    Methods are called in the thread that called `train`, on process 0 only; a run waits for them.
    `run.stop()` stops the run. A method that raises, or calls `sys.exit`, stops it too: the run
    saves its state, no callback hears any more than `on_end`, and `train` raises the error.
    """

    def on_start(self, run: RunHandle, iteration: int) -> None:
        """The run begins, or resumes, after this iteration; 0: it is new."""

    def on_trajectories(
        self, run: RunHandle, iteration: int, split: str, trajectories: Sequence[Trajectory]
    ) -> None:
        """Trajectories were sampled: of split `train` before the sweep of an iteration that learns
        from them, of another one in the evaluation after it (`eval_train`: of an evaluation on the
        training tasks). Those of a resumed sweep are passed again.
        """

    def on_step(self, run: RunHandle, iteration: int, step: int, steps: int) -> None:
        """The device has done so many of the steps of an iteration's sweep; last, all of them.

        A step of the sweep updates a turn, or turns that are updated together, by one optimizer
        step or several (`inner_epochs`, `minibatches_per_turn`). An iteration without a token to
        learn from has no step.
        """

    def on_iteration(self, run: RunHandle, iteration: int, metrics: Mapping[str, Any]) -> None:
        """An iteration is done; metrics by their names in metrics.jsonl, numbers and texts."""

    def on_evaluation(self, run: RunHandle, iteration: int, metrics: Mapping[str, Any]) -> None:
        """The policy after an iteration was evaluated; 0: before training."""

    def on_end(self, run: RunHandle, error: BaseException | None) -> None:
        """The run is over and saved: complete, stopped (`run.stopping`) or ended by an error.

        Every callback hears it, also after one that raises here; `train` raises the run's error,
        else the first of theirs.
        """


_EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def _check_sequence(given: Any) -> None:
    if not isinstance(given, Sequence):
        raise ValueError(f"callbacks: got {shown(given)}; allowed: a sequence of callbacks.")


def check_callbacks(callbacks: Sequence[object]) -> None:
    """ValueError where one of them is no callback, such as a class instead of its object, or has
    a method that looks like one of an event and is none, or none of an event."""
    _check_sequence(callbacks)
    for number, each in enumerate(callbacks):
        if isinstance(each, type) or not isinstance(each, Callback):
            raise ValueError(
                f"callbacks[{number}]: got {shown(each)}; allowed: an object of a class that"
                " inherits from seeupo_jax.Callback."
            )
        _check_methods(each, f"callbacks[{number}]")


def _check_methods(callback: Callback, where: str) -> None:
    kind, events = type(callback), ", ".join(_EVENTS)
    methods = public_functions(kind)
    wrong = {name for name in methods.difference(_EVENTS) if name.startswith("on_")}
    if wrong := sorted(wrong.union(near_misses(methods, _EVENTS))):
        raise ValueError(
            f"{where}: got {kind.__name__} with the method {wrong[0]!r}, which no event calls;"
            f" allowed: {events}, and other methods with names unlike these."
        )
    if methods.isdisjoint(_EVENTS) and vars(callback).keys().isdisjoint(_EVENTS):
        raise ValueError(
            f"{where}: got {kind.__name__} without a method for an event; allowed: at least one of"
            f" {events}."
        )


@contextlib.contextmanager
def notify_callbacks(
    run: AbstractContextManager[Any], callbacks: Callbacks, done: int
) -> Generator[None]:
    """Calls `on_start` of the callbacks and, when all of the run is closed, `on_end`.

    Args:
      run: is closed. done: the iterations that are done.

    Raises:
      Exception: what a callback raised, when the run has saved its state; also where that run was
        ended because it does not learn. SystemExit: as well.
      RuntimeError: in the other processes, which have no callbacks; there NotLearning stays one.
    """
    try:
        with run:
            callbacks.start(done)
            yield
            failed = broadcast_from_primary(callbacks.error is not None)
        if callbacks.error is not None:
            raise callbacks.error
        if failed:
            raise RuntimeError("callbacks: one of process 0 raised; the run has saved its state.")
    except BaseException as error:
        # An iteration that a callback ended may be one that learned nothing: that is its context.
        first = callbacks.error if isinstance(error, NotLearning) else None
        if first is None or first is error:
            callbacks.end(error)
            raise
        callbacks.end(first)
        raise first from error
    callbacks.end(None)


class Callbacks:
    """The callbacks of one run, called in turn.

    Attributes:
      error: what one of them raised; after it only `on_end` is called.
    """

    def __init__(self, callbacks: Sequence[Callback], run: RunHandle):
        self._callbacks = tuple(callbacks) if jax.process_index() == 0 else ()
        self._run = run
        self.error: Exception | SystemExit | None = None

    def start(self, iteration: int) -> None:
        self._notify(lambda each: each.on_start(self._run, iteration))

    def trajectories(self, iteration: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        self._notify(lambda each: each.on_trajectories(self._run, iteration, split, trajectories))

    def step(self, iteration: int, step: int, steps: int) -> None:
        self._notify(lambda each: each.on_step(self._run, iteration, step, steps))

    def iteration(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        self._notify(lambda each: each.on_iteration(self._run, iteration, metrics))

    def evaluation(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        self._notify(lambda each: each.on_evaluation(self._run, iteration, metrics))

    def end(self, error: BaseException | None) -> None:
        """Calls `on_end` of all, then raises the first error of theirs if the run has none itself.

        Errors that are not raised are logged.
        """
        first = None
        for each in self._callbacks:
            try:
                each.on_end(self._run, error)
            except (Exception, SystemExit) as raised:
                if first is None and error is None:
                    first = raised
                    continue
                _LOGGER.warning("on_end of %s raised %s.", type(each).__name__, located(raised))
        if first is not None:
            raise first

    def _notify(self, call: Callable[[Callback], None]) -> None:
        for each in self._callbacks:
            if self.error is not None:
                return
            try:
                call(each)
            except (Exception, SystemExit) as error:  # `train` raises it when all is saved
                self.error = error
                self._run.stop(f"{type(each).__name__} raised {type(error).__name__}")
