"""Charts of runs: Vega-Lite that Altair makes, with its data inside; None where there is no data.

Series differ in colour, dash and shape, and lines have their names at their ends: a chart can be
read without colour. Text and axes take the page's colour, so that it is light or dark as the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import altair as alt
from altair.utils import schemapi

from seeupo_jax.reports.blocks import (
    Point,
    axis_range,
    block_size,
    block_span,
    block_start,
    color_range,
    known,
    mean,
    rounded,
    thin,
)
from seeupo_jax.reports.line_names import end_labels, legend_columns, short_names
from seeupo_jax.reports.run_data import natural

# Okabe and Ito's colours for colour-blind readers, the yellow darkened.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c7300", "#56b4e9", "#808080")
_DASHES = ([1, 0], [7, 3], [2, 2], [8, 3, 2, 3], [12, 4], [4, 6], [1, 3])
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
# Of stacked bars: neighbours differ in lightness too.
_STACK = ("#0072b2", "#8ecbf0", "#00674c", "#7fd6bd", "#a34700", "#f5b78a", "#5c5c5c", "#c3a6d8")
_STROKE = {"stroke": "#8888", "strokeWidth": 0.5}  # around the parts of a bar
_LEGEND = {"orient": "top", "title": None, "labelLimit": 220, "columns": 3, "symbolOpacity": 1}
_INK = {"labelColor": "currentColor", "titleColor": "currentColor"}
_TEXT = _INK | {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
_LINES = {"domainColor": "currentColor", "tickColor": "currentColor", "gridColor": "currentColor"}
_ROWS = alt.NamedData("rows")
HEIGHT = 240  # of a chart, in pixels
_LINE_POINTS = 300  # more cannot be distinguished on a screen
_MARKED_POINTS = 60  # of a line whose points are drawn
_DOT = 36  # square pixels
_BLOCKS = 120  # bars or cells; more cannot be distinguished on a screen
_TINY = 1e-3  # below it values are written with an exponent


@dataclass(frozen=True)
class Chart:
    """A drawing, and a sentence next to its title."""

    title: str
    spec: Mapping[str, Any]
    note: str = ""


def line_chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    y: str,
    x: str = "iteration",
    domain: tuple[float, float] | None = None,
    span: tuple[float, float] | None = None,
    height: int = HEIGHT,
    marks: Mapping[float, str] | None = None,
) -> Chart | None:
    """Lines with bands for intervals.

    Args:
      series: the points of each line, in order; `at` is a number. Lines and bands are interrupted
        where values are missing.
      x, y: titles of the axes.
      domain: of the axis of values; None: from 0, or below, to the largest.
      span: of the axis x; None: from the first point to the last.
      height: in pixels.
      marks: vertical lines, each with the text that pointing at it shows.
    """
    block = max((block_size([p.at for p in ps], _LINE_POINTS) for ps in series.values()), default=1)
    lines = {name: thin(points, block) for name, points in series.items() if known(points)}
    if not lines:
        return None
    rows = [_row(name, point, x) for name, points in lines.items() for point in points]
    low, high = axis_range(lines.values()) if domain is None else domain
    axis = alt.Axis(format=".1e") if max(high, -low) < _TINY else alt.Undefined
    unit = {"title": y, "axis": axis, "scale": alt.Scale(domain=[low, high], zero=False)}
    value = alt.Y("value:Q", **unit)
    color, dash, shape = _styles(list(lines))
    if span is None:
        first, last = (bound(row[x] for row in rows) for bound in (min, max))
        span = (first, max(last, first + 1))
    base = alt.Chart(_ROWS).encode(
        alt.X(
            f"{x}:Q",
            title=x,
            axis=alt.Axis(tickMinStep=1, format="d" if x == "iteration" else "~s", grid=False),
            scale=alt.Scale(domain=list(span), nice=False),
        ),
        color,
    )
    picked = alt.selection_point("picked", fields=["series"], bind="legend")
    zoom = alt.selection_interval(
        "zoom", encodings=["x"], bind="scales", zoom="wheel![event.shiftKey]"
    )
    most = max(map(len, lines.values()))
    layers = [
        base.mark_area(clip=True)
        .encode(alt.Y("low:Q", **unit), alt.Y2("high:Q"), opacity=_if_picked(0.18))
        .transform_filter("isValid(datum.low) || !isValid(datum.value)"),
        base.mark_line(clip=True, strokeWidth=2)
        .encode(value, dash, opacity=_if_picked(1.0))
        .add_params(zoom, picked),
        _dots(base, x, 0 if most > _MARKED_POINTS else _DOT).encode(value, shape),
    ]
    layers += [_rules(marks, x)] if marks else []
    if len(lines) > 1:
        ends = {n: p.value for n, line in lines.items() for p in line if p.value is not None}
        layers.append(_end_names(end_labels(ends, low, high, height)).encode(color))
    return _made(title, alt.layer(*layers), rows, height, _mean_note(block, "point"))


def range_chart(title: str, series: Mapping[str, Sequence[Point]], *, kind: str) -> Chart | None:
    """Success rates of kinds, one below the other, with their intervals as bars.

    Args:
      series: points whose `at` is the kind; values in [0, 1].
      kind: axis title.
    """
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    rows = [_row(name, point, "kind") for name, points in series.items() for point in points]
    kinds = sorted(dict.fromkeys(row["kind"] for row in rows), key=natural)
    color, _, shape = _styles(list(series))
    unit = {"title": "success rate", "scale": alt.Scale(domain=[0, 1])}
    base = alt.Chart(_ROWS).encode(
        alt.Y("kind:N", title=kind, sort=kinds, axis=alt.Axis(labelLimit=140, grid=True)),
        alt.YOffset("series:N", sort=list(series)),
        color,
    )
    chart = alt.layer(
        base.mark_rule(strokeWidth=2)
        .encode(alt.X("low:Q", **unit), alt.X2("high:Q"))
        .transform_filter("isValid(datum.low)"),
        base.mark_point(filled=True, size=80, opacity=1).encode(
            alt.X("value:Q", **unit), shape, tooltip=_tooltip("kind")
        ),
    )
    return _made(title, chart, rows, alt.Step(18))


def heat_map(
    title: str,
    cells: Iterable[tuple[int, int, float]],
    *,
    value: str,
    domain: Sequence[float] | None = None,
    span: tuple[float, float] | None = None,
) -> Chart | None:
    """A value by turn and iteration, in viridis, whose lightness alone gives the order.

    The darkest colour is the least value, also where all values are equal.

    Args:
      cells: iteration, turn (from 1 on) and value.
      value: its name.
      domain: of the colours; None: from the least value to the largest.
      span: of the iterations; None: from the first to the last.
    """
    cells = list(cells)
    block = block_size([iteration for iteration, _, _ in cells], _BLOCKS)
    blocks: dict[tuple[int, int], list[float]] = {}
    for iteration, turn, number in cells:
        blocks.setdefault((block_start(iteration, block), turn), []).append(number)
    if not blocks:
        return None
    rows = [
        block_span(start, block) | {"turn": turn, "value": rounded(mean(values))}
        for (start, turn), values in sorted(blocks.items())
    ]
    legend = alt.Legend(orient="top", gradientLength=160, title=value)
    domain = color_range([row["value"] for row in rows]) if domain is None else domain
    shade = alt.Scale(scheme="viridis", domain=list(domain))
    chart = _block_chart(rows, span).mark_rect()
    chart = chart.encode(
        alt.Y("turn:O", title="turn", sort="descending"),
        alt.Color("value:Q", legend=legend, scale=shade),
        tooltip=[_SPAN, alt.Tooltip("turn:O"), alt.Tooltip("value:Q", title=value, format=".4~g")],
    )
    return _made(title, chart, rows, alt.Step(22), _mean_note(block, "cell"))


def stack_chart(
    title: str,
    parts: Iterable[tuple[int, str, float]],
    names: Sequence[str],
    *,
    y: str,
    domain: tuple[float, float] | None = None,
    span: tuple[float, float] | None = None,
) -> Chart | None:
    """A bar per iteration, of parts that add up.

    Args:
      parts: iteration, name and value.
      names: of the parts, from the bottom up.
      y: axis title. domain: of its axis. span: as of `heat_map`.
    """
    parts = [part for part in parts if part[2]]
    block = block_size([iteration for iteration, _, _ in parts], _BLOCKS)
    iterations = Counter(block_start(i, block) for i in {iteration for iteration, _, _ in parts})
    total: Counter[tuple[int, str]] = Counter()
    for iteration, name, number in parts:
        total[block_start(iteration, block), name] += number
    if not total:
        return None
    rows = [
        block_span(start, block)
        | {"part": name, "order": names.index(name), "value": rounded(number / iterations[start])}
        for (start, name), number in sorted(total.items())
    ]
    picked = alt.selection_point("picked", fields=["part"], bind="legend")
    scale = alt.Undefined if domain is None else alt.Scale(domain=list(domain))
    chart = _block_chart(rows, span).mark_bar(clip=True, **_STROKE).add_params(picked)
    chart = chart.encode(
        alt.Y("sum(value):Q", title=y, scale=scale),
        _part_color(rows, names),
        alt.Order("order:Q"),
        opacity=_if_picked(1.0),
        tooltip=[_SPAN, "part:N", alt.Tooltip("sum(value):Q", title=y, format=".4~g")],
    )
    return _made(title, chart, rows, HEIGHT, _mean_note(block, "bar"))


def share_chart(
    title: str, parts: Iterable[tuple[str, str, float]], names: Sequence[str]
) -> Chart | None:
    """A bar a run, cut into the shares of its parts; of run, name and seconds."""
    parts = [part for part in parts if part[2]]
    total: Counter[str] = Counter()
    for run, _, seconds in parts:
        total[run] += seconds
    if not total:
        return None
    rows = [
        {"run": run, "part": name, "order": names.index(name)}
        | {"seconds": rounded(seconds), "share": rounded(seconds / total[run])}
        for run, name, seconds in parts
    ]
    share = alt.X("share:Q", title="share of the time", scale=alt.Scale(domain=[0, 1]))
    chart = alt.Chart(_ROWS).mark_bar(**_STROKE)
    chart = chart.encode(
        alt.Y("run:N", title=None, sort=list(total), axis=alt.Axis(labelLimit=120)),
        share.axis(format="%"),
        _part_color(rows, names),
        alt.Order("order:Q"),
        tooltip=[
            *("run:N", "part:N", alt.Tooltip("seconds:Q", format=".4~g")),
            alt.Tooltip("share:Q", format=".1%"),
        ],
    )
    return _made(title, chart, rows, alt.Step(36))


def unchecked() -> AbstractContextManager[None]:
    """Charts made within are not checked against Vega-Lite's schema: that is for tests.

    It takes a third of the time of a page.
    """
    return schemapi.debug_mode(False)


def _made(
    title: str, chart: alt.TopLevelMixin, rows: list[dict[str, Any]], height: Any, note: str = ""
) -> Chart:
    """The chart of these rows, as wide as its place."""
    chart = chart.properties(
        width="container",
        height=height,
        padding=4,
        background="transparent",
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    ).configure(
        font="system-ui, sans-serif",
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(**_TEXT, **_LINES, gridOpacity=0.13, labelOverlap=True),
        legend=alt.LegendConfig(**_TEXT),
    )
    # Checking the whole, and copying the rows with each part, would take longer than all else.
    spec = chart.to_dict(validate=False)
    return Chart(title, spec | {"datasets": spec.get("datasets", {}) | {"rows": rows}}, note)


def _styles(series: Sequence[str]) -> tuple[alt.Color, alt.StrokeDash, alt.Shape]:
    """Colour, dash and shape of each series; no legend where there is one.

    Where colours come again, it is with other dashes and shapes.
    """
    legend = alt.Legend(**_LEGEND | legend_columns(series)) if len(series) > 1 else None

    def style(channel: Any, values: Sequence[Any], step: int) -> Any:
        count = len(values)
        used = [values[(i + i // count * step) % count] for i in range(len(series))]
        return channel("series:N", legend=legend, scale=alt.Scale(domain=series, range=used))

    dash, shape = style(alt.StrokeDash, _DASHES, 1), style(alt.Shape, _SHAPES, 2)
    return style(alt.Color, _COLORS, 0), dash, shape


def _if_picked(strength: float) -> alt.OpacityValue:
    """Full opacity of the legend's selected entries; of all entries if none is selected."""
    return alt.OpacityValue(strength / 8, condition={"param": "picked", "value": strength})


