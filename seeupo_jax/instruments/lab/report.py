"""Results of the experiments: a table for the terminal, JSON, and a plot of the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from seeupo_jax.errors import name_file
from seeupo_jax.instruments.lab.laboratory import SOLVED, Result
from seeupo_jax.metrics.statistics import bootstrap_interval

PLOT_SUFFIXES = (".svg", ".png")

Results = Mapping[str, Mapping[str, Result]]  # problem -> recipe -> result


def json_values(results: Results) -> dict[str, Any] | list[dict[str, Any]]:
    """The object of the one problem, or a list of one object per problem.

    Of each recipe: `final_over_optimum`, the last value over the optimum, of each seed, and
    `mean_over_optimum`, the mean of the first value and of those after each iteration;
    `curve_mean`, the mean over the seeds of the exact value after each iteration, in units of
    reward; `solved`, the share of seeds that end at 95% of the optimum; `drops`, the share of
    iterations, over all seeds, in which the value fell by more than 1e-6.
    """
    problems = [_problem_values(name, recipes) for name, recipes in results.items()]
    return problems[0] if len(problems) == 1 else problems


def _problem_values(name: str, recipes: Mapping[str, Result]) -> dict[str, Any]:
    optimum = next(iter(recipes.values())).optimum
    return {
        "problem": name,
        "optimum": optimum,
        "recipes": {
            recipe: {
                "final_over_optimum": result.final_over_optimum.tolist(),
                "mean_over_optimum": result.mean_over_optimum.tolist(),
                "curve_mean": result.value_SI[:, 1:].mean(axis=0).tolist(),
                "solved": result.solved,
                "drops": result.drops,
            }
            for recipe, result in recipes.items()
        },
    }


def tables(results: Results) -> Group:
    """A table per problem, with a line per recipe."""
    return Group(*(_table(name, recipes) for name, recipes in results.items()))


def _table(name: str, recipes: Mapping[str, Result]) -> Table:
    optimum = next(iter(recipes.values())).optimum
    # `Text`: a file's name may look like markup.
    title = Text(f"{name}: optimum {optimum:g}", "table.title")
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    made.add_column("recipe", overflow="fold")
    made.add_column("final / optimum (95%)", no_wrap=True)
    for heading in (f">= {SOLVED:g}", "iterations", "fell", "most"):
        made.add_column(heading, justify="right", no_wrap=True)
    for recipe, result in recipes.items():
        made.add_row(Text(recipe), *_cells(result))
    return made


def _cells(result: Result) -> tuple[str, ...]:
    finals_S, iterations = result.final_over_optimum, result.iterations_to_solve
    interval = ""  # one seed does not say how seeds differ
    if finals_S.size > 1:
        interval = " [{:.3f}, {:.3f}]".format(*bootstrap_interval(finals_S))
    return (
        f"{finals_S.mean():.3f}{interval}",
        f"{result.solved:.0%}",
        "never" if math.isinf(iterations) else f"{iterations:g}",
        f"{result.drops:.1%}",
        f"{max(0.0, result.fall_SI.max()):.0e}",
    )


def draw(results: Results, file: Path) -> None:
    """Value over optimum against the iteration: a panel per problem, a line per recipe.

    A line is the mean over the seeds, its band reaches from the worst seed to the best.
    """
    import altair as alt  # here: measuring does without it

    rows = []
    for name, recipes in results.items():
        for recipe, result in recipes.items():
            share_IS = result.value_SI.T / result.optimum
            rows += [
                {"problem": name, "recipe": recipe, "iteration": iteration}
                | {"mean": share_S.mean(), "low": share_S.min(), "high": share_S.max()}
                for iteration, share_S in enumerate(share_IS)
            ]
    legend = alt.Legend(orient="bottom", title=None, columns=4, labelLimit=400, symbolOpacity=1)
    color = alt.Color("recipe:N", legend=legend, sort=None)
    x = alt.X("iteration:Q", axis=alt.Axis(grid=False), scale=alt.Scale(nice=False))
    base = alt.Chart().encode(x, color)
    y = {"title": "value / optimum", "scale": alt.Scale(zero=False)}
    layers = (
        base.mark_area(opacity=0.12).encode(alt.Y("low:Q", **y), alt.Y2("high:Q")),
        base.mark_line(strokeWidth=1.5).encode(alt.Y("mean:Q", **y)),
        alt.Chart().mark_rule(strokeWidth=0.6).encode(y=alt.datum(1)),
    )
    save_panels(layers, rows, "problem", file)


def save_panels(
    layers: Sequence[Any], rows: Sequence[Mapping[str, Any]], by: str, file: Path
) -> None:
    """Writes a plot of layers over each other, with a panel for each value of a column."""
    import altair as alt

    panels = alt.layer(*layers, data=alt.InlineData(rows)).properties(width=360, height=240)
    order = list(dict.fromkeys(row[by] for row in rows))
    panels = panels.facet(alt.Facet(f"{by}:N", sort=order, title=None), columns=3)
    file.parent.mkdir(parents=True, exist_ok=True)
    with name_file(file):
        panels.save(file, scale_factor=2 if file.suffix == ".png" else 1)
