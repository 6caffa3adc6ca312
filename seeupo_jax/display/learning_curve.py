"""A run's learning curve, drawn as SVG and written as PNG.

For the same picture Vega-Lite starts an engine for JavaScript: 0.6 CPU seconds of every run.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.metrics.statistics import read_estimates, split_and_metric

CURVE_FILE = "learning_curve.png"
# Of the rollouts, then of the evaluations.
_COLORS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#9d755d")
# Marks of 50 square pixels around a point, of the evaluations.
_SHAPES = (
    "m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "m-3.5,-3.5h7v7h-7z",
    "m0,-5l5.4,9.3h-10.8z",
    "m0,-5l5,5l-5,5l-5,-5z",
)
_WIDTH, _HEIGHT = 640, 320  # of the plot, in pixels
_LEFT, _RIGHT, _BOTTOM = 46, 14, 46  # around it
_LEGEND_ROW, _SYMBOL, _CHARACTER = 18, 16, 6  # pixels of the legend: of a line, a mark, a letter
_MOST_TICKS = 16


class _Point(NamedTuple):
    x: float
    value: float
    low: float = math.nan
    high: float = math.nan


class _Series(NamedTuple):
    name: str
    color: str
    shape: str | None  # None: the rollouts
    points: Sequence[_Point]


@dataclass(frozen=True)
class _Plot:
    """Where iterations and success rates lie in the picture."""

    top: int
    last: int

    def x(self, iteration: float) -> float:
        part = 0.03 + iteration / max(self.last, 1)
        return round(_LEFT + _WIDTH * part / 1.07, 2)

    def y(self, value: float) -> float:
        return round(self.top + _HEIGHT * (1 - value / 1.02), 2)


def learning_curve(workdir: str | Path, *, split: str = "test") -> Path:
    """Draws success against iteration: of the rollouts, and of the evaluations with 95% intervals.

    Args:
      workdir: a run's folder with metrics.jsonl.
      split: what the metrics named `eval/` were measured on.

    Returns:
      The path of DIR/learning_curve.png.
    """
    import vl_convert

    lines = read_metrics(workdir)
    last = max((line["iteration"] for line in lines), default=0)
    rollouts, window = _rollouts(lines)
    series = [*rollouts, *_evaluations(lines, split, last)]
    legend, top = _legend(series)
    plot = _Plot(top, last)
    drawn = [*legend, *_axes(plot)]
    for each in series:
        drawn += _rollout_marks(each, plot, window) if each.shape is None else _marks(each, plot)
    if not series:
        middle = (_LEFT + _WIDTH / 2, plot.y(0.5))
        drawn.append(_text(*middle, "nothing measured yet", anchor="middle"))
    width, height = _LEFT + _WIDTH + _RIGHT, top + _HEIGHT + _BOTTOM
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="10">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(drawn)}</svg>'
    )
    path = Path(workdir) / CURVE_FILE
    temporary = path.with_suffix(".png.tmp")
    temporary.write_bytes(vl_convert.svg_to_png(svg, scale=2))
    temporary.replace(path)
    return path


def metric_points(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of a metric, where it is a number."""
    points = [(line["iteration"], line[name]) for line in lines if line.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]


