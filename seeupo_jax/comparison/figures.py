"""Results of a comparison: success against sampled tokens, a line per recipe, and a table."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seeupo_jax.comparison.runs import PlannedRun, finished, recorded
from seeupo_jax.comparison.seed_statistics import mean_height, seed_interval
from seeupo_jax.display.terminal import format_count
from seeupo_jax.errors import name_file
from seeupo_jax.metrics.statistics import Estimate, read_estimates
from seeupo_jax.reports.blocks import Point
from seeupo_jax.reports.charts import Chart, line_chart

if TYPE_CHECKING:
    from rich.table import Table

PLOT_SUFFIXES = (".svg", ".png", ".pdf")
SHARES = (0.25, 0.5, 1.0)  # of the budget
IN_A_ROW = 5  # rollouts that distinguish a collapse from chance
_WIDTH, _HEIGHT = 720, 360  # of the plot, in pixels


@dataclass(frozen=True)
class RunCurve:
    """One run. I iterations that have a success rate."""

    seed: int
    done: bool
    tokens_I: np.ndarray  # actions' tokens sampled, and trained on, before each of its rollouts
    steps_I: np.ndarray  # optimizer steps made before each
    success_I: np.ndarray  # of the rollouts of each
    before: Estimate  # avg@k on the evaluation split over tasks; NaN where it was not measured
    after: float
    tokens: int  # in all
    steps: int

    def spent(self, axis: str) -> np.ndarray:
        """Before each of its rollouts: `tokens` or `steps`."""
        return {"tokens": self.tokens_I, "steps": self.steps_I}[axis]

    def at(self, spent: np.ndarray | float, axis: str = "tokens") -> np.ndarray:
        """Success after a number of tokens or steps, interpolated linearly; NaN beyond the run."""
        return np.asarray(np.interp(spent, self.spent(axis), self.success_I, right=math.nan))

    def area(self, axis: str, until: float) -> float:
        """Mean success of the rollouts up to a number of tokens or steps; NaN beyond the run."""
        return mean_height(self.spent(axis), self.success_I, until)

    @property
    def collapsed(self) -> bool:
        """Whether it ended below the interval of its first policy, or its last `IN_A_ROW` rollouts
        succeeded less than half as often as its best in a row: one batch may be a lucky one."""
        in_a_row = min(IN_A_ROW, len(self.success_I))
        mean = np.lib.stride_tricks.sliding_window_view(self.success_I, in_a_row).mean(-1)
        return bool(self.after < self.before.low or mean[-1] < mean.max() / 2)


@dataclass(frozen=True)
class Line:
    """A variant of a recipe: its finished runs, or those under way as long as none is finished."""

    variant: str
    planned: int
    histories: tuple[RunCurve, ...]

    @property
    def done(self) -> bool:
        return any(history.done for history in self.histories)

    def reach(self, axis: str = "tokens") -> float:
        """The tokens or steps that all of its runs have got to."""
        return min((float(h.spent(axis)[-1]) for h in self.histories), default=0.0)

    def curve(self, axis: str = "tokens") -> list[Point]:
        """At tokens or steps: the mean success of the runs there with its interval.

        A rollout without a success rate, because no environment worked, is skipped: no step is made
        on it, so the next rollout has the same policy.
        """
        if not self.histories:
            return []
        grid = np.linspace(0, self.reach(axis), max(len(h.success_I) for h in self.histories))
        values = np.stack([h.at(grid, axis) for h in self.histories])
        means = [seed_interval(column) for column in values.T]
        return [
            Point(at, e.value, _plain(e.low), _plain(e.high))
            for at, e in zip(grid.tolist(), means, strict=True)
        ]


def read_lines(runs: Sequence[PlannedRun]) -> list[Line]:
    """The recorded curves of each recipe's runs so far; variants in the order of the runs."""
    lines = []
    for variant in dict.fromkeys(run.variant for run in runs):
        of_variant = [run for run in runs if run.variant == variant]
        read = [history for run in of_variant if (history := read_history(run)) is not None]
        ended = [history for history in read if history.done]
        lines.append(Line(variant, len(of_variant), tuple(ended if ended else read)))
    return lines


def read_history(run: PlannedRun) -> RunCurve | None:
    """A run's record; None before its first iteration."""
    records = recorded(run)
    last = run.config.iterations
    return history_of(
        records, seed=run.seed, done=finished(run, records), metric=run.metric, last=last
    )


def history_of(
    records: Sequence[Mapping[str, Any]], *, seed: int, done: bool, metric: str, last: int
) -> RunCurve | None:
    """The record of a run's metrics, by iteration; None before its first iteration.

    Args:
      metric: of the evaluations. last: the iteration that it ends with.
    """
    tokens, steps, success, sampled, made = [], [], [], 0, 0
    for record in records:
        if "rollout/action_tokens" not in record:
            continue
        if record["rollout/success_rate"] is not None:
            tokens.append(sampled)
            steps.append(made)
            success.append(record["rollout/success_rate"])
        sampled += record["rollout/action_tokens"]
        made += int(record.get("sweep/steps", 0))  # none where every environment failed
    if not tokens:
        return None
    scores = {r["iteration"]: read_estimates(r)[metric] for r in records if metric in r}
    unknown = Estimate(math.nan, math.nan, math.nan)
    return RunCurve(
        seed=seed,
        done=done,
        tokens_I=np.array(tokens, np.float64),
        steps_I=np.array(steps, np.float64),
        success_I=np.array(success, np.float64),
        before=scores.get(0, unknown),
        after=scores.get(last, unknown).value,
        tokens=sampled,
        steps=made,
    )


