"""The sections of the report: charts and tables of one run, or of several together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from seeupo_jax.display.terminal import format_duration
from seeupo_jax.metric_table import CHARTS, METRICS
from seeupo_jax.metrics.phases import PHASES, split_time
from seeupo_jax.reports.blocks import Point, axis_range, color_range, known
from seeupo_jax.reports.charts import Chart, heat_map, line_chart, share_chart, stack_chart
from seeupo_jax.reports.run_data import RunData, is_number

Measures = Mapping[str, Callable[[RunData], Sequence[Point]]]  # by what they are called

_STOPS = ("done", "max_turns", "max_tokens", "unchosen", "env_error", "timeout")


@dataclass(frozen=True)
class TableRow:
    """Cells of a table; `marked` where its runs differ."""

    cells: Sequence[str]
    marked: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row; each other column belongs to one run."""

    caption: str
    header: Sequence[str]
    rows: Sequence[TableRow]


@dataclass(frozen=True)
class Section:
    """A headline, a sentence, charts by what they show, and tables."""

    key: str
    title: str
    intro: str
    wanted: Mapping[str, Sequence[Chart | None]] = field(default_factory=dict)
    tables: Sequence[Table] = ()

    @property
    def charts(self) -> list[Chart]:
        return [chart for charts in self.wanted.values() for chart in charts if chart is not None]

    @property
    def absent(self) -> list[str]:
        """Titles of charts without data."""
        return [name for name, charts in self.wanted.items() if not any(charts)]


def metric(name: str) -> Callable[[RunData], list[Point]]:
    """The points of a metric without an interval."""
    return lambda run: [Point(iteration, value) for iteration, value in run.recorded(name)]


def overlay(
    title: str,
    runs: Sequence[RunData],
    measures: Measures,
    *,
    y: str,
    domain: tuple[float, float] | None = None,
) -> list[Chart | None]:
    """One chart of all measures of a run, which marks changes; of several runs one for each.

    All have the same axes.
    """
    span = iterations_of(runs)
    if len(runs) == 1:
        series = {name: points(runs[0]) for name, points in measures.items()}
        marks = _changes(runs[0])
        return [line_chart(title, series, y=y, domain=domain, span=span, marks=marks)]
    by_measure = {
        name: {run.name: points(run) for run in runs} for name, points in measures.items()
    }
    lines = [line for by_run in by_measure.values() for line in by_run.values()]
    if domain is None and any(map(known, lines)):
        domain = axis_range(lines)
    return [
        line_chart(
            title if len(measures) == 1 else f"{title}: {name}",
            series,
            y=y,
            domain=domain,
            span=span,
        )
        for name, series in by_measure.items()
    ]


def iterations_of(runs: Sequence[RunData]) -> tuple[float, float] | None:
    """The axis that all charts of these runs have in common, with half an iteration at each end."""
    iterations = [line["iteration"] for run in runs for line in run.lines]
    return (min(iterations) - 0.5, max(iterations) + 0.5) if iterations else None


def _changes(run: RunData) -> dict[float, str]:
    """The settings that changed when the run resumed, between the two iterations."""
    marks: dict[float, str] = {}
    for each in run.resumptions:
        if each.after is not None and (lines := each.lines()):
            text = f"{each.place}: {'; '.join(lines)}"
            earlier = marks.get(each.after + 0.5)
            marks[each.after + 0.5] = text if earlier is None else f"{earlier}; {text}"
    return marks


def charted(runs: Sequence[RunData], section: str) -> dict[str, Sequence[Chart | None]]:
    """The charts of a section of `CHARTS` that any of the runs has data for, by title."""
    charts: dict[str, Sequence[Chart | None]] = {}
    for name, title in CHARTS[section].items():
        unit = METRICS[name].unit
        domain = (0.0, 1.0) if unit.startswith("share") else None
        if measures := _measures(runs, name, title):
            charts[title] = overlay(title, runs, measures, y=unit, domain=domain)
    return charts


def _measures(runs: Sequence[RunData], name: str, title: str) -> Measures:
    """A metric, or one for each NAME that any of the runs has; empty where none has it."""
    prefix = name.removesuffix("NAME")
    if prefix == name:
        return {title: metric(name)} if any(run.series(name) for run in runs) else {}
    names = dict.fromkeys(measure for run in runs for measure, _ in run.keyed(prefix))
    return {measure: metric(prefix + measure) for measure in names}


def parts_section(runs: Sequence[RunData]) -> Section | None:
    """Charts of optional metrics; None if these runs have none of them."""
    wanted = charted(runs, "parts")
    intro = "Of exact values, a mixture of environments, a curriculum, branches, value functions,"
    intro += " experts and other parts that a run may have; what each number is: docs/metrics.md."
    return Section("parts", "Parts of these runs", intro, wanted) if wanted else None


def of_run(title: str, run: RunData, runs: Sequence[RunData]) -> str:
    """A chart's title; it names its run where there are several."""
    return title if len(runs) == 1 else f"{title}: {run.name}"


def turns_section(runs: Sequence[RunData]) -> Section:
    """Charts of the sweep by turn."""
    return Section(
        "turns",
        "The sweep, turn by turn",
        "The weight M with which each turn was trained, the share of its actions that were"
        " clipped, and its distance from the reference; lighter is more.",
        {title: _turn_maps(title, name, runs) for name, title in CHARTS["turns"].items()},
    )


def _turn_maps(title: str, name: str, runs: Sequence[RunData]) -> list[Chart | None]:
    """A heat map for each run, with the same colours."""
    cells = [list(_cells(run, name.removesuffix("T"))) for run in runs]
    values = [value for each in cells for *_, value in each]
    domain = color_range(values) if values and len(runs) > 1 else None
    unit, span = METRICS[name].unit, iterations_of(runs)
    return [
        heat_map(of_run(title, run, runs), cells[i], value=unit, domain=domain, span=span)
        for i, run in enumerate(runs)
    ]


