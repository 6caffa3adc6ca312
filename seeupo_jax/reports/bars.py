"""Bars and cells over iterations, each a block of them where there are many.

Each chart is Vega-Lite with its data inside, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from seeupo_jax.reports import vega
from seeupo_jax.reports.blocks import block_size, block_start, mean, noted, rounded
from seeupo_jax.reports.vega import Chart

_BLOCKS = 120  # more cannot be told apart on a screen
_STROKE = {"stroke": "#8888", "strokeWidth": 0.5}  # around the parts of a bar


def heat_map(
    title: str, cells: Iterable[tuple[int, int, float]], *, value: str, note: str = ""
) -> Chart | None:
    """A value by turn and iteration, in viridis, whose lightness alone tells the order.

    Args:
      cells: iteration, turn (from 1 on) and value.
      value: what it is.
    """
    cells = list(cells)
    block = block_size([iteration for iteration, _, _ in cells], _BLOCKS)
    blocks: dict[tuple[int, int], list[float]] = {}
    for iteration, turn, number in cells:
        blocks.setdefault((block_start(iteration, block), turn), []).append(number)
    if not blocks:
        return None
    rows = [
        _span(start, block) | {"turn": turn, "value": rounded(mean(own))}
        for (start, turn), own in sorted(blocks.items())
    ]
    legend = {"orient": "top", "gradientLength": 160, "title": value}
    shade = {"field": "value", "type": "quantitative", "legend": legend}
    spec = {
        "data": {"values": rows},
        "transform": [vega.SPAN_TEXT],
        "mark": "rect",
        "height": {"step": 22},
        "encoding": {
            **vega.block_axis(rows),
            "y": {"field": "turn", "type": "ordinal", "title": "turn", "sort": "descending"},
            "color": {**shade, "scale": {"scheme": "viridis", "zero": False}},
            "tooltip": [
                vega.SPAN,
                {"field": "turn"},
                {"field": "value", "title": value, "format": ".4~g"},
            ],
        },
    }
    return Chart(title, vega.whole(spec), noted(note, block, "cell"))


def stack_chart(
    title: str,
    parts: Iterable[tuple[int, str, float]],
    names: Sequence[str],
    *,
    y: str,
    domain: tuple[float, float] | None = None,
    note: str = "",
) -> Chart | None:
    """A bar per iteration, of parts that add up.

    Args:
      parts: iteration, name and value.
      names: of the parts, from the bottom up.
      y: what the values are.
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
        _span(start, block)
        | {"part": name, "order": names.index(name), "value": rounded(number / iterations[start])}
        for (start, name), number in sorted(total.items())
    ]
    present = [name for name in names if any(row["part"] == name for row in rows)]
    value = {"field": "value", "type": "quantitative", "aggregate": "sum"}
    spec = {
        "data": {"values": rows},
        "transform": [vega.SPAN_TEXT],
        "height": vega.HEIGHT,
        "mark": {"type": "bar", "clip": True, **_STROKE},
        "params": [vega.pick("part")],
        "encoding": {
            **vega.block_axis(rows),
            "y": {**value, "title": y, "scale": {} if domain is None else {"domain": domain}},
            "color": vega.part_color(present, names),
            "order": {"field": "order", "type": "quantitative"},
            "opacity": vega.picked(1.0),
            "tooltip": [vega.SPAN, {"field": "part"}, {**value, "title": y, "format": ".4~g"}],
        },
    }
    return Chart(title, vega.whole(spec), noted(note, block, "bar"))


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
        {
            "run": run,
            "part": name,
            "order": names.index(name),
            "seconds": rounded(seconds),
            "share": rounded(seconds / total[run]),
        }
        for run, name, seconds in parts
    ]
    present = [name for name in names if any(row["part"] == name for row in rows)]
    share = {"field": "share", "type": "quantitative", "title": "share of the time"}
    run = {"field": "run", "type": "nominal", "title": None, "sort": list(total)}
    spec = {
        "data": {"values": rows},
        "height": {"step": 36},
        "mark": {"type": "bar", **_STROKE},
        "encoding": {
            "y": {**run, "axis": {"labelLimit": 120}},
            "x": {**share, "axis": {"format": "%"}, "scale": {"domain": [0, 1]}},
            "color": vega.part_color(present, names),
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [
                {"field": "run"},
                {"field": "part"},
                {"field": "seconds", "type": "quantitative", "format": ".4~g"},
                {"field": "share", "type": "quantitative", "format": ".1%"},
            ],
        },
    }
    return Chart(title, vega.whole(spec))


def _span(start: int, block: int) -> dict[str, float]:
    return {"from": start - 0.5, "to": start + block - 0.5}
