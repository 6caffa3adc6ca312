"""What a run shows while it works: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TextIO

from seeupo_jax.telemetry.statistics import read_estimates, split_and_metric
from seeupo_jax.telemetry.terminal import SafeStream, can_redraw, format_count, format_duration

_SUCCESS = "rollout/success_rate"
_OF_AN_ITERATION = ("rollout", "sweep")  # phases that the iteration's own line accounts for
_LONG_S = 10.0  # a phase this long is worth lines of its own
_STEP_LINE_EVERY_S = 30.0
_SPARKS = {True: "▁▂▃▄▅▆▇█", False: "._-=+*%#"}  # by whether the terminal speaks Unicode
_SPARKLINE = 30  # values
_RECENT = 20  # iterations that the time left is judged by


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _rate(value: float) -> str:
    return f"{format_count(value)} tok/s"


def _small(value: float) -> str:
    return f"{value:.2g}"


# Label, metric and its format, in the order shown.
_OUTCOME = (
    ("success", _SUCCESS, _fixed(2)),
    ("reward", "rollout/reward_mean", _fixed(2)),
    ("turns", "rollout/turns_mean", _fixed(1)),
)
_SPEED = (
    ("rollout", "rollout/tokens_per_second", _rate),
    ("sweep", "sweep/tokens_per_second", _rate),
)
_UPDATE = (("kl", "sweep/kl", _small),)
_TROUBLE = (  # of environments; shown where there was any
    ("retries", "rollout/retries", _fixed(0)),
    ("failed", "rollout/failed", _fixed(0)),
    ("groups dropped", "rollout/groups_dropped", _fixed(0)),
)


@dataclass(frozen=True)
class _State:
    """All that is shown; replaced, never changed, so the drawing thread sees a whole one."""

    total: int
    done: int
    phase: str
    began: float
    phase_began: float
    step: tuple[int, int, str] = (0, 0, "")  # done, total and detail within the phase
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None  # of the last iteration
    successes: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()  # when the last iterations ended


class _Display(Protocol):
    live: bool

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def line(self, text: str) -> None: ...


class _Plain:
    """Lines of text, each written at once."""

    live = False

    def __init__(self, stream: SafeStream, _: Callable[[], Any]):
        self._stream = stream

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class _Rich:
    """A few lines at the foot of the terminal that are redrawn; other lines scroll above them."""

    live = True

    def __init__(self, stream: SafeStream, render: Callable[[], Any]):
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        # Standard error is drawn above the display only if it shares the terminal: `2> file` holds.
        shared = sys.stderr is not None and sys.stderr.isatty()
        self._live = Live(
            console=self._console,
            get_renderable=render,
            refresh_per_second=4,
            redirect_stderr=shared,
        )

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


_DISPLAYS = {"rich": _Rich, "plain": _Plain}


class Progress:
    """Shows a run's phases and iterations; nothing that the terminal does can stop the run.

    Use it as a context manager. On a terminal it redraws a few lines; elsewhere, or with
    `display='plain'`, it writes one line an iteration.

    Args:
      total_iterations: of the whole run.
      display: auto | rich | plain. Both auto and rich need a terminal; without one lines are plain.
      start: iterations that an earlier run has done.
      stream: where to write; None takes the standard output.
      clock: seconds, for the times shown.

    Raises:
      ValueError: an unknown display.
    """

    def __init__(
        self,
        total_iterations: int,
        display: str = "auto",
        start: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if display not in ("auto", *_DISPLAYS):
            allowed = ", ".join(("auto", *_DISPLAYS))
            raise ValueError(f"config.telemetry.display: got {display!r}; allowed: {allowed}.")
        safe = SafeStream(stream)
        redraw = display != "plain" and can_redraw(safe)
        self._fell_back = display == "rich" and not redraw
        self._unicode = safe.encoding.lower().startswith("utf")
        self._clock = clock
        now = clock()
        self._state = _State(total_iterations, start, "", began=now, phase_began=now)
        self._iteration_began = now
        self._next_step_line = now
        # Last: the live display draws once as it is made.
        self._display: _Display = _DISPLAYS["rich" if redraw else "plain"](safe, self._render)

    def __enter__(self) -> Progress:
        self._display.start()
        if self._fell_back:
            self.log("display=rich needs a terminal; plain lines instead")
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.phase("finished" if error is None else "stopped")
        self._display.stop()

    def phase(self, name: str) -> None:
        """Says what the run does from now on; `rollout` begins an iteration.

        A phase of 10 s or more that is neither `rollout` nor `sweep` gets a line when it ends.
        """
        now = self._clock()
        self._end_phase(now)
        if name == _OF_AN_ITERATION[0]:
            self._iteration_began = now
        self._next_step_line = now + _LONG_S
        self._state = replace(self._state, phase=name, phase_began=now, step=(0, 0, ""))

    def step(self, done: int, total: int, detail: str = "") -> None:
        """Says how far the phase is, as often as you like; plain lines come after 10 s, then 30 s.

        Args:
          done: steps done out of `total`.
          detail: a few words more, such as `loss 0.41`.
        """
        now = self._clock()
        self._state = replace(self._state, step=(done, total, detail))
        if now >= self._next_step_line and not self._display.live:
            self._next_step_line = now + _STEP_LINE_EVERY_S
            self.log(_join(self._state.phase, *self._step_parts(now)))

    def iteration(self, i: int, metrics: Mapping[str, Any]) -> None:
        """Says that the first `i` iterations are done, the last of them with these metrics.

        Args:
          i: 1 after the first iteration.
          metrics: names as in metrics.jsonl; those missing or NaN are not shown.
        """
        now = self._clock()
        state = self._state
        success = _number(metrics.get(_SUCCESS))
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
        if not self._display.live:
            self.log(self._iteration_line())

    def evaluation(self, i: int, metrics: Mapping[str, Any]) -> None:
        """Shows the avg@k and pass@k among these metrics, measured after `i` iterations."""
        parts = [
            f"{' '.join(split_and_metric(name, '')).strip()} {estimate}"
            for name, estimate in read_estimates(metrics).items()
        ]
        if parts:
            self.log(_join(f"evaluation {i}/{self._state.total}", *parts))

    def log(self, text: str) -> None:
        """Writes a line that stays."""
        self._display.line(text)

    def _end_phase(self, now: float) -> None:
        state = self._state
        took = now - state.phase_began
        if state.phase and state.phase not in _OF_AN_ITERATION and took >= _LONG_S:
            self.log(f"{state.phase} took {format_duration(took)}")

    def _iteration_line(self) -> str:
        state = self._state
        shown = _shown(state.metrics, _OUTCOME + _SPEED + _UPDATE) + _troubles(state.metrics)
        return _join(
            f"iteration {state.done}/{state.total}",
            _pairs(shown),
            *self._time_parts(),
        )

    def _step_parts(self, now: float) -> list[str]:
        done, total, detail = self._state.step
        parts = [f"{done}/{total}", detail]
        if 0 < done < total:
            left = (now - self._state.phase_began) / done * (total - done)
            parts.append(f"left {format_duration(left)}")
        return parts

    def _time_parts(self) -> list[str]:
        state = self._state
        if state.seconds is None:
            return []
        parts = [f"{state.seconds:.1f} s/it"]
        if state.done < state.total:
            # From end to end: that counts evaluations and checkpoints, and not the first compile.
            each = state.seconds
            if len(state.ends) > 1:
                each = (state.ends[-1] - state.ends[0]) / (len(state.ends) - 1)
            parts.append(f"left {format_duration(each * (state.total - state.done))}")
        return parts

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        state, now = self._state, self._clock()
        head = Table.grid(padding=(0, 2))
        took = now - state.phase_began
        phase = [format_duration(took)] if took >= 1 else []
        if state.step[1]:
            phase = self._step_parts(now)
        head.add_row(
            Text(f"iteration {state.done}/{state.total}", style="bold"),
            ProgressBar(total=max(state.total, 1), completed=state.done, width=24),
            Text(_join(state.phase, *phase), style="cyan"),
        )
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        elapsed = f"elapsed {format_duration(now - state.began)}"
        for label, parts in (
            ("policy", [_pairs(_shown(state.metrics, _OUTCOME + _UPDATE))]),
            ("success", [sparkline(state.successes, unicode=self._unicode)]),
            ("speed", [_pairs(_shown(state.metrics, _SPEED))]),
            ("trouble", [_pairs(_troubles(state.metrics))]),
            ("time", [elapsed, *self._time_parts()]),
        ):
            if text := _join(*parts):
                rows.add_row(label, Text(text))
        whole = Table.grid()
        whole.add_row(head)
        whole.add_row(rows)
        return whole


def sparkline(values: Sequence[float], *, unicode: bool = True) -> str:
    """One mark a value; the scale is fixed to 0..1, so that noise does not look like progress."""
    marks = _SPARKS[unicode]
    top = len(marks) - 1
    return "".join(marks[round(min(max(value, 0.0), 1.0) * top)] for value in values)


def _join(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _shown(metrics: Mapping[str, Any], fields: tuple) -> list[tuple[str, str]]:
    numbers = [(label, _number(metrics.get(name)), form) for label, name, form in fields]
    return [(label, form(number)) for label, number, form in numbers if not math.isnan(number)]


def _troubles(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(label, text) for label, text in _shown(metrics, _TROUBLE) if text != "0"]


def _pairs(shown: Sequence[tuple[str, str]]) -> str:
    return _join(*(f"{label} {text}" for label, text in shown))
