"""A run's results: its learning curve, and a table of before and after."""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from seeupo_jax.configuration.flags import command_name
from seeupo_jax.display.terminal import SafeStream, can_redraw
from seeupo_jax.display.view import sparkline
from seeupo_jax.durable_files import write_atomically
from seeupo_jax.errors import printable
from seeupo_jax.metrics.flat_outcomes import LAST_WORDS, learned_nothing
from seeupo_jax.metrics.metrics_log import METRICS_FILE, read_metrics
from seeupo_jax.metrics.run_manifest import read_resumptions, read_run_manifest
from seeupo_jax.metrics.statistics import Estimate, aligned, read_estimates, split_and_metric
from seeupo_jax.metrics.trackers import TENSORBOARD_FOLDER

if TYPE_CHECKING:
    from rich.table import Table

_SUCCESS = "rollout/success_rate"
CURVE_FILE = "learning_curve.png"
CHECKPOINT_FOLDER = "checkpoints"
_COLUMNS = ("split", "metric", "before", "after", "change")
# Of the rollouts, then of the evaluations.
_COLORS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#9d755d")
_SHAPES = ("stroke", "circle", "square", "triangle-up", "diamond")


def learning_curve(workdir: str | Path, *, split: str = "test") -> Path:
    """Draws success against iteration: of the rollouts, and of the evaluations with 95% intervals.

    Args:
      workdir: a run's folder with metrics.jsonl.
      split: what the metrics named `eval/` were measured on.

    Returns:
      The path of DIR/learning_curve.png.
    """
    import altair as alt

    lines = read_metrics(workdir)
    rollouts, evaluations = _rollouts(lines), _evaluations(lines, split)
    names = list(dict.fromkeys(row["series"] for row in (*rollouts, *evaluations)))
    legend = alt.Legend(orient="top", title=None, labelLimit=320, columns=3, symbolOpacity=1)
    last = max((line["iteration"] for line in lines), default=0)
    x = alt.X("iteration:Q", title="iteration", axis=alt.Axis(grid=False, format="d"))
    x = x.scale(domain=[-0.03 * max(last, 1), 1.04 * max(last, 1)], nice=False)
    y = {"title": "success rate", "scale": alt.Scale(domain=[0, 1.02])}

    def styled(channel: Any, values: Sequence[str]) -> Any:
        used = [values[i % len(values)] for i in range(len(names))]
        return channel("series:N", legend=legend, scale=alt.Scale(domain=names, range=used))

    color = styled(alt.Color, _COLORS if rollouts else _COLORS[1:])
    shape = styled(alt.Shape, _SHAPES if rollouts else _SHAPES[1:])
    trained = alt.Chart(alt.InlineData(rollouts)).encode(x, color)
    evaluated = alt.Chart(alt.InlineData(evaluations)).encode(x, color)
    every = [
        trained.mark_line(strokeWidth=1, opacity=0.4, point={"size": 9}).encode(
            alt.Y("value:Q", **y)
        ),
        trained.mark_line(strokeWidth=2.2).encode(alt.Y("mean:Q", **y)),
        evaluated.mark_errorbar(ticks=True).encode(alt.Y("low:Q", **y), alt.Y2("high:Q")),
        evaluated.mark_line(strokeWidth=1.4).encode(alt.Y("value:Q", **y)),
        evaluated.mark_point(filled=True, size=50, opacity=1).encode(alt.Y("value:Q", **y), shape),
    ]
    if not names:
        every = [alt.Chart().mark_text(text="nothing measured yet")]
    path = Path(workdir) / CURVE_FILE
    chart = alt.layer(*every).properties(width=640, height=320, background="white", padding=10)
    chart = chart.configure_view(stroke=None).configure_axis(titleFontWeight="normal")
    drawing = io.BytesIO()
    chart.save(drawing, format="png", scale_factor=2)
    write_atomically(path, drawing.getvalue())
    return path


