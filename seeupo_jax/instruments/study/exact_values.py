"""How the exact values of a study's runs moved, in the figures of the laboratory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seeupo_jax.instruments.lab.laboratory import Result
from seeupo_jax.instruments.study.cell_results import CellResult
from seeupo_jax.instruments.study.study import Cell, point_text

# Of the optimum, or of a reward of 1 where that is more: less is the rounding of log-probabilities.
FALL = 1e-5


@dataclass(frozen=True)
class ExactValues:
    """The runs of one variant at one point that have exact values.

    stage, variant, point: theirs; the point in words. result: exact values of the runs, [S, I + 1].
    outside: the largest probability, over runs and iterations, of a text that is no action.
    """

    stage: str
    variant: str
    point: str
    result: Result
    outside: float

    @property
    def fell(self) -> float:
        """Share of the iterations, over all runs, in which the value fell by more than `FALL`."""
        return float(np.mean(self.result.fall_SI > FALL * max(1.0, abs(self.result.optimum))))

    @property
    def most(self) -> float:
        """The largest fall of an iteration, units of reward; 0: none fell."""
        return max(0.0, float(self.result.fall_SI.max()))


def exact_values(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[ExactValues]:
    """One for each variant and point of the cells, in their order; without exact values none."""
    groups: dict[tuple[str, str, str], list[Sequence[Mapping[str, Any]]]] = {}
    for cell in (cell for cell in cells if cell.key in results):
        lines = [line for line in results[cell.key].records if "exact/value" in line]
        if lines:
            name = (cell.stage, cell.variant, point_text(cell.point))
            groups.setdefault(name, []).append(lines)
    return [_of_runs(*name, runs) for name, runs in groups.items()]


def _of_runs(
    stage: str, variant: str, point: str, runs: Sequence[Sequence[Mapping[str, Any]]]
) -> ExactValues:
    longest = max(map(len, runs))
    # A run that ended early, as `stop_after_idle` ends it, keeps its policy.
    kept = [[*lines, *[lines[-1]] * (longest - len(lines))] for lines in runs]
    value_SI = np.array([[line["exact/value"] for line in lines] for lines in kept])
    outside = max(line["exact/outside"] for lines in runs for line in lines)
    result = Result(runs[0][0]["exact/optimum"], value_SI)
    return ExactValues(stage, variant, point, result, outside)
