"""Seconds against one size: a line a contender."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_INK, _FAINT = "#333333", "#dddddd"


def draw(points: Mapping[int, Mapping[str, Mapping[str, Any]]], label: str, path: Path) -> None:
    """Draws medians with bars from the least to the most.

    Args:
      points: of each size and contender, the figures of `contest.Timing`.
      label: of the size.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = sorted(points)
    for name in dict.fromkeys(name for each in points.values() for name in each):
        there = [size for size in sizes if name in points[size]]
        median = [points[size][name]["median_s"] for size in there]
        below = [points[s][name]["median_s"] - points[s][name]["least_s"] for s in there]
        above = [points[s][name]["most_s"] - points[s][name]["median_s"] for s in there]
        axes.errorbar(there, median, yerr=[below, above], marker="o", capsize=3, label=name)
    axes.set_xlabel(label, color=_INK)
    axes.set_ylabel("seconds a sweep", color=_INK)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False)
    # Without a date and with a salt of its own, the same figures give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "seeupo_jax"}):
        figure.savefig(path, metadata={"Date": None})