def _rollouts(lines: Sequence[Mapping[str, Any]]) -> tuple[list[_Series], int]:
    """The rollouts if there are any, and over how many of them the mean goes."""
    iterations, success = metric_points(lines, "rollout/success_rate")
    points = [
        _Point(x, value)
        for x, value in zip(iterations, success, strict=True)
        if not math.isnan(value)
    ]
    window = max(3, len(success) // 20 * 2 + 1)
    name = f"rollouts (thick: mean of {window})"
    return [_Series(name, _COLORS[0], None, points)] if points else [], window


def _evaluations(lines: Sequence[Mapping[str, Any]], split: str, last: int) -> list[_Series]:
    """Every avg@k with its interval."""
    every = []
    names = dict.fromkeys(n for line in lines for n in read_estimates(line) if "/avg@" in n)
    for i, name in enumerate(names):
        # Splits are mostly measured at the same iterations: a small shift keeps their bars apart.
        shift = 0.01 * last * i
        points = []
        for line in lines:
            estimate = read_estimates(line).get(name)
            if estimate is not None and not math.isnan(estimate.value):
                bounds = (estimate.value, estimate.low, estimate.high)
                points.append(_Point(line["iteration"] + shift, *bounds))
        label = f"{' '.join(split_and_metric(name, split))}, 95% interval"
        color = _COLORS[1 + len(every) % (len(_COLORS) - 1)]
        if points:
            every.append(_Series(label, color, _SHAPES[len(every) % len(_SHAPES)], points))
    return every


def _rollout_marks(series: _Series, plot: _Plot, window: int) -> list[str]:
    """Each rollout, thin, and the mean of those around it, thick."""
    half, values = window // 2, [point.value for point in series.points]
    near = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    means = [
        _Point(point.x, sum(some) / len(some))
        for point, some in zip(series.points, near, strict=True)
    ]
    dots = [
        f'<circle cx="{plot.x(point.x)}" cy="{plot.y(point.value)}" r="1.7" fill="{series.color}"/>'
        for point in series.points
    ]
    return [
        _line(series.points, plot, series.color, 1, opacity=0.4),
        *dots,
        _line(means, plot, series.color, 2.2),
    ]


def _marks(series: _Series, plot: _Plot) -> list[str]:
    """An evaluation's line, its intervals, and a mark at each point."""
    drawn = [_line(series.points, plot, series.color, 1.4)]
    for point in series.points:
        x, y = plot.x(point.x), plot.y(point.value)
        if not (math.isnan(point.low) or math.isnan(point.high)):
            low, high = plot.y(point.low), plot.y(point.high)
            bar = f"M{x},{low}V{high}M{x - 2.5},{low}h5M{x - 2.5},{high}h5"
            drawn.append(f'<path d="{bar}" stroke="{series.color}"/>')
        drawn.append(f'<path d="M{x},{y}{series.shape}" fill="{series.color}"/>')
    return drawn


def _line(
    points: Sequence[_Point], plot: _Plot, color: str, width: float, opacity: float = 1
) -> str:
    places = " ".join(f"{plot.x(point.x)},{plot.y(point.value)}" for point in points)
    return (
        f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"'
        f' opacity="{opacity}"/>'
    )


def _axes(plot: _Plot) -> list[str]:
    left, right, bottom = _LEFT, _LEFT + _WIDTH, plot.y(0)
    drawn = []
    for tenth in range(11):
        y = plot.y(tenth / 10)
        drawn.append(f'<path d="M{left},{y}H{right}" stroke="#ddd"/>')
        drawn.append(f'<path d="M{left - 5},{y}h5" stroke="#888"/>')
        drawn.append(_text(left - 7, y + 3.5, f"{tenth / 10:.1f}", anchor="end"))
    for iteration in range(0, plot.last + 1, _step(plot.last)):
        x = plot.x(iteration)
        drawn.append(f'<path d="M{x},{bottom}v5" stroke="#888"/>')
        drawn.append(_text(x, bottom + 15, str(iteration), anchor="middle"))
    drawn.append(f'<path d="M{left},{plot.top}V{bottom}H{right}" fill="none" stroke="#888"/>')
    drawn.append(_text(left + _WIDTH / 2, bottom + 31, "iteration", anchor="middle", size=11))
    across = f'<g transform="translate(15,{plot.y(0.5)}) rotate(-90)">'
    drawn.append(f"{across}{_text(0, 0, 'success rate', anchor='middle', size=11)}</g>")
    return drawn


def _step(last: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... with which few enough iterations have a tick."""
    power = 1
    while True:
        for step in (power, 2 * power, 5 * power):
            if last // step < _MOST_TICKS:
                return step
        power *= 10


def _legend(series: Sequence[_Series]) -> tuple[list[str], int]:
    """Marks and names in up to three columns, and where the plot begins below them."""
    widest = 2 * _SYMBOL + _CHARACTER * max((len(each.name) for each in series), default=0)
    columns = max(1, min(3, _WIDTH // widest))
    drawn = []
    for i, each in enumerate(series):
        row, column = divmod(i, columns)
        x, y = _LEFT + 6 + column * (_WIDTH // columns), 17 + row * _LEGEND_ROW
        if each.shape is None:
            drawn.append(f'<path d="M{x - 5},{y}h10" stroke="{each.color}" stroke-width="2"/>')
        else:
            drawn.append(f'<path d="M{x},{y}{each.shape}" fill="{each.color}"/>')
        drawn.append(_text(x + _SYMBOL - 6, y + 3.5, each.name))
    return drawn, 24 + _LEGEND_ROW * max(1, -(-len(series) // columns))


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 10) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">'
        f"{html.escape(text)}</text>"
    )
