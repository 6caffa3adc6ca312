"""A run's progress as text: rows for a display, and single lines for a log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from seeupo_jax.display.terminal import format_count, format_duration
from seeupo_jax.errors import printable
from seeupo_jax.metric_table import DISPLAY
from seeupo_jax.rollout.watch import Activity

SUCCESS = "rollout/success_rate"
COMPILING = "compiling"  # the phase whose steps are programs that are compiled ahead
_SPARKS = {True: "▁▂▃▄▅▆▇█", False: "._-=+*%#"}  # by whether the terminal speaks Unicode
_SLOW_S = 1.0  # a call of an environment that takes longer is worth a name
GAP = "  "


def _rate(value: float) -> str:
    return f"{format_count(value)} tok/s"


@dataclass(frozen=True)
class State:
    """All that is shown; replaced, never changed, so the drawing thread sees a whole one."""

    total: int
    done: int
    phase: str
    began: float
    phase_began: float
    step: tuple[int, int, str] = (0, 0, "")  # done, total and detail within the phase
    first: int = 0  # steps that were done when the phase began
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None  # of the last iteration
    successes: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()  # when the last iterations ended
    evaluation: str = ""  # the last one


class Moment(NamedTuple):
    """Values that change between two redraws of the display.

    rate: tokens/s. phase_left: seconds.
    compiled: seconds of the phase spent waiting for compilation.
    program: the number, in the phase, of the program that is being compiled, and the seconds so
      far; None: none is.
    """

    now: float
    activity: Activity | None = None
    rate: float = 0.0
    phase_left: float | None = None
    compiled: float = 0.0
    program: tuple[int, float] | None = None


class DisplayRow(NamedTuple):
    """A row of the display.

    bar: completed part, from 0 to 1; None: no bar.
    trend: marks after the first part; the last ones matter most.
    """

    label: str
    parts: Sequence[str]
    bar: float | None = None
    trend: str = ""


def rows(state: State, moment: Moment, *, unicode: bool = True) -> list[DisplayRow]:
    """The display's rows, the most important first; none is empty or has control characters."""
    elapsed = f"elapsed {format_duration(moment.now - state.began)}"
    every = [
        DisplayRow("phase", _phase_parts(state, moment), part_done(state, moment.activity)),
        DisplayRow("envs", _environments(moment)),
        DisplayRow("slowest", _slowest(moment.activity)),
        DisplayRow(
            "success",
            [f"{state.successes[-1]:.2f}"] if state.successes else [],
            trend=sparkline(state.successes, unicode=unicode),
        ),
        DisplayRow("policy", _shown(state.metrics, "outcome", "update")),
        DisplayRow("speed", _shown(state.metrics, "speed")),
        DisplayRow("tested", [state.evaluation] if state.evaluation else []),
        DisplayRow("trouble", _troubles(state.metrics)),
    ]
    if state.total:
        count = f"{state.done}/{state.total}"
        parts = [count, *time_parts(state, moment.now), elapsed]
        every.insert(0, DisplayRow("iteration", parts, state.done / state.total))
    else:
        every[0] = every[0]._replace(parts=[*every[0].parts, elapsed])
    return [row._replace(parts=[*map(_one_line, row.parts)]) for row in every if row.parts]


def iteration_line(state: State) -> str:
    """The log line of the last iteration."""
    parts = "success", "outcome", "speed", "update"
    shown = _shown(state.metrics, *parts) + _troubles(state.metrics)
    count = f"iteration {state.done}/{state.total}"
    return join(count, *shown, *time_parts(state)[::-1])


def phase_line(state: State, moment: Moment) -> str:
    """The log line of the current phase."""
    parts = _phase_parts(state, moment)
    at = len(parts) - parts[-1].startswith("left ")  # the remaining time comes last
    slowest = [f"slowest {text}" for text in _slowest(moment.activity)]
    return _one_line(join(*parts[:at], *_environments(moment), *slowest, *parts[at:]))