def token_budget(lines: Sequence[Line]) -> float:
    """The most tokens that all lines have got to; lines without a finished run do not count, as
    long as another has one. 0 where nothing was recorded."""
    drawn = [line for line in lines if line.histories]
    ended = [line for line in drawn if line.done]
    return min((line.reach() for line in (ended if ended else drawn)), default=0.0)


def table(lines: Sequence[Line], *, k: Collection[int]) -> Table:
    """A `rich` table, a row per recipe: means over seeds with 95% intervals.

    Args:
      k: episodes a task of the evaluations, each number that runs have.
    """
    import rich.box
    from rich.table import Column, Table
    from rich.text import Text

    budget = token_budget(lines)
    at = [f"at {format_count(share * budget)} tokens" for share in SHARES]
    recipe = Column("recipe", overflow="fold")
    score = f"avg@{'k' if len(k) > 1 else min(k)}"
    columns = (recipe, "finished", "steps", f"{score} before", "after", *at)
    result = Table(
        *columns,
        title="Means over seeds, 95% intervals; the last three: success of the rollouts",
        title_justify="left",
        box=rich.box.SIMPLE,
    )
    for line in lines:
        histories = line.histories
        steps = f"{np.mean([h.steps for h in histories]):.0f}" if histories else "-"
        series = [[h.before.value for h in histories], [h.after for h in histories]]
        series += [[float(h.at(share * budget)) for h in histories] for share in SHARES]
        cells = [_cell(seed_interval(values)) for values in series]
        ended = sum(h.done for h in histories)
        result.add_row(Text(line.variant), f"{ended} of {line.planned}", steps, *cells)
    return result


def figures(lines: Sequence[Line]) -> dict[str, Any]:
    """The comparison as plain values for JSON; None for values that were not measured."""
    budget = token_budget(lines)
    recipes = {}
    for line in lines:
        curve = line.curve()
        recipes[line.variant] = {
            "runs_planned": line.planned,
            "runs_finished": sum(h.done for h in line.histories),
            "seeds": [h.seed for h in line.histories],
            "steps": [h.steps for h in line.histories],
            "before": [_plain(h.before.value) for h in line.histories],
            "after": [_plain(h.after) for h in line.histories],
            "success_at_share_of_budget": {
                f"{share:g}": [_plain(float(h.at(share * budget))) for h in line.histories]
                for share in SHARES
            },
            "tokens": [point.at for point in curve],
            "success_mean": [point.value for point in curve],
            "success_low": [point.low for point in curve],
            "success_high": [point.high for point in curve],
        }
    return {"budget_tokens": budget, "recipes": recipes}


def success_chart(lines: Sequence[Line], axis: str = "tokens") -> Chart | None:
    """Success of the rollouts against sampled tokens, or optimizer steps (`steps`): means over
    seeds, not smoothed, with a 95% band where a recipe has several runs; None where nothing was
    recorded."""
    x = {"tokens": "sampled tokens", "steps": "optimizer steps"}[axis]
    y = "success of the rollouts (mean over seeds, band: 95%)"
    names = _names([line.variant for line in lines])
    series = {_label(name, line): line.curve(axis) for name, line in zip(names, lines, strict=True)}
    return line_chart("", series, x=x, y=y, domain=(0, 1.02), height=_HEIGHT)


def draw(chart: Chart | None, path: Path) -> None:
    """Writes a chart of runs.

    Args:
      path: its suffix, one of `PLOT_SUFFIXES`, is the format.
    """
    import altair as alt

    if chart is None:
        drawing = alt.Chart().mark_text(text="nothing measured yet")
    else:
        drawing = alt.LayerChart.from_dict({**chart.spec, "width": _WIDTH, "background": "white"})
    path.parent.mkdir(parents=True, exist_ok=True)
    with name_file(path):
        drawing.save(path, scale_factor=2 if path.suffix == ".png" else 1)


def _names(variants: Sequence[str]) -> list[str]:
    """Variants without the recipe and values that all have in common, and without the groups of
    fields whose last names tell them apart."""
    parts = [re.split(r" (?=[\w.]+=)", variant) for variant in variants]
    if len(variants) < 2 or len(set(map(len, parts))) > 1:
        return [*variants]
    differing = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    short = [[re.sub(r"^[\w.]+\.(?=\w+=)", "", part) for part in column] for column in differing]
    fields = [column[0].partition("=")[0] for column in short]
    columns = short if len(set(fields)) == len(fields) else differing
    return [" ".join(row) for row in zip(*columns, strict=True)]


def _label(name: str, line: Line) -> str:
    count = len(line.histories)
    runs = f"{count} run{'' if count == 1 else 's'}{'' if line.done else ', not finished'}"
    return f"{name} ({runs})"


def _cell(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.2f}" if math.isnan(estimate.low) else str(estimate)


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
