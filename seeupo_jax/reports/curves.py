"""Learning curves, and success by kind of task and number of turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from seeupo_jax.metrics.statistics import read_estimates, split_and_metric, wilson_interval
from seeupo_jax.reports.blocks import Point, known
from seeupo_jax.reports.charts import Chart, range_chart, stack_chart
from seeupo_jax.reports.run_data import RunData, natural
from seeupo_jax.reports.sections import (
    Measures,
    Section,
    charted,
    iterations_of,
    metric,
    of_run,
    overlay,
)

_SUCCESS = "rollout/success_rate"
_ALL = (0.0, 1.0)  # of a share
_WINDOW = 5  # the first and the last fifth of the iterations are compared


def curves_section(runs: Sequence[RunData]) -> Section:
    """Success of rollouts and of evaluations by iteration, and the reward."""
    names = _evaluations(runs)
    average = {name: _evaluated(name) for name in names if " avg@" in name}
    passed = {name: _evaluated(name) for name in names if " pass@" in name}
    success: Measures = {"training rollouts": _rollouts, **average}
    rewards: Measures = {"reward": metric("rollout/reward_mean")}
    unit = {"y": "success rate", "domain": _ALL}
    several = "At least one of k episodes succeeds"
    return Section(
        "curves",
        "Learning curves",
        "Bands are 95% intervals: of evaluations over their tasks; of training rollouts Wilson's"
        " with the number of whole groups that were played as sample size, since a task's"
        " trajectories are correlated.",
        {
            "Success": overlay("Success", runs, success, **unit),
            several: overlay(several, runs, passed, **unit),
            "Reward": overlay("Reward of training rollouts", runs, rewards, y="mean reward"),
            **charted(runs, "rewards"),
        },
    )


def kinds_section(runs: Sequence[RunData]) -> Section:
    """Success by number of turns and by kind of task, at the beginning and at the end."""
    labels = sorted({_label(k) for run in runs for k, _ in run.keyed(f"{_SUCCESS}/")}, key=natural)
    by_turns, trajectories = "Success by number of turns", "Trajectories by number of turns"
    by_label: list[Chart | None] = []
    for name in (name for name in _evaluations(runs) if " avg@" in name):
        kinds = {_label(k) for run in runs for k in _evaluated_kinds(run, name)}
        for label in sorted(kinds, key=natural):
            series = _evaluated_by(runs, name, label)
            by_label.append(range_chart(f"{name} by {label}", series, kind=label))
    for label in labels:
        if label != "turns":
            by_label.append(range_chart(f"Rollouts by {label}", _by_kind(runs, label), kind=label))
    return Section(
        "kinds",
        "Success by turns and kinds",
        "Of rollouts: means over a fifth of the iterations, without intervals. Of evaluations:"
        " with 95% intervals over tasks."
        + (" Each run at its end." if len(runs) > 1 else " At the beginning and at the end."),
        {
            by_turns: [range_chart(by_turns, _by_kind(runs, "turns"), kind="turns")],
            trajectories: [
                _turns_chart(of_run(trajectories, run, runs), run, iterations_of(runs))
                for run in runs
            ],
            "Success by kind of task": by_label,
        },
    )


def first_and_last(run: RunData) -> tuple[str, list[Point]]:
    """The metric of success, its first and its last value; no points if it was not measured.

    For evaluations it is avg@k; the first value counts only if it covers as many tasks as the last.
    """
    measured = [
        key
        for line in reversed(run.lines)
        for key, estimate in read_estimates(line).items()
        if "/avg@" in key and not math.isnan(estimate.value)
    ]
    if not measured:
        points = known(_rollouts(run))
        return ("rollouts" if points else "success"), _ends(points)
    key = min(measured, key=lambda key: not key.startswith("eval/"))  # the first of equals
    ends = _ends(known(_estimates(run, key, "")))
    tasks = dict(run.recorded(f"{key.rpartition('/')[0]}/tasks"))
    same = tasks.get(ends[0].at) == tasks.get(ends[-1].at)
    return " ".join(split_and_metric(key, run.split)), ends if same else ends[-1:]


def _ends(points: Sequence[Point]) -> list[Point]:
    return [*points[:1], *points[1:][-1:]]


def _rollouts(run: RunData) -> list[Point]:
    """Success of the training rollouts; with an interval where the number of tasks is known."""
    tasks, size = run.setting("rollout.tasks"), run.setting("rollout.group_size")
    rounds, played = dict(run.series("rollout/rounds")), _played(run)
    points = []
    for iteration, value in run.recorded(_SUCCESS):
        bounds = ()
        if value is not None and isinstance(tasks, int) and tasks > 0 and 0 <= value <= 1:
            groups = float(tasks)
            if played[iteration] and size:  # without failed ones; several rounds have more tasks
                counted = max(1, played[iteration] / size)
                groups = counted if rounds.get(iteration, 1) > 1 else min(tasks, counted)
            bounds = wilson_interval(value, groups)
        points.append(Point(iteration, value, *bounds))
    return points


def _played(run: RunData) -> Counter[int]:
    """How many trajectories there were in each iteration, without those that failed."""
    total: Counter[int] = Counter()
    for _, name in run.keyed("rollout/trajectories/turns="):
        total.update({iteration: int(count) for iteration, count in run.series(name)})
    return total


def _evaluations(runs: Sequence[RunData]) -> list[str]:
    """The evaluation metrics of any run, such as `test avg@4`."""
    return list(dict.fromkeys(name for run in runs for name in run.evaluations))


def _evaluated(name: str) -> Callable[[RunData], list[Point]]:
    """The points of an evaluation with their intervals."""
    return lambda run: _estimates(run, run.evaluations.get(name, ""), "")


def _estimates(run: RunData, key: str, kind: str) -> list[Point]:
    """A metric of evaluations, of all tasks or of a `/LABEL=VALUE`."""
    low, high = (dict(run.series(f"{key}_{bound}{kind}")) for bound in ("low", "high"))
    return [Point(i, value, low.get(i), high.get(i)) for i, value in run.recorded(key + kind)]


def _evaluated_kinds(run: RunData, name: str) -> list[str]:
    """The `LABEL=VALUE` kinds for which evaluations have a success rate."""
    key = run.evaluations.get(name)
    return [] if key is None else [kind for kind, _ in run.keyed(f"{key}/")]


def _evaluated_by(runs: Sequence[RunData], name: str, label: str) -> dict[str, list[Point]]:
    """Success by a label's values: a run's first and last evaluation, or several runs' last."""
    series: dict[str, list[Point]] = {}
    for run in runs:
        for kind in (k for k in _evaluated_kinds(run, name) if _label(k) == label):
            points = known(_estimates(run, run.evaluations[name], f"/{kind}"))
            ends = dict.fromkeys((*(points[:1] if len(runs) == 1 else ()), *points[-1:]))
            for point in ends:
                where = run.name if len(runs) > 1 else f"iteration {point.at}"
                by_step = replace(point, at=kind.partition("=")[2])
                series.setdefault(where, []).append(by_step)
    return series


