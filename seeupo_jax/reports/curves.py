"""What the policy came to: learning curves, and success by kind of task and number of turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seeupo_jax.metrics.statistics import (
    Estimate,
    read_estimates,
    split_and_metric,
    wilson_interval,
)
from seeupo_jax.reports.blocks import Point
from seeupo_jax.reports.charts import Chart, range_chart, stack_chart
from seeupo_jax.reports.run_data import Recorded, natural
from seeupo_jax.reports.sections import Measures, Section, metric, of_run, overlay, section

_SUCCESS = "rollout/success_rate"
_WINDOW = 5  # the first and the last fifth of the iterations are compared


@dataclass(frozen=True)
class _Window:
    """Some iterations at the beginning or at the end of a run."""

    name: str
    first: int
    last: int

    def mean(self, run: Recorded, value: str, count: str) -> float | None:
        """Of a rate over the iterations, each as often as it counts; once where nobody counted."""
        numbers, times = dict(run.series(value)), dict(run.series(count))
        inside = {i: times.get(i, 1.0) for i in numbers if self.first <= i <= self.last}
        total = sum(inside.values())
        return sum(numbers[i] * n for i, n in inside.items()) / total if total else None


def curves_section(runs: Sequence[Recorded]) -> Section:
    """Success of rollouts and of evaluations by iteration, and the reward."""
    names = _evaluations(runs)
    average = {name: _evaluated(name) for name in names if " avg@" in name}
    passed = {name: _evaluated(name) for name in names if " pass@" in name}
    success: Measures = {"training rollouts": _rollouts, **average}
    rewards: Measures = {"reward": metric("rollout/reward_mean")}
    unit = {"y": "success rate", "domain": (0.0, 1.0)}
    several = "At least one of k episodes succeeds"
    return section(
        "curves",
        "Learning curves",
        "Bands are 95% intervals: of evaluations over their tasks; of training rollouts Wilson's"
        " with the number of tasks as sample size, since a task's trajectories are correlated.",
        {
            "Success": overlay("Success", runs, success, **unit),
            several: overlay(several, runs, passed, **unit),
            "Reward": overlay("Reward of training rollouts", runs, rewards, y="mean reward"),
        },
    )


def kinds_section(runs: Sequence[Recorded]) -> Section:
    """Success by number of turns and by kind of task, at the beginning and at the end."""
    kinds = {_label(name) for run in runs for name, _ in run.keyed(f"{_SUCCESS}/")}
    labels = sorted(kinds - {"turns"}, key=natural)
    names = [name for name in _evaluations(runs) if " avg@" in name]
    wanted: dict[str, list[Chart | None]] = {
        "Success by number of turns": [
            range_chart("Success by number of turns", _by_kind(runs, "turns"), kind="turns")
        ],
        "Trajectories by number of turns": [
            _turns_chart(of_run("Trajectories by number of turns", run, runs), run) for run in runs
        ],
    }
    by_label: list[Chart | None] = []
    for name in names:
        for label in _evaluated_labels(runs, name):
            series = _evaluated_kinds(runs, name, label)
            by_label.append(range_chart(f"{name} by {label}", series, kind=label))
    for label in labels:
        by_label.append(range_chart(f"Rollouts by {label}", _by_kind(runs, label), kind=label))
    wanted["Success by kind of task"] = by_label
    return section(
        "kinds",
        "Success by turns and kinds",
        "Of rollouts: means over a fifth of the iterations, without intervals. Of evaluations:"
        " with 95% intervals over tasks."
        + (" Each run at its end." if len(runs) > 1 else " At the beginning and at the end."),
        wanted,
    )


def first_and_last(run: Recorded) -> tuple[str, list[Estimate]]:
    """What success is measured by, and its value at first and now; none where nothing is."""
    names = [name for name in _evaluations([run]) if " avg@" in name]
    for name, points in [*((n, _evaluated(n)(run)) for n in names), ("rollouts", _rollouts(run))]:
        if points:
            ends = [points[0], points[-1]] if len(points) > 1 else points
            return name, [Estimate(p.value, _or_nan(p.low), _or_nan(p.high)) for p in ends]
    return "success", []


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _rollouts(run: Recorded) -> list[Point]:
    """Success of the training rollouts; with an interval where the number of tasks is known."""
    tasks = run.setting("rollout.tasks")
    rounds = dict(run.series("rollout/rounds"))
    points = []
    for iteration, value in run.series(_SUCCESS):
        bounds = ()
        if isinstance(tasks, int) and tasks > 0 and 0 <= value <= 1:
            bounds = wilson_interval(value, tasks * rounds.get(iteration, 1.0))
        points.append(Point(iteration, value, *bounds))
    return points


def _evaluations(runs: Sequence[Recorded]) -> list[str]:
    """What was evaluated in any of the runs, such as `test avg@4`."""
    return list(dict.fromkeys(name for run in runs for name in _evaluation_keys(run)))


def _evaluation_keys(run: Recorded) -> dict[str, str]:
    """Names of metrics of evaluations by what they are called."""
    keys = dict.fromkeys(key for line in run.lines for key in read_estimates(line))
    return {" ".join(split_and_metric(key, run.split)): key for key in keys}


def _evaluated(name: str) -> Callable[[Recorded], list[Point]]:
    """The points of an evaluation with their intervals."""
    return lambda run: _estimates(run, _evaluation_keys(run).get(name, ""), "")


def _estimates(run: Recorded, key: str, kind: str) -> list[Point]:
    """Of a metric of evaluations, of all tasks or of a `/LABEL=VALUE`."""
    low, high = (dict(run.series(f"{key}_{bound}{kind}")) for bound in ("low", "high"))
    return [Point(i, value, low.get(i), high.get(i)) for i, value in run.series(key + kind)]


def _evaluated_labels(runs: Sequence[Recorded], name: str) -> list[str]:
    kinds = (kind for run in runs for kind in _evaluated_values(run, name))
    return sorted({_label(kind) for kind in kinds}, key=natural)


def _evaluated_values(run: Recorded, name: str) -> list[str]:
    """The `LABEL=VALUE` of which an evaluation has a success rate."""
    key = _evaluation_keys(run).get(name)
    return [] if key is None else [kind for kind, _ in run.keyed(f"{key}/")]


def _evaluated_kinds(runs: Sequence[Recorded], name: str, label: str) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for run in runs:
        for kind in (k for k in _evaluated_values(run, name) if _label(k) == label):
            points = _estimates(run, _evaluation_keys(run)[name], f"/{kind}")
            ends = points[-1:] if len(runs) > 1 or len(points) == 1 else [points[0], points[-1]]
            for point in ends:
                series_name = run.name if len(runs) > 1 else f"iteration {point.at}"
                own = Point(_value(kind), point.value, point.low, point.high)
                series.setdefault(series_name, []).append(own)
    return series


def _by_kind(runs: Sequence[Recorded], label: str) -> dict[str, list[Point]]:
    """Success of rollouts by a label's values, in the windows of a run or at the end of several."""
    if len(runs) == 1:
        return {w.name: _in_window(runs[0], w, label) for w in _windows(runs[0])}
    return {run.name: _in_window(run, w, label) for run in runs for w in _windows(run)[-1:]}


