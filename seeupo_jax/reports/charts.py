"""Lines with bands and points with bars: values with their intervals.

Each chart is Vega-Lite with its data inside, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seeupo_jax.reports import vega
from seeupo_jax.reports.blocks import Point, block_size, noted, rounded, thin
from seeupo_jax.reports.vega import Chart

_LINE_POINTS = 300  # more cannot be told apart on a screen
_TINY = 1e-3  # below it values are written with an exponent
_MARKED_POINTS = 60  # of a line whose points are drawn


def line_chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    y: str,
    domain: tuple[float, float] | None = None,
    note: str = "",
) -> Chart | None:
    """Lines over iterations, with bands for intervals.

    Args:
      series: the points of each line, in order; `at` is an iteration.
      y: what the values are.
      domain: of the axis of values; None: from 0, or below, to the largest.
    """
    block = max((block_size([p.at for p in ps], _LINE_POINTS) for ps in series.values()), default=1)
    lines = {name: thin(points, block) for name, points in series.items() if points}
    if not lines:
        return None
    low, high = _range(lines.values()) if domain is None else domain
    rows = [_row(name, point, "iteration") for name, points in lines.items() for point in points]
    value = {"field": "value", "type": "quantitative", "title": y}
    value["scale"] = {"domain": [low, high], "zero": False}
    if max(high, -low) < _TINY:
        value["axis"] = {"format": ".1e"}
    style = vega.styles(list(lines))
    layers = [
        _band(style, value),
        {
            "mark": {"type": "line", "clip": True, "strokeWidth": 2},
            "params": [vega.ZOOM, vega.pick("series")],
            "encoding": {
                "y": value,
                "color": style["color"],
                "strokeDash": style["strokeDash"],
                "opacity": vega.picked(1.0),
            },
        },
        _points(style, value, shown=max(map(len, lines.values())) <= _MARKED_POINTS),
    ]
    if len(lines) > 1:
        ends = {name: points[-1].value for name, points in lines.items()}
        layers += _end_names(list(lines), vega.end_labels(ends, low, high))
    for layer in layers:
        layer["encoding"] = {"x": _iterations(rows), **layer["encoding"]}
    spec = {"data": {"values": rows}, "height": vega.HEIGHT, "layer": layers}
    return Chart(title, vega.whole(spec), noted(note, block, "point"))


def range_chart(
    title: str, series: Mapping[str, Sequence[Point]], *, kind: str, note: str = ""
) -> Chart | None:
    """Success rates of kinds, one below the other, with their intervals as bars.

    Args:
      series: points whose `at` is the kind; values in [0, 1].
      kind: what the kinds are.
    """
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    rows = [_row(name, point, "kind") for name, points in series.items() for point in points]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    style = vega.styles(list(series))
    marks = {"color": style["color"], "shape": style["shape"]}
    unit = {"type": "quantitative", "title": "success rate", "scale": {"domain": [0, 1]}}
    y = {"field": "kind", "type": "nominal", "title": kind, "sort": kinds}
    layers = [
        {
            "mark": {"type": "rule", "strokeWidth": 2},
            "transform": [{"filter": "isValid(datum.low)"}],
            "encoding": {
                "x": {"field": "low", **unit},
                "x2": {"field": "high"},
                "color": style["color"],
            },
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": {"x": {"field": "value", **unit}, **marks, "tooltip": vega.tooltip("kind")},
        },
    ]
    spec = {"data": {"values": rows}, "height": {"step": 18}, "layer": layers}
    spec["encoding"] = {
        "y": {**y, "axis": {"labelLimit": 140, "grid": True}},
        "yOffset": {"field": "series", "sort": list(series)},
    }
    return Chart(title, vega.whole(spec), note)


def _band(style: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mark": {"type": "area", "clip": True},
        "transform": [{"filter": "isValid(datum.low)"}],
        "encoding": {
            "y": {**value, "field": "low"},
            "y2": {"field": "high"},
            "color": style["color"],
            "opacity": vega.picked(0.18),
        },
    }


def _points(
    style: Mapping[str, Any],
    value: Mapping[str, Any],
    *,
    shown: bool,
) -> dict[str, Any]:
    """What answers to the pointer, everywhere next to it; drawn where there are few."""
    hover = {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True}
    near = {"param": "near", "value": 90, "empty": False}
    return {
        "mark": {"type": "point", "filled": True, "clip": True},
        "params": [{"name": "near", "select": hover}],
        "encoding": {
            "y": value,
            "color": style["color"],
            "shape": style["shape"],
            "opacity": vega.picked(1.0),
            "size": {"condition": near, "value": 36 if shown else 0},
            "tooltip": vega.tooltip("iteration"),
        },
    }


def _end_names(names: Sequence[str], places: Mapping[str, float]) -> list[dict[str, Any]]:
    """The lines' names at the right, each in its line's colour; the page drops them if narrow."""
    return [
        {
            "name": f"end {i}",
            "data": {"values": [{}]},
            "mark": {
                "type": "text",
                "align": "left",
                "baseline": "middle",
                "clip": False,  # they stand at the right of the plot
                "dx": 6,
                "fontSize": 11,
                "text": vega.shortened(name),
                "color": vega.color_of(i),
            },
            "encoding": {"x": {"value": "width"}, "y": {"value": rounded(places[name])}},
        }
        for i, name in enumerate(names)
    ]


def _iterations(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, last = (bound(row["iteration"] for row in rows) for bound in (min, max))
    axis = {"tickMinStep": 1, "format": "d", "grid": False}
    scale = {"domain": [first, max(last, first + 1)], "nice": False}
    x = {"field": "iteration", "type": "quantitative", "title": "iteration"}
    return {**x, "axis": axis, "scale": scale}


def _range(lines: Iterable[Sequence[Point]]) -> tuple[float, float]:
    """From 0, or below, to a little more than the largest value."""
    values = [n for line in lines for p in line for n in (p.value, p.low, p.high) if n is not None]
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    return (low, low + 1.0) if high == low else (low * 1.05, high * 1.05)


def _row(series: str, point: Point, at: str) -> dict[str, Any]:
    place = point.at if isinstance(point.at, str) else rounded(point.at)
    row = {"series": series, at: place, "value": rounded(point.value)}
    if point.low is not None and point.high is not None:
        row |= {"low": rounded(point.low), "high": rounded(point.high)}
    return row
