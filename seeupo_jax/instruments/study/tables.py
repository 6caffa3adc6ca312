"""The rows of a study's tables."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from seeupo_jax.comparison.figures import Line
from seeupo_jax.comparison.seed_statistics import (
    Difference,
    holm,
    paired_difference,
    seed_interval,
)
from seeupo_jax.instruments.study.cell_results import CellResult
from seeupo_jax.instruments.study.study import STAGES, Cell, Point, Study, grid_points
from seeupo_jax.instruments.study.study_runs import choose, history
from seeupo_jax.metrics.statistics import Estimate

MEASURES = {
    "final": "success after the last iteration",
    "tokens": "area over sampled tokens",
    "steps": "area over optimizer steps",
}


def lines_of(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[Line]:
    """The finished cells of each variant, in the order of the cells."""
    lines = []
    for variant in dict.fromkeys(cell.variant for cell in cells):
        of_variant = [cell for cell in cells if cell.variant == variant]
        ended = [history(cell, results[cell.key]) for cell in of_variant if cell.key in results]
        lines.append(Line(variant, len(of_variant), tuple(ended)))
    return lines


@dataclass(frozen=True)
class Compared:
    """A variant against the reference by one measure, seed by seed.

    until: tokens or steps that both have got to; NaN for `final`. corrected: p by Holm's method
    over the variants of the table.
    """

    variant: str
    until: float
    difference: Difference
    corrected: float


def compare_with(reference: Line, others: Sequence[Line], measure: str) -> list[Compared]:
    """Reference minus each other, on the seeds that both have; above 0 it is ahead.

    An area is up to the tokens, or steps, that all runs of the two have got to.
    """
    differences = [(other.variant, *_difference(reference, other, measure)) for other in others]
    corrected = holm([difference.p for _, _, difference in differences])
    return [Compared(*each, p) for each, p in zip(differences, corrected, strict=True)]


def _difference(reference: Line, other: Line, measure: str) -> tuple[float, Difference]:
    until = math.nan
    if measure != "final" and reference.histories and other.histories:
        until = min(reference.reach(measure), other.reach(measure))
    reference_values, other_values = (
        {h.seed: h.after if measure == "final" else h.area(measure, until) for h in line.histories}
        for line in (reference, other)
    )
    seeds = sorted(reference_values.keys() & other_values.keys())
    return until, paired_difference(
        [reference_values[s] for s in seeds], [other_values[s] for s in seeds]
    )


def verdicts(compared: Sequence[Compared]) -> dict[str, list[str]]:
    """The variants that the reference is `ahead` of, `behind` or `undecided`, by a corrected p."""
    by_verdict: dict[str, list[str]] = {"ahead": [], "behind": [], "undecided": []}
    for each in compared:
        decided = each.corrected < 0.05
        above = each.difference.estimate.value > 0
        kind = "undecided" if not decided else "ahead" if above else "behind"
        by_verdict[kind].append(each.variant)
    return by_verdict


@dataclass(frozen=True)
class MapCell:
    """One place of the stability map of a recipe, over its seeds.

    x, y: its values on the two axes; the second has its name, in which recipes may differ.
    steps: optimizer steps per iteration, as measured.
    """

    recipe: str
    x: str
    y: str
    final: Estimate
    collapsed: int
    runs: int
    planned: int
    steps: float


def stability_map(study: Study, results: Mapping[str, CellResult]) -> list[MapCell]:
    """Every place of every recipe that is tuned; without runs its numbers are NaN."""
    cells = study.cells("stability", choose(study, results))
    places = []
    for recipe in dict.fromkeys(cell.variant for cell in cells):
        grid = study.stability[recipe]
        of_recipe = [cell for cell in cells if cell.variant == recipe]
        for point in grid_points(grid):
            here = [cell for cell in of_recipe if point.items() <= cell.point.items()]
            places.append(_place(recipe, here, point, study, results))
    return places


def _place(
    recipe: str,
    cells: Sequence[Cell],
    point: Point,
    study: Study,
    results: Mapping[str, CellResult],
) -> MapCell:
    runs = [history(cell, results[cell.key]) for cell in cells if cell.key in results]
    x, y = study.stability[recipe]
    iterations = cells[0].config.iterations
    return MapCell(
        recipe=recipe,
        x=x.value_of(point),
        y=f"{y.label}={y.value_of(point)}",
        final=seed_interval([run.after for run in runs]),
        collapsed=sum(run.collapsed for run in runs),
        runs=len(runs),
        planned=len(cells),
        steps=float(np.mean([run.steps for run in runs])) / iterations if runs else math.nan,
    )


@dataclass(frozen=True)
class Cost:
    """A stage before it runs. Estimates are from finished cells; NaN where none is finished.

    tokens: sampled in training. cpu_s: of one thread.
    """

    stage: str
    cells: int
    finished: int
    iterations: int
    tokens: float
    cpu_s: float


def costs(study: Study, results: Mapping[str, CellResult]) -> list[Cost]:
    """The remaining cost of each stage; a cell of several stages counts in the first.

    A cell's cost per iteration is the mean over finished cells of its recipe with as many inner
    epochs; without such cells, of all recipes' with as many, else of its recipe's, else of all.
    Recipes that are not tuned yet count with the first point of their grid.
    """
    points = {name: grid_points(grid)[0] for name, grid in study.tuning.items()}
    points |= choose(study, results)
    every = [cell for stage in STAGES for cell in study.cells(stage, points)]
    alike: dict[tuple, list[Cell]] = {}
    for cell in every:
        for kind in _kinds(study, cell):
            alike.setdefault(kind, []).append(cell)
    rates = {kind: _rates(cells, results) for kind, cells in alike.items()}
    seen: set[str] = set()
    stages = []
    for stage in STAGES:
        cells = [cell for cell in every if cell.stage == stage]
        new = [c for c in cells if c.key not in results and c.key not in seen]
        seen |= {cell.key for cell in cells}
        spent = np.zeros(2)
        for cell in new:
            near = [rates[kind] for kind in _kinds(study, cell)]
            rate = functools.reduce(lambda x, y: np.where(np.isnan(x), y, x), near)
            spent += cell.config.iterations * rate
        done = sum(cell.key in results for cell in cells)
        iterations = sum(cell.config.iterations for cell in new)
        stages.append(Cost(stage, len(cells), done, iterations, *map(float, spent)))
    return stages


def _kinds(study: Study, cell: Cell) -> list[tuple]:
    """The groups of cells that its cost is estimated from, the most similar first."""
    ablation = study.ablations.get(cell.variant)
    recipe = cell.variant if ablation is None else ablation.recipe
    epochs = cell.config.algorithm.inner_epochs
    return [(recipe, epochs), (epochs,), (recipe,), ()]


def _rates(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> np.ndarray:
    """Tokens and CPU seconds by iteration, means over finished cells; NaN without one."""
    done = {cell.key: cell for cell in cells if cell.key in results}.values()
    tokens = [history(c, results[c.key]).tokens / c.config.iterations for c in done]
    timed = [(c, results[c.key].cpu_s) for c in done]
    cpu = [s / c.config.iterations for c, s in timed if s is not None]
    return np.array([np.mean(each) if each else math.nan for each in (tokens, cpu)])