def _in_window(run: Recorded, window: _Window, label: str) -> list[Point]:
    rates = (
        (kind, window.mean(run, name, f"rollout/trajectories/{label}={kind}"))
        for kind, name in run.keyed(f"{_SUCCESS}/{label}=")
    )
    return [Point(kind, rate) for kind, rate in rates if rate is not None]


def _windows(run: Recorded) -> list[_Window]:
    """The first and the last fifth of the iterations; one window where there is one iteration."""
    iterations = [iteration for iteration, _ in run.series(_SUCCESS)]
    if not iterations:
        return []
    size = max(1, len(iterations) // _WINDOW)
    ends = [iterations[:size], iterations[-size:]]
    windows = dict.fromkeys(_window(own[0], own[-1]) for own in ends)
    return list(windows)


def _window(first: int, last: int) -> _Window:
    name = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    return _Window(name, first, last)


def _turns_chart(title: str, run: Recorded) -> Chart | None:
    """The share of the trajectories that had so many turns."""
    counted = run.keyed("rollout/trajectories/turns=")
    total: dict[int, float] = {}
    parts = [(i, _turns(turns), n) for turns, name in counted for i, n in run.series(name)]
    for iteration, _, count in parts:
        total[iteration] = total.get(iteration, 0.0) + count
    shares = [(i, name, count / total[i]) for i, name, count in parts if total[i]]
    names = [_turns(turns) for turns, _ in counted]
    return stack_chart(title, shares, names, y="share of trajectories", domain=(0, 1))


def _turns(number: str) -> str:
    return f"{number} turn{'' if number == '1' else 's'}"


def _label(kind: str) -> str:
    return kind.partition("=")[0]


def _value(kind: str) -> str:
    return kind.partition("=")[2]
