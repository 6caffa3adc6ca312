"""What a run came to: its learning curve, and a table of before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from seeupo_jax.display.terminal import SafeStream, can_redraw
from seeupo_jax.display.view import sparkline
from seeupo_jax.metrics.metrics_log import METRICS_FILE, read_metrics
from seeupo_jax.metrics.statistics import Estimate, read_estimates, split_and_metric
from seeupo_jax.metrics.trackers import TENSORBOARD_FOLDER

if TYPE_CHECKING:
    from rich.table import Table

CURVE_FILE = "learning_curve.png"
CHECKPOINT_FOLDER = "checkpoints"
_COLUMNS = ("split", "metric", "before", "after", "change")
_TRAIN, _INK, _FAINT = "#4c78a8", "#333333", "#dddddd"
_EVALUATIONS = (("#e45756", "o"), ("#54a24b", "s"), ("#b279a2", "^"), ("#9d755d", "D"))


def learning_curve(workdir: str | Path, *, split: str = "test") -> Path:
    """Draws success against iteration: of the rollouts, and of the evaluations with 95% intervals.

    Args:
      workdir: a run's folder with metrics.jsonl.
      split: what the metrics named `eval/` were measured on.

    Returns:
      The path of DIR/learning_curve.png.
    """
    # Figure and canvas by hand: pyplot would keep the figure and choose a backend for everyone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(workdir)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training(axes, lines)
    _draw_evaluations(axes, lines, split)
    _style(axes, last=max((line["iteration"] for line in lines), default=0))
    path = Path(workdir) / CURVE_FILE
    temporary = path.with_suffix(".png.tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    return path


def summary_table(
    before: Mapping[str, Any], after: Mapping[str, Any], *, split: str = "test"
) -> Table:
    """A `rich` table of evaluation metrics before and after training, with 95% intervals.

    A change is coloured where the two intervals do not overlap.

    Args:
      before, after: metrics as on evaluation lines: `eval/avg@4`, `eval/avg@4_low`, ...
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
    rows = [_COLUMNS, *(row for row, _ in _summary_rows(before, after, split))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def print_summary(
    workdir: str | Path, *, stream: TextIO | None = None, split: str = "test"
) -> None:
    """Prints the first evaluation against the last, and where to look next.

    Args:
      workdir: a run's folder; only what is there is named.
      stream: where to print; None takes the standard output.
      split: what the metrics named `eval/` were measured on.
    """
    safe = SafeStream(stream)
    before, after = _first_and_last(read_metrics(workdir))
    if not before:
        safe.write("No evaluation has been recorded.\n")
    elif can_redraw(safe):
        from rich.console import Console

        Console(file=safe, force_terminal=True).print(summary_table(before, after, split=split))
    else:
        safe.write(summary_text(before, after, split=split) + "\n")
    safe.write(_curve_text(read_metrics(workdir), split, unicode=safe.unicode))
    safe.write("\n" + _where_to_look(Path(workdir)))
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
        if key in old and key in new:
            change, style = _change(old[key], new[key])
        rows.append(((split_name, metric, *cells, change), style))
    return rows


def _change(old: Estimate, new: Estimate) -> tuple[str, str]:
    style = "green" if new.low > old.high else "red" if new.high < old.low else ""
    return f"{new.value - old.value:+.2f}", style


def _first_and_last(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each evaluation metric's first value, and its last where it was measured again."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for line in lines:
        for name in read_estimates(line):
            values = {key: line.get(key) for key in (name, f"{name}_low", f"{name}_high")}
            (after if name in before else before).update(values)
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


def _where_to_look(workdir: Path) -> str:
    places = {
        "learning curve": (CURVE_FILE, "{}"),
        "metrics": (METRICS_FILE, "{}"),
        "live charts": (TENSORBOARD_FOLDER, "tensorboard --logdir={}"),
        "checkpoints": (CHECKPOINT_FOLDER, "{}"),
    }
    found = [
        f"  {label:<16}{form.format(workdir / name)}\n"
        for label, (name, form) in places.items()
        if (workdir / name).exists()
    ]
    return "".join(["Where to look next\n", *found])


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of a metric, where it is a number."""
    points = [(line["iteration"], line[name]) for line in lines if line.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving mean; near the ends, of as many values as there are."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _draw_training(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    iterations, success = _series(lines, "rollout/success_rate")
    if not success:
        return
    window = max(3, len(success) // 20 * 2 + 1)
    axes.plot(iterations, success, color=_TRAIN, alpha=0.4, linewidth=1, marker=".", markersize=3)
    axes.plot(
        iterations,
        _smooth(success, window),
        color=_TRAIN,
        linewidth=2.2,
        label=f"rollouts (thick: mean of {window})",
    )


def _draw_evaluations(axes: Any, lines: Sequence[Mapping[str, Any]], split: str) -> None:
    points: dict[str, list[tuple[int, Estimate]]] = {}
    for line in lines:
        for name, estimate in read_estimates(line).items():
            if "/avg@" in name and not math.isnan(estimate.value):
                points.setdefault(name, []).append((line["iteration"], estimate))
    # Splits are mostly measured at the same iterations: a small shift keeps their bars apart.
    shift = 0.01 * max((line["iteration"] for line in lines), default=0)
    for i, (name, series) in enumerate(points.items()):
        color, marker = _EVALUATIONS[i % len(_EVALUATIONS)]
        split_name, metric = split_and_metric(name, split)
        values = [estimate.value for _, estimate in series]
        below = [max(0.0, estimate.value - estimate.low) for _, estimate in series]
        above = [max(0.0, estimate.high - estimate.value) for _, estimate in series]
        axes.errorbar(
            [iteration + i * shift for iteration, _ in series],
            values,
            yerr=[below, above],
            color=color,
            marker=marker,
            markersize=5,
            linestyle="-" if i == 0 else ":",
            linewidth=1.4,
            elinewidth=1.2,
            capsize=3,
            label=f"{split_name} {metric}, 95% interval",
            zorder=3 + i,
        )


def _style(axes: Any, last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("iteration", color=_INK)
    axes.set_ylabel("success rate", color=_INK)
    axes.set_ylim(0, 1.02)
    span = max(last, 1)
    axes.set_xlim(-0.03 * span, 1.04 * span)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center")