def _rollouts(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the rollouts, with the mean over iterations around each; None where no environment
    worked, which interrupts both lines."""
    points = [(line["iteration"], line[_SUCCESS]) for line in lines if _SUCCESS in line]
    iterations = np.array([i for i, _ in points])
    success = np.array([value for _, value in points], np.float64)  # NaN for None
    if np.isnan(success).all():
        return []
    window = max(3, len(points) // 20 * 2 + 1)
    rows = []
    for i, value in points:
        row = {"series": f"rollouts (thick: mean of {window})", "iteration": i, "value": value}
        near = success[np.abs(iterations - i) <= window // 2]
        rows.append(row | {"mean": None if value is None else float(np.nanmean(near))})
    return rows


def _evaluations(lines: Sequence[Mapping[str, Any]], split: str) -> list[dict[str, Any]]:
    """Rows of the evaluations; None where no environment worked."""
    evaluations = []
    names = dict.fromkeys(n for line in lines for n in read_estimates(line) if "/avg@" in n)
    # Splits are mostly measured at the same iterations: a small shift keeps their bars apart.
    shift = 0.01 * max((line["iteration"] for line in lines), default=0)
    for i, name in enumerate(names):
        series = f"{' '.join(split_and_metric(name, split))}, 95% interval"
        for line in lines:
            estimate = read_estimates(line).get(name)
            if estimate is not None:
                interval = {"low": estimate.low, "high": estimate.high, "value": estimate.value}
                row = {k: None if math.isnan(v) else v for k, v in interval.items()}
                row |= {"series": series, "iteration": line["iteration"] + i * shift}
                evaluations.append(row)
    measured = {row["series"] for row in evaluations if row["value"] is not None}
    return [row for row in evaluations if row["series"] in measured]


def summary_table(
    before: Mapping[str, Any], after: Mapping[str, Any], *, split: str = "test"
) -> Table:
    """A `rich` table of evaluation metrics before and after training, with 95% intervals.

    A change is coloured if the two intervals do not overlap. Evaluations with different numbers of
    tasks have no change.

    Args:
      before, after: metrics as on evaluation lines: `eval/avg@4`, `eval/avg@4_low`, `eval/tasks`...
      split: what the metrics named `eval/` were measured on.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(*_COLUMNS, title="Evaluation, 95% intervals", title_justify="left")
    for row, style in _summary_rows(before, after, split):
        table.add_row(*(Text(cell) for cell in row[:-1]), Text(row[-1], style=style))
    return table


def summary_text(
    before: Mapping[str, Any], after: Mapping[str, Any], *, split: str = "test"
) -> str:
    """The table of `summary_table` as aligned plain text."""
    return aligned([_COLUMNS, *(row for row, _ in _summary_rows(before, after, split))])


def print_summary(
    workdir: str | Path,
    *,
    stream: TextIO | None = None,
    split: str = "test",
    display: str = "auto",
    settings: Sequence[str] | None = None,
) -> None:
    """Prints the evaluations before and after training, and what to do with the results.

    Args:
      workdir: a run's folder; only files that exist are listed.
      stream: where to print; None takes the standard output.
      split: what the metrics named `eval/` were measured on.
      display: as `config.telemetry.display`.
      settings: the flags of the configuration, with which other commands find this run; None:
        not known.
    """
    safe, lines = SafeStream(stream), read_metrics(workdir)
    before, after = _before_and_after(lines)
    if not (before or after):
        safe.write("No evaluation has been recorded.\n")
    elif display != "plain" and can_redraw(safe):
        from rich.console import Console

        Console(file=safe, force_terminal=True).print(summary_table(before, after, split=split))
    else:
        safe.write(summary_text(before, after, split=split) + "\n")
    safe.write(_curve_text(lines, split, unicode=safe.unicode))
    safe.write(_changes_text(Path(workdir)))
    end = (read_run_manifest(workdir) or {}).get("ended") or {}
    safe.write(_end_text(end, lines))
    safe.write("\n" + _where_to_look(Path(workdir)))
    if settings is not None:
        safe.write("\n" + printable(next_commands(Path(workdir), settings, end)))
    safe.flush()


def _summary_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], split: str
) -> list[tuple[tuple[str, ...], str]]:
    """The cells of each row, and the style of its change."""
    old, new = read_estimates(before), read_estimates(after)
    rows = []
    for key in dict.fromkeys((*old, *new)):
        split_name, metric = split_and_metric(key, split)
        cells = [str(side[key]) if key in side else "-" for side in (old, new)]
        change, style = "-", ""
        tasks = f"{key.rpartition('/')[0]}/tasks"
        if key in old and key in new and before.get(tasks) == after.get(tasks):
            change, style = _change(old[key], new[key])
        rows.append(((split_name, metric, *cells, change), style))
    return rows


