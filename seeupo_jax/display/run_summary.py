"""What a run came to: a table of before and after, and where to look next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from seeupo_jax.display.learning_curve import CURVE_FILE, metric_points
from seeupo_jax.display.terminal import SafeStream, can_redraw
from seeupo_jax.display.view import sparkline
from seeupo_jax.metrics.metrics_log import METRICS_FILE, read_metrics
from seeupo_jax.metrics.statistics import Estimate, aligned, read_estimates, split_and_metric
from seeupo_jax.metrics.trackers import TENSORBOARD_FOLDER

if TYPE_CHECKING:
    from rich.table import Table

CHECKPOINT_FOLDER = "checkpoints"
_COLUMNS = ("split", "metric", "before", "after", "change")


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
    return aligned([_COLUMNS, *(row for row, _ in _summary_rows(before, after, split))])


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
        iterations, values = metric_points(lines, name)
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
