"""The stability map as a picture: final success against two axes, a panel for each recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import altair as alt

from seeupo_jax.errors import name_file
from seeupo_jax.instruments.study.tables import MapCell
from seeupo_jax.reports.blocks import rounded

_CELL = 44  # pixels of a place
_PANELS = 3  # in a row
_DARK = 0.6  # success above which a place is light, and its number black


def draw_map(places: Sequence[MapCell], path: Path, *, x: str) -> None:
    """Writes the picture; viridis, whose lightness alone gives the order, and the numbers.

    Args:
      places: those without runs are left white.
      x: title of the horizontal axis.
    """
    rows = [
        {"recipe": each.recipe, "x": each.x, "y": each.y, "value": rounded(each.final.value)}
        for each in places
        if not math.isnan(each.final.value)
    ]
    order = {name: list(dict.fromkeys(vars(p)[name] for p in places)) for name in ("x", "y")}
    base = alt.Chart(alt.InlineData(rows)).encode(
        alt.X("x:O", title=x, sort=order["x"], axis=alt.Axis(labelAngle=0)),
        alt.Y("y:O", title=None, sort=order["y"][::-1]),
    )
    legend = alt.Legend(orient="top", title="success after the last iteration", gradientLength=160)
    shade = alt.Scale(scheme="viridis", domain=[0, 1])
    ink = alt.condition(f"datum.value > {_DARK}", alt.value("black"), alt.value("white"))
    layers = alt.layer(
        base.mark_rect().encode(alt.Color("value:Q", scale=shade, legend=legend)),
        base.mark_text(fontSize=10).encode(text=alt.Text("value:Q", format=".2f"), color=ink),
    ).properties(width=alt.Step(_CELL), height=alt.Step(_CELL // 2))
    recipes = list(dict.fromkeys(each.recipe for each in places))
    facet = alt.Facet("recipe:N", title=None, sort=recipes)
    path.parent.mkdir(parents=True, exist_ok=True)
    panels = layers.facet(facet, columns=_PANELS).resolve_scale(y="independent")
    with name_file(path):
        panels.properties(background="white").save(path)