def _change(old: Estimate, new: Estimate) -> tuple[str, str]:
    if math.isnan(new.value - old.value):
        return "-", ""
    style = "green" if new.low > old.high else "red" if new.high < old.low else ""
    return f"{new.value - old.value:+.2f}", style


def _before_and_after(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each split's figures before training, at iteration 0, and of its last evaluation after."""
    by_split: tuple[dict[str, dict[str, Any]], ...] = ({}, {})  # before, after
    for line in lines:
        measured: dict[str, dict[str, Any]] = {}
        for name in read_estimates(line):
            split = name.rpartition("/")[0]
            keys = (name, f"{name}_low", f"{name}_high", f"{split}/tasks")
            measured.setdefault(split, {}).update({key: line.get(key) for key in keys})
        by_split[line["iteration"] > 0].update(measured)
    before, after = (
        {key: value for values in side.values() for key, value in values.items()}
        for side in by_split
    )
    return before, after


def _curve_text(lines: Sequence[Mapping[str, Any]], split: str, *, unicode: bool) -> str:
    """The learning curve in words: every avg@k that was measured more than once."""
    text = ""
    for name in dict.fromkeys(name for line in lines for name in read_estimates(line)):
        split_name, metric = split_and_metric(name, split)
        iterations, values = _series(lines, name)
        if metric.startswith("avg@") and len(values) > 1:
            marks = sparkline(values, unicode=unicode)
            points = "  ".join(f"{i}: {v:.2f}" for i, v in zip(iterations, values, strict=True))
            text += f"\n{split_name} {metric} by iteration  {marks}  {points}\n"
    return text


def _changes_text(workdir: Path) -> str:
    """The settings that changed when the run resumed; empty if none did."""
    resumptions = read_resumptions(read_run_manifest(workdir) or {})
    lines = [f"  {each.place}: {line}\n" for each in resumptions for line in each.lines()]
    return printable("".join(["\nSettings changed on resuming\n", *lines])) if lines else ""


def next_commands(workdir: Path, settings: Sequence[str], end: Mapping[str, Any]) -> str:
    """Commands on a run that is over, as a shell takes them.

    Args:
      end: `ended` of the run's manifest. With patience the best checkpoint is the one to look at.
    """
    run, step = [f"--workdir={workdir}"], []
    if end.get("reason") == "patience" and end.get("best") is not None:
        step = ["--step=best"]
    commands = {
        f"writes {workdir / 'report.html'} and a page of every trajectory": ("report", run),
        "success by kind of task; with --server=URL that of another model beside it": (
            "evaluate",
            [*settings, *run, *step],
        ),
        "the policy for clients of OpenAI's and Anthropic's APIs": (
            "serve",
            [*settings, *run, *step],
        ),
    }
    lines = ["What to run next\n"]
    for comment, (name, flags) in commands.items():
        lines.append(f"  # {comment}\n  {command_name(name)} {shlex.join(flags)}\n")
    return "".join(lines)


def _end_text(end: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """Why a run ended before its last iteration, and what says that it learned nothing."""
    text = ""
    if end.get("reason") == "patience":
        best = "" if end["best"] is None else f"; the best checkpoint is {end['best']}"
        text += f"\nEnded by evaluation.patience after iteration {end['iteration']}{best}\n"
    if sentences := learned_nothing(lines):
        text += "\nNothing in the figures says that this run learned\n"
        text += "".join(f"  {sentence}\n" for sentence in sentences)
        text += f"  What they mean, and what to try: {LAST_WORDS}\n"
    return text


def _where_to_look(workdir: Path) -> str:
    places = {
        "learning curve": (CURVE_FILE, "{}"),
        "metrics": (METRICS_FILE, "{}"),
        "live charts": (TENSORBOARD_FOLDER, "tensorboard --logdir={}"),
        "checkpoints": (CHECKPOINT_FOLDER, "{}"),
    }
    lines = [
        f"  {label:<16}{form.format(workdir / name)}\n"
        for label, (name, form) in places.items()
        if (workdir / name).exists()
    ]
    return "".join(["Where to look next\n", *lines])


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of a metric, where it is a number."""
    points = [(line["iteration"], line[name]) for line in lines if line.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]
