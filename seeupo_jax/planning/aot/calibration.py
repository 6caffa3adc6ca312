"""The ratios of measured to estimated times, from `bench estimates` on a CPU."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

FILE = "assets/aot/estimates_cpu.json"  # as `bench estimates --json` writes it


@functools.cache
def measured() -> dict[str, Any]:
    """The figures, as they were written."""
    return json.loads((importlib.resources.files("seeupo_jax") / FILE).read_text(encoding="utf-8"))


def factors() -> dict[str, tuple[float, float]]:
    """For each part of an iteration the least and the largest ratio of measured to estimated time.

    The estimate is the one without overlap, since one CPU has nothing that overlaps.
    """
    ratios: dict[str, list[float]] = {}
    for row in measured()["rows"]:
        ratios.setdefault(row["part"], []).append(row["measured_s"] / row["serial_s"])
    return {part: (min(each), max(each)) for part, each in ratios.items()}


def in_words() -> str:
    """One line for a report."""
    parts = ", ".join(
        f"{part.partition('/')[2]} {least:.2f} to {most:.2f}"
        for part, (least, most) in factors().items()
    )
    count = len(measured()["rows"])
    return f"measured over estimated time of {count} parts of iterations on a CPU: {parts}"