def _by_kind(runs: Sequence[RunData], label: str) -> dict[str, list[Point]]:
    """Success of rollouts by a label's values, in the windows of a run or at the end of several."""
    if len(runs) == 1:
        return {
            name: _in_window(runs[0], label, window) for name, window in _windows(runs[0]).items()
        }
    return {
        r.name: _in_window(r, label, window)
        for r in runs
        for window in [*_windows(r).values()][-1:]
    }


def _windows(run: RunData) -> dict[str, range]:
    """The first and the last fifth of the iterations; one window where there is one iteration."""
    iterations = [iteration for iteration, _ in run.series(_SUCCESS)]
    size = max(1, len(iterations) // _WINDOW)
    windows = {}
    for window in (iterations[:size], iterations[-size:]) if iterations else ():
        first, last = window[0], window[-1]
        name = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        windows[name] = range(first, last + 1)
    return windows


def _in_window(run: RunData, label: str, window: range) -> list[Point]:
    """Success by a label's values: iterations are weighted by their numbers of
    trajectories, equally where these are not recorded."""
    points = []
    for kind, name in run.keyed(f"{_SUCCESS}/{label}="):
        count = dict(run.series(f"rollout/trajectories/{label}={kind}"))
        rates = [(rate, count.get(i, 1.0)) for i, rate in run.series(name) if i in window]
        total = sum(n for _, n in rates)
        if total:
            points.append(Point(kind, sum(rate * n for rate, n in rates) / total))
    return points


def _turns_chart(title: str, run: RunData, span: tuple[float, float] | None) -> Chart | None:
    """The share of trajectories by number of turns."""
    counted = run.keyed("rollout/trajectories/turns=")
    parts = [(i, _turns(turns), n) for turns, name in counted for i, n in run.series(name)]
    total = _played(run)
    shares = [(i, name, count / total[i]) for i, name, count in parts if total[i]]
    names = [_turns(turns) for turns, _ in counted]
    axes = {"y": "share of trajectories", "domain": (0.0, 1.0), "span": span}
    return stack_chart(title, shares, names, **axes)


def _turns(number: str) -> str:
    return f"{number} turn{'' if number == '1' else 's'}"


def _label(kind: str) -> str:
    return kind.partition("=")[0]
