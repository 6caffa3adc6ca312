"""Pieces of Vega-Lite that all charts are put together from.

Series differ in colour, dash and shape, and lines have their names at their ends: a chart can be
read without colour. Text and axes take the page's colour, so that it is light or dark as the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name; nothing is loaded from there
# Okabe and Ito's colours, which colour-blind people tell apart, the yellow darkened.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c7300", "#56b4e9", "#808080")
_DASHES = ([1, 0], [7, 3], [2, 2], [8, 3, 2, 3], [12, 4], [4, 6], [1, 3])
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
# Of stacked bars: neighbours differ in lightness too.
_STACK = ("#0072b2", "#8ecbf0", "#00674c", "#7fd6bd", "#a34700", "#f5b78a", "#5c5c5c", "#c3a6d8")
_LEGEND = {"orient": "top", "title": None, "labelLimit": 220, "columns": 3, "symbolOpacity": 1}
LABEL_CHARACTERS = 18
HEIGHT = 240  # of a chart, in pixels

ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
    "bind": "scales",
}
SPAN_TEXT = {
    "calculate": "datum.to - datum.from == 1 ? '' + (datum.from + 0.5)"
    " : (datum.from + 0.5) + ' to ' + (datum.to - 0.5)",
    "as": "span",
}
SPAN = {"field": "span", "type": "nominal", "title": "iteration"}


@dataclass(frozen=True)
class Chart:
    """A drawing, and what is said below its title."""

    title: str
    spec: Mapping[str, Any]
    note: str = ""


def whole(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A specification as wide as its place."""
    config = {"view": {"stroke": None}, "background": None, "font": "system-ui, sans-serif"}
    inked = {"labelColor": "currentColor", "titleColor": "currentColor"}
    lines = {"domainColor": "currentColor", "tickColor": "currentColor", "gridOpacity": 0.13}
    text = {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
    config["axis"] = {**inked, **lines, **text, "gridColor": "currentColor", "labelOverlap": True}
    config["legend"] = {**inked, **text}
    frame = {"autosize": {"type": "fit-x", "contains": "padding"}, "padding": 4}
    return {"$schema": SCHEMA, "width": "container", **frame, "config": config, **spec}


def pick(field: str) -> dict[str, Any]:
    """Clicks on the legend leave only some series in full strength."""
    return {"name": "picked", "select": {"type": "point", "fields": [field]}, "bind": "legend"}


def picked(strength: float) -> dict[str, Any]:
    """Opacity of what is picked; of everything while nothing is."""
    return {"condition": {"param": "picked", "value": strength}, "value": strength / 8}


def styles(series: Sequence[str]) -> dict[str, Any]:
    """Colour, dash and shape of each series; no legend where there is one."""
    ranges = {"color": _COLORS, "strokeDash": _DASHES, "shape": _SHAPES}
    legend = _LEGEND if len(series) > 1 else None
    return {
        channel: {
            "field": "series",
            "type": "nominal",
            "legend": legend,
            "scale": {
                "domain": list(series),
                "range": [values[i % len(values)] for i in range(len(series))],
            },
        }
        for channel, values in ranges.items()
    }


def color_of(series: int) -> str:
    return _COLORS[series % len(_COLORS)]


def part_color(present: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Colours of the parts of stacked bars, the same whichever of them are present."""
    colors = [_STACK[list(names).index(name) % len(_STACK)] for name in present]
    scale = {"domain": list(present), "range": colors}
    return {"field": "part", "type": "nominal", "scale": scale, "legend": _LEGEND}


def block_axis(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Iterations `from` .. `to` of each row as bars without gaps."""
    domain = [min(row["from"] for row in rows), max(row["to"] for row in rows)]
    axis = {"tickMinStep": 1, "format": "d", "grid": False}
    x = {"field": "from", "bin": "binned", "type": "quantitative", "title": "iteration"}
    return {
        "x": {**x, "axis": axis, "scale": {"domain": domain, "nice": False}},
        "x2": {"field": "to"},
    }


def tooltip(at: str) -> dict[str, Any]:
    """What a point tells: its series, place and value, and its interval if it has one.

    Written by hand: of the areas around points that answer to the pointer, whose `datum` holds the
    point's own, Vega-Lite's tooltips know numbers only.
    """
    point = "(datum.datum ? datum.datum : datum)"
    told = {
        "series": f"{point}.series",
        at: f"{point}.{at}",
        "value": f"format({point}.value, '.4~g')",
        "95% interval": f"isValid({point}.low) ? format({point}.low, '.3~g') + ' to '"
        f" + format({point}.high, '.3~g') : 'none'",
    }
    return {"value": {"expr": "{" + ", ".join(f"'{k}': {v}" for k, v in told.items()) + "}"}}


def end_labels(
    ends: Mapping[str, float], low: float, high: float, *, apart: int = 13
) -> dict[str, float]:
    """Where to write each line's name, in pixels from the top, so that none covers another.

    Args:
      ends: the last value of each line.
      low, high: of the axis, which is `HEIGHT` pixels long.
      apart: pixels between two names.
    """
    scale = HEIGHT / (high - low)
    places = sorted(((high - ends[name]) * scale, name) for name in ends)
    placed: list[float] = []
    for place, _ in places:
        placed.append(max(place, placed[-1] + apart) if placed else place)
    floor = float(max(HEIGHT, apart * len(placed)))
    for i in reversed(range(len(placed))):  # what was pushed out below moves up again
        placed[i] = min(placed[i], floor)
        floor = placed[i] - apart
    return {name: y for y, (_, name) in zip(placed, places, strict=True)}


def shortened(text: str) -> str:
    """At most `LABEL_CHARACTERS`, the middle left out: names often differ at their ends."""
    if len(text) <= LABEL_CHARACTERS:
        return text
    half = LABEL_CHARACTERS // 2
    return f"{text[: half - 1]}…{text[-half:]}"