def _part_color(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> alt.Color:
    """Colours of the parts of stacked bars, the same whichever of them are present."""
    present = {row["part"] for row in rows}
    colors = {n: _STACK[i % len(_STACK)] for i, n in enumerate(names) if n in present}
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    return alt.Color("part:N", scale=scale, legend=alt.Legend(**_LEGEND))


_SPAN = alt.Tooltip("span:N", title="iteration")


def _block_chart(rows: Sequence[Mapping[str, Any]], span: tuple[float, float] | None) -> alt.Chart:
    """Iterations `from` .. `to` of each row side by side without gaps."""
    domain = [min(row["from"] for row in rows), max(row["to"] for row in rows)]
    domain = domain if span is None else list(span)
    axis = alt.Axis(tickMinStep=1, format="d", grid=False)
    scale = alt.Scale(domain=domain, nice=False)
    x = alt.X("from:Q", bin="binned", title="iteration", axis=axis, scale=scale)
    one, several = "'' + (datum.from + 0.5)", "(datum.from + 0.5) + ' to ' + (datum.to - 0.5)"
    span = f"datum.to - datum.from == 1 ? {one} : {several}"
    return alt.Chart(_ROWS).transform_calculate(span=span).encode(x, alt.X2("to:Q"))


def _tooltip(at: str) -> alt.TooltipValue:
    """A point's tooltip: its series, place and value, and its interval if it has one.

    An expression: of the areas around points that answer to the pointer, whose `datum` holds the
    point's own, Vega-Lite's tooltips know numbers only.
    """
    point = "(datum.datum ? datum.datum : datum)"
    parts = {
        "series": f"{point}.series",
        at: f"{point}['{at}']",
        "value": f"format({point}.value, '.4~g')",
        "95% interval": f"isValid({point}.low) ? format({point}.low, '.3~g') + ' to '"
        f" + format({point}.high, '.3~g') : 'none'",
    }
    text = ", ".join(f"'{name}': {value}" for name, value in parts.items())
    return alt.TooltipValue({"expr": f"{{{text}}}"})


def _dots(base: alt.Chart, x: str, size: int) -> alt.Chart:
    """The points of lines: they answer to the pointer, everywhere next to them.

    Args:
      size: 0: they are drawn only where the pointer is, and where no line leads to them.
    """
    near = alt.selection_point(
        "near", on="pointerover", clear="pointerout", nearest=True, empty=False
    )
    alone = "!isValid(datum.before) && !isValid(datum.after)"
    sizes = [{"param": "near", "value": 90, "empty": False}, {"test": alone, "value": _DOT}]
    return (
        base.mark_point(filled=True, clip=True)
        .transform_window(
            before="lag(value)", after="lead(value)", groupby=["series"], sort=[alt.SortField(x)]
        )
        .encode(
            opacity=_if_picked(1.0),
            size=alt.SizeValue(size, condition=sizes),
            tooltip=_tooltip(x),
        )
        .add_params(near)
    )


def _end_names(places: Mapping[str, float]) -> alt.Chart:
    """The lines' names at the right; the page drops this layer where it is narrow."""
    short = short_names(places)
    rows = [
        {"series": name, "label": short[name], "place": rounded(place)}
        for name, place in places.items()
    ]
    chart = alt.Chart(alt.InlineData(rows), name="ends")
    return chart.mark_text(align="left", baseline="middle", clip=False, dx=6, fontSize=11).encode(
        x=alt.value("width"), y=alt.Y("place:Q", scale=None, axis=None), text="label:N"
    )


def _rules(marks: Mapping[float, str], x: str) -> alt.Chart:
    rows = alt.InlineData([{x: at, "change": text} for at, text in marks.items()])
    rule = alt.Chart(rows, name="changes").mark_rule(clip=True, strokeDash=[2, 3], opacity=0.6)
    return rule.encode(alt.X(f"{x}:Q"), color=alt.value("currentColor"), tooltip="change:N")


def _row(series: str, point: Point, at: str) -> dict[str, Any]:
    place = point.at if isinstance(point.at, str) else rounded(point.at)
    value = None if point.value is None else rounded(point.value)
    row = {"series": series, at: place, "value": value}
    if point.low is not None and point.high is not None:
        row |= {"low": rounded(point.low), "high": rounded(point.high)}
    return row


def _mean_note(block: int, what: str) -> str:
    return "" if block == 1 else f"Each {what} is the mean of {block} iterations."
