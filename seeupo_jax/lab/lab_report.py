"""Results of the experiments: a table for the terminal, JSON, and a plot of the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from seeupo_jax.lab.laboratory import SOLVED, Result
from seeupo_jax.metrics.statistics import bootstrap_interval

PLOT_SUFFIXES = (".svg", ".png")

Results = Mapping[str, Mapping[str, Result]]  # problem -> recipe -> result


def json_values(results: Results) -> dict[str, Any] | list[dict[str, Any]]:
    """The object of the one problem, or a list of one object per problem.

    Of each recipe: `final_over_optimum`, the last value over the optimum, of each seed;
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
    title = f"{name}: optimum {optimum:g}"
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    made.add_column("recipe", overflow="fold")
    made.add_column("final / optimum (95%)", no_wrap=True)
    for heading in (f">= {SOLVED:g}", "iterations", "fell", "most"):
        made.add_column(heading, justify="right", no_wrap=True)
    for recipe, result in recipes.items():
        made.add_row(recipe, *_cells(result))
    return made


def _cells(result: Result) -> tuple[str, ...]:
    low, high = bootstrap_interval(result.final_over_optimum)
    iterations = result.iterations_to_solve
    return (
        f"{result.final_over_optimum.mean():.3f} [{low:.3f}, {high:.3f}]",
        f"{result.solved:.0%}",
        "never" if math.isinf(iterations) else f"{iterations:g}",
        f"{result.drops:.1%}",
        f"{max(0.0, result.fall_SI.max()):.0e}",
    )


def check_output(flag: str, path: str, suffixes: tuple[str, ...] = ()) -> None:
    """Checks that an output file can be written, before anything runs.

    Args:
      suffixes: those that it may have; none: any.

    Raises:
      ValueError: another suffix, or no such folder.
    """
    if suffixes and Path(path).suffix not in suffixes:
        allowed = " or ".join(suffixes)
        raise ValueError(f"{flag}: got {path!r}; allowed: a file ending {allowed}.")
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"{flag}: got {path!r}; allowed: a file in an existing folder.")


def draw(results: Results, path: str) -> None:
    """Value over optimum against the iteration: a panel per problem, a line per recipe.

    A line is the mean over the seeds, its band reaches from the worst seed to the best.
    """
    columns = min(len(results), 3)
    rows = math.ceil(len(results) / columns)
    figure = Figure(figsize=(5 * columns, 3.6 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for panel, (name, recipes) in zip(panels, results.items(), strict=False):
        for recipe, result in recipes.items():
            share_SI = result.value_SI / result.optimum
            iterations = np.arange(share_SI.shape[1])
            (line,) = panel.plot(iterations, share_SI.mean(axis=0), label=recipe, linewidth=1.5)
            band = {"color": line.get_color(), "alpha": 0.12, "linewidth": 0}
            panel.fill_between(iterations, share_SI.min(axis=0), share_SI.max(axis=0), **band)
        panel.axhline(1, color="black", linewidth=0.6)
        panel.set(title=name, xlabel="iteration")
    for panel in panels[len(results) :]:
        panel.set_axis_off()
    figure.supylabel("value / optimum")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)
