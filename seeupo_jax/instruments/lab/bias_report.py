"""Results of `gradient_bias`: tables for the terminal, JSON, and a plot against the lag."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from seeupo_jax.instruments.lab.gradient_bias import BiasResult
from seeupo_jax.instruments.lab.report import save_panels

BiasResults = Mapping[str, Mapping[str, BiasResult]]  # problem -> recipe -> result
_TITLES = {
    "bias": "bias of the gradient",
    "noise": "noise of the gradient",
    "lost": "tokens without a gradient",
}


def json_values(results: BiasResults) -> list[dict[str, Any]]:
    """An object per problem and recipe: `lags`, `kl` [lags] and the figures of each correction."""
    return [
        {
            "problem": problem,
            "recipe": recipe,
            "lags": list(result.lags),
            "kl": result.kl.tolist(),
            "corrections": {
                name: {figure: x.tolist() for figure, x in found._asdict().items()}
                for name, found in result.by_correction.items()
            },
        }
        for problem, recipes in results.items()
        for recipe, result in recipes.items()
    ]


def tables(results: BiasResults) -> Group:
    """A table per problem, recipe and figure, with a line per correction and a column per lag."""
    return Group(
        *(
            _table(f"{problem}: {recipe}, {title}", result, figure)
            for problem, recipes in results.items()
            for recipe, result in recipes.items()
            for figure, title in _TITLES.items()
        )
    )


def _table(title: str, result: BiasResult, figure: str) -> Table:
    # `Text`: a file's name may look like markup.
    title_text = Text(title, "table.title")
    made = Table(title=title_text, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    made.add_column("lag in sweeps\n(KL in nats)", no_wrap=True)
    for lag, kl in zip(result.lags, result.kl, strict=True):
        made.add_column(f"{lag}\n({kl if lag else 0:.2g})", justify="right", no_wrap=True)
    for name, found in result.by_correction.items():
        shown = ".1%" if figure == "lost" else ".3f"
        made.add_row(name, *(f"{x:{shown}}" for x in getattr(found, figure)))
    return made


def draw(results: BiasResults, file: Path) -> None:
    """Bias against lag: a panel per problem and recipe, a line per correction."""
    import altair as alt  # here: measuring does without it

    rows = []
    for problem, recipes in results.items():
        for recipe, result in recipes.items():
            for name, found in result.by_correction.items():
                method, _, per = name.partition(" per ")
                rows += [
                    {"panel": f"{problem}: {recipe}", "method": method, "per": per or "no weights"}
                    | {"lag": lag, "bias": float(bias)}
                    for lag, bias in zip(result.lags, found.bias, strict=True)
                ]
    legend = alt.Legend(orient="bottom", title=None, columns=5, labelLimit=400)
    dashes = alt.Scale(range=[[1, 0], [2, 2], [5, 3], [10, 3]])
    lines = (
        alt.Chart()
        .mark_line(strokeWidth=1.5)
        .encode(
            alt.X("lag:Q", title="lag in sweeps", axis=alt.Axis(grid=False)),
            alt.Y("bias:Q", title="bias of the gradient"),
            alt.Color("method:N", legend=legend, sort=None),
            alt.StrokeDash("per:N", legend=legend, sort=None, scale=dashes),
        )
    )
    save_panels([lines], rows, "panel", file)
