"""The progress of a run: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from seeupo_jax.display import view
from seeupo_jax.display.pace import PhaseDurations, Rate
from seeupo_jax.display.terminal import SafeStream, can_redraw, format_duration
from seeupo_jax.display.view import DisplayRow, Moment, State
from seeupo_jax.errors import terminal_line
from seeupo_jax.metrics.statistics import read_estimates, split_and_metric
from seeupo_jax.rollout.watch import Watch

if TYPE_CHECKING:
    from seeupo_jax.display.live_display import LiveDisplay

_LOGGER = logging.getLogger("seeupo_jax.run")
_DISPLAYS = ("auto", "rich", "plain")
_TICK_S = 1.0
_OF_AN_ITERATION = ("rollout", "sweep")  # phases that the iteration's own line accounts for
_NOTICED_S = 1.0  # a program that compiles for longer is shown
_LONG_S = 10.0  # a phase this long is worth lines of its own
_LINE_EVERY_S = 30.0
_SPARKLINE = 30  # values
_RECENT = 20  # iterations that the time left is judged by


class ProgressDisplay:
    """Shows a run's phases and iterations; a failing terminal does not stop the run.

    Use it as a context manager. On a terminal it redraws a few lines; elsewhere, or with
    `display='plain'`, it writes one line per iteration, and in a long phase one every 30 s.

    The application's `logging` configuration has precedence: if the logger `seeupo_jax.run` is
    enabled for INFO, lines become its records instead of output; if its level or that of
    `seeupo_jax` is above INFO, nothing is shown.

    Args:
      total_iterations: of the whole run; 0: the run has no iterations.
      display: auto | rich | plain. Both auto and rich need a terminal; without one lines are plain.
      stream: where to write; None takes the standard output.
      shown: False to show nothing, as on all processes but the first.
      clock: seconds, for the times shown.

    Attributes:
      watch: the collections that are shown.
      compilations: since its creation; their time is shown separately from the phase's.

    Raises:
      ValueError: an unknown display.
    """

    def __init__(
        self,
        total_iterations: int,
        display: str = "auto",
        *,
        stream: TextIO | None = None,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        if display not in _DISPLAYS:
            allowed = ", ".join(_DISPLAYS)
            raise ValueError(f"config.telemetry.display: got {display!r}; allowed: {allowed}.")
        from seeupo_jax.metrics.compilation import Compilations  # jax: only where something runs

        self._stream = SafeStream(stream)
        self._shown = shown
        shown = shown and (_LOGGER.isEnabledFor(logging.INFO) or not _has_level())
        redraw = shown and display != "plain" and can_redraw(self._stream)
        self.watch, self.compilations = Watch(), Compilations(clock=clock)
        self._fell_back = shown and display == "rich" and not redraw
        self._clock = clock
        now = clock()
        self._state = State(total_iterations, 0, "", began=now, phase_began=now)
        self._compiled = (0, 0.0)  # programs, and seconds of compiling, before the phase
        self._pace, self._rate = PhaseDurations(), Rate()
        self._iteration_began = now
        self._next_line = now + _LONG_S
        self._writing, self._over = threading.Lock(), threading.Event()
        self._ticker = threading.Thread(target=self._tick_on, name="progress", daemon=True)
        self._live = self._live_display() if redraw else None

    def __enter__(self) -> ProgressDisplay:
        (self._ticker if self._live is None else self._live).start()
        if self._fell_back:
            self.log("display=rich needs a terminal; plain lines instead")
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.phase("finished" if error is None else "stopped")
        if self._live is not None:
            self._live.stop()
        else:
            self._over.set()
            self._ticker.join()
        self.compilations.close()

    def resumed(self, done: int) -> None:
        """Says how many iterations earlier processes have done."""
        self._state = replace(self._state, done=done)

    def phase(self, name: str, done: int = 0) -> None:
        """Begins a phase of the run; `rollout` begins an iteration.

        A phase of 10 s or more gets a line when it ends, except `rollout`, `sweep` and `compiling`:
        other lines report their times.

        Args:
          done: steps that an earlier phase of this name, or an earlier process, completed.
        """
        now = self._clock()
        self._end_phase(now)
        if name == _OF_AN_ITERATION[0]:
            self._iteration_began = now
        self._next_line = now + _LONG_S
        self._compiled = self.compilations.programs, self.compilations.seconds_at(now)
        self._state = replace(self._state, phase=name, phase_began=now, step=(0, 0, ""), first=done)

    def step(self, done: int, total: int, detail: str = "") -> None:
        """Says how far the phase is, as often as you like; plain lines come after 10 s, then 30 s.

        Args:
          done: steps done out of `total`.
          detail: a few words more, such as `loss 0.41`.
        """
        self._state = replace(self._state, step=(done, total, detail))
        self.tick()

    def iteration(self, i: int, metrics: Mapping[str, Any]) -> None:
        """Says that the first `i` iterations are done, the last of them with these metrics.

        Args:
          i: 1 after the first iteration.
          metrics: names as in metrics.jsonl; those missing or NaN are not shown.
        """
        now = self._clock()
        state = self._state
        success = view.number(metrics.get(view.SUCCESS))
        successes = state.successes if math.isnan(success) else (*state.successes, success)
        self._state = replace(
            state,
            done=i,
            metrics=dict(metrics),
            seconds=now - self._iteration_began,
            successes=successes[-_SPARKLINE:],
            ends=(*state.ends, now)[-_RECENT - 1 :],
        )
        self._iteration_began = now
        if self._live is None or _LOGGER.isEnabledFor(logging.INFO):
            self.log(view.iteration_line(self._state))

    def evaluation(self, i: int, metrics: Mapping[str, Any]) -> None:
        """Shows the avg@k and pass@k among these metrics, measured after `i` iterations."""
        parts = [
            f"{' '.join(split_and_metric(name, '')).strip()} {estimate}"
            for name, estimate in read_estimates(metrics).items()
        ]
        if parts:
            self._state = replace(self._state, evaluation=view.join(f"after {i}", *parts))
            self.log(view.join(f"evaluation {i}/{self._state.total}", *parts))

    def log(self, text: str) -> None:
        """Writes a line that stays; control characters in it are removed."""
        if not self._shown:
            return
        text = terminal_line(text)
        if _LOGGER.isEnabledFor(logging.INFO) or _has_level():
            _LOGGER.info(text)
            return
        if self._live is not None:
            self._live.line(text)
            return
        with self._writing:
            self._stream.write(text + "\n")
            self._stream.flush()

    def tick(self) -> None:
        """Writes a line of the phase, where lines are plain and the last one is long ago."""
        now = self._clock()
        if now < self._next_line or self._live is not None or not self._state.phase:
            return
        self._next_line = now + _LINE_EVERY_S
        self.log(view.phase_line(self._state, self._moment(now)))

    def _tick_on(self) -> None:
        while not self._over.wait(_TICK_S):
            self.tick()

    def _end_phase(self, now: float) -> None:
        state = self._state
        took = now - state.phase_began - self._waited(now)
        if not state.phase or state.phase == view.COMPILING:
            return
        done, total, _ = state.step
        if state.first == 0 and done == total:  # not a part of a later phase
            self._pace.record(state.phase, took)
        if state.phase not in _OF_AN_ITERATION and took >= _LONG_S:
            self.log(f"{state.phase} took {format_duration(took)}")

    def _waited(self, now: float) -> float:
        """Seconds in which the phase waited for programs to be compiled."""
        if self._state.phase == view.COMPILING:
            return 0.0
        return self.compilations.seconds_at(now) - self._compiled[1]

    def _moment(self, now: float) -> Moment:
        state, activity = self._state, self.watch.look()
        rate = 0.0 if activity is None else self._rate.of(now, activity.tokens)
        part = view.part_done(state, activity)
        done, total, _ = state.step
        fraction = (done - state.first) / (total - state.first) if state.first < total else part
        waited, program = self._waited(now), None
        took = now - state.phase_began - waited
        remaining_s = None if part == 1 else self._pace.left(state.phase, took, fraction)
        compiling_s = self.compilations.under_way_s(now)
        if state.phase != view.COMPILING and compiling_s >= _NOTICED_S:
            program = (self.compilations.programs - self._compiled[0] + 1, compiling_s)
        return Moment(now, activity, rate, remaining_s, waited, program)

    def _live_display(self) -> LiveDisplay:
        from seeupo_jax.display.live_display import LiveDisplay  # rich: only for a terminal

        unicode = self._stream.unicode

        def rows() -> Sequence[DisplayRow]:
            return view.rows(self._state, self._moment(self._clock()), unicode=unicode)

        return LiveDisplay(self._stream, rows)


def _has_level() -> bool:
    """Whether an application has set the level of the run's logger, or of the package's."""
    return any(logging.getLogger(name).level for name in (_LOGGER.name, "seeupo_jax"))