def _cells(run: RunData, prefix: str) -> Iterable[tuple[int, int, float]]:
    for turn, name in run.keyed(prefix):
        if turn.isdecimal():
            yield from ((iteration, int(turn), value) for iteration, value in run.series(name))


def lengths_section(runs: Sequence[RunData]) -> Section:
    tokens, turns = "Tokens per trajectory", "Turns and segments per trajectory"
    counts = {name: metric(f"rollout/{name}_mean") for name in ("turns", "segments")}
    measures = {
        f"{label}, {kind}": metric(f"rollout/{name}_tokens_{kind}")
        for label, name in (("sampled", "action"), ("context", "context"))
        for kind in ("mean", "p90")
    }
    return Section(
        "lengths",
        "Lengths",
        "Tokens that the policy sampled, and tokens that environments and prompts wrote. A"
        " trajectory is one segment unless its context was rewritten between turns.",
        {
            tokens: overlay(tokens, runs, measures, y="tokens per trajectory"),
            turns: overlay(turns, runs, counts, y="mean of trajectories"),
        },
    )


def stops_section(runs: Sequence[RunData]) -> Section:
    title, y = "Why trajectories stopped", "share of trajectories"
    charts = [
        stack_chart(
            of_run(title, run, runs),
            _stops(run),
            _STOPS,
            y=y,
            domain=(0, 1),
            span=iterations_of(runs),
        )
        for run in runs
    ]
    intro = "done: the environment ended it. max_turns and max_tokens: a bound of the rollout was"
    intro += " reached. unchosen: a candidate that was not executed. env_error and timeout: the"
    intro += " environment failed."
    return Section("stops", "Stop reasons", intro, {title: charts})


def _stops(run: RunData) -> Iterable[tuple[int, str, float]]:
    for line in run.lines:
        counts = {stop: line.get(f"rollout/stop_{stop}") for stop in _STOPS}
        counts = {stop: count for stop, count in counts.items() if is_number(count)}
        total = sum(counts.values())
        if total:
            yield from ((line["iteration"], stop, n / total) for stop, n in counts.items())


def optimization_section(runs: Sequence[RunData]) -> Section:
    return Section(
        "optimization",
        "Optimization",
        "Means over the steps of a sweep; what each number is: docs/metrics.md.",
        {
            title: overlay(title, runs, {title: metric(name)}, y=METRICS[name].unit)
            for name, title in CHARTS["optimization"].items()
        },
    )


def supervised_section(runs: Sequence[RunData]) -> Section:
    """Losses of supervised fine-tuning by step."""
    loss = "Loss of assistant tokens"
    held_out: Measures = {"steps": metric("sft/loss"), "held-out loss": metric("eval/loss")}
    return Section(
        "supervised",
        "Supervised fine-tuning",
        "An iteration is an optimizer step; the loss of a step is that of its own conversations.",
        {
            loss: overlay(loss, runs, held_out, y=METRICS["sft/loss"].unit),
            **{
                title: overlay(title, runs, {title: metric(name)}, y=METRICS[name].unit)
                for name, title in CHARTS["supervised"].items()
            },
        },
    )


def time_section(runs: Sequence[RunData]) -> Section:
    """Throughput, and the parts of each iteration's time."""
    rates = {part: metric(f"{part}/tokens_per_second") for part in ("rollout", "sweep", "sft")}
    speed, title, parts = "Tokens per second", "Time per iteration", "Time of the run by phase"
    spent = {run.name: _spent(run) for run in runs}
    shares = [(name, phase, s) for name, by_phase in spent.items() for phase, s in by_phase.items()]
    longest = max((sum(split_time(line).values()) for run in runs for line in run.lines), default=0)
    same = {"y": "seconds", "span": iterations_of(runs)}
    if longest and len(runs) > 1:
        same["domain"] = (0.0, longest)
    charts = [stack_chart(of_run(title, run, runs), _parts(run), PHASES, **same) for run in runs]
    return Section(
        "time",
        "Time",
        "Sampled tokens over the rollout's time, and tokens of the updated rows over the sweep's."
        " The parts of the time do not overlap: compilation is subtracted from the phase that it"
        " happened in.",
        {
            speed: overlay(speed, runs, rates, y="tokens per second"),
            title: charts,
            parts: [share_chart(parts, shares, PHASES)],
        },
        [_time_table(spent)] if shares else [],
    )


def _parts(run: RunData) -> Iterable[tuple[int, str, float]]:
    for line in run.lines:
        yield from ((line["iteration"], phase, s) for phase, s in split_time(line).items())


def _spent(run: RunData) -> dict[str, float]:
    """Seconds of the whole run by phase."""
    total: Counter[str] = Counter()
    for _, phase, seconds in _parts(run):
        total[phase] += seconds
    return {phase: total[phase] for phase in PHASES if phase in total}


def _time_table(spent: Mapping[str, Mapping[str, float]]) -> Table:
    totals = {name: sum(by_phase.values()) for name, by_phase in spent.items()}
    rows = []
    for phase in PHASES:
        cells = [
            f"{format_duration(by_phase[phase])} ({by_phase[phase] / totals[name]:.0%})"
            if phase in by_phase
            else "-"
            for name, by_phase in spent.items()
        ]
        if set(cells) != {"-"}:
            rows.append(TableRow([phase, *cells]))
    rows.append(TableRow(["all", *map(format_duration, totals.values())]))
    return Table("Time by phase", ["phase", *spent], rows)