def time_parts(state: State, now: float | None = None) -> list[str]:
    """The remaining time of the run, and the duration of the last iteration.

    Args:
      now: inside an iteration; None: at the end of one.
    """
    if state.seconds is None:
        return []
    parts = [f"{state.seconds:.1f} s/it"]
    if state.done < state.total:
        # From end to end: that counts evaluations and checkpoints, and not the first compile.
        each = state.seconds
        if len(state.ends) > 1:
            each = (state.ends[-1] - state.ends[0]) / (len(state.ends) - 1)
        spent = 0.0 if now is None else min(each, now - state.ends[-1])
        parts.insert(0, f"left {format_duration(each * (state.total - state.done) - spent)}")
    return parts


def part_done(state: State, activity: Activity | None) -> float | None:
    """How much of the phase is done, from 0 to 1; None where it is not counted."""
    done, total, _ = state.step
    if not total and activity is not None and state.phase != "sweep":
        done, total = activity.finished, activity.total
        return done / total if total else 0.0
    return done / total if total else None


def sparkline(values: Sequence[float], *, unicode: bool = True) -> str:
    """One mark a value; the scale is fixed to 0..1, so that noise does not look like progress."""
    marks = _SPARKS[unicode]
    top = len(marks) - 1
    return "".join(marks[round(min(max(value, 0.0), 1.0) * top)] for value in values)


def join(*parts: str) -> str:
    """Those parts of a line that are not empty, with a gap between them."""
    return GAP.join(part for part in parts if part)


def number(value: Any) -> float:
    """A metric's value; NaN if it is missing or no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _one_line(text: str) -> str:
    """A name from an environment, such as a task's, without line ends and control characters."""
    return printable(re.sub(r"\s", " ", text))


def _phase_parts(state: State, moment: Moment) -> list[str]:
    done, total, detail = state.step
    took, remaining_s = moment.now - state.phase_began - moment.compiled, moment.phase_left
    parts = [state.phase] if state.phase else []
    if moment.program is not None:
        number, seconds = moment.program
        return [f"{COMPILING} program {number}", format_duration(seconds)]
    if total and state.phase == COMPILING:
        parts = [f"{COMPILING} {done} of {total}", format_duration(took)]
    elif total:
        parts += [f"{done}/{total}", *([detail] if detail else [])]
    elif took >= 1:
        parts.append(format_duration(took))
    return parts + (
        [f"left {format_duration(remaining_s)}"]
        if remaining_s is not None and remaining_s >= 0.5
        else []
    )


def _environments(moment: Moment) -> list[str]:
    """The progress of a collection; during a sweep that of the next iteration."""
    seen = moment.activity
    if seen is None:
        return []
    parts = [f"{seen.finished}/{seen.total} finished", f"{seen.active} active"]
    parts += [f"{seen.failed} failed"] if seen.failed else []
    parts.append(_rate(moment.rate))
    return parts + ([f"{seen.stepping} stepping"] if seen.stepping else [])


def _slowest(seen: Activity | None) -> list[str]:
    if seen is None or seen.slowest is None or seen.slowest[1] < _SLOW_S:
        return []
    task_id, seconds = seen.slowest
    return [f"{format_duration(seconds)} in {task_id}"]


def _shown(metrics: Mapping[str, Any], *parts: str) -> list[str]:
    """Labels and values of these parts of `DISPLAY`."""
    fields = [(name, *look) for part in parts for name, look in DISPLAY[part].items()]
    numbers = [(label, number(metrics.get(name)), form) for name, label, form in fields]
    return [
        f"{label} {_rate(value) if form == 'tok/s' else format(value, form)}"
        for label, value, form in numbers
        if not math.isnan(value)
    ]


def _troubles(metrics: Mapping[str, Any]) -> list[str]:
    return [text for text in _shown(metrics, "trouble") if not text.endswith(" 0")]
