"""Success rates of repeated episodes, with confidence intervals.

The unit of sampling is the task: episodes of one task resemble each other, so an interval over
episodes would be too narrow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959964  # the normal distribution's 97.5% point
_FEW = 10  # tasks that differ from a bound, below which resampling alone finds too little spread
_KEY = re.compile(r"(eval(?:_.+?)?/(?:avg|pass)@[0-9]+)(_low|_high)?")
_ROW = re.compile(
    r"(?P<prefix>eval(?:_.+?)?)/(?P<metric>(?:avg|pass)@[0-9]+)(?P<kind>(?:/.*)?)",
    re.DOTALL,  # a label is any text
)


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks and its 95% interval; all three NaN when no task gave a value."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        bounds = "" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{bounds}"


def avg_at_k(success: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """The mean over tasks of each task's mean success.

    The interval is the 95% percentile bootstrap over tasks, which near 0 and 1 covers the truth too
    rarely (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 13 and 14): of
    tasks that are nearly all equal, resampling draws few of the others. Where all tasks have one
    value, or fewer than ten another than 0, or than 1, it therefore reaches over the Wilson
    interval (JASA 22, 1927) too, for as many draws as tasks: no variable in [0, 1] spreads more
    than a coin of the same mean.

    Args:
      success: [tasks, k], 1 or 0; NaN where the episode failed for reasons that are not the
        policy's. Such episodes are left out, and so is a task that has no other.
      resamples: bootstrap resamples.
      seed: of the resampling; the same success gives the same interval.

    Raises:
      ValueError: another shape or other values.
    """
    success, ran = _checked(success)
    ran_at_all = ran.any(axis=1)
    total = np.where(ran, success, 0.0).sum(axis=1)[ran_at_all]
    return _over_tasks(total / ran.sum(axis=1)[ran_at_all], resamples, seed)


def pass_at_k(success: np.ndarray) -> Estimate:
    """The share of tasks that at least one of their k episodes solved.

    Success and interval as in `avg_at_k`. A task with failed episodes had fewer than k tries,
    so it counts for no more than it would have with all k.
    """
    success, ran = _checked(success)
    solved = np.where(ran, success, 0.0).max(axis=1)
    return _over_tasks(solved[ran.any(axis=1)])


def evaluation_metrics(
    prefix: str, success: np.ndarray, labels: Sequence[Mapping[str, str]] = ()
) -> dict[str, float]:
    """The metrics of one evaluation, and of each kind of its tasks.

    `eval/avg@4` and `eval/pass@4`, with `_low` and `_high`; `eval/tasks`, how many tasks they are
    of; `eval/failed`, how many episodes are left out. Then the same of the tasks that have a label,
    such as `eval/avg@4_low/category=refunds`.

    Args:
      prefix: `eval`, or `eval_SPLIT` for a further split.
      success: [tasks, k] as in `avg_at_k`.
      labels: of each task; () where there are none.
    """
    success, ran = _checked(success)
    metrics: dict[str, float] = {}
    for kind, rows in {"": slice(None), **_kinds(labels)}.items():
        estimates = {"avg": avg_at_k(success[rows]), "pass": pass_at_k(success[rows])}
        for name, estimate in estimates.items():
            metric = f"{prefix}/{name}@{success.shape[1]}"
            metrics[f"{metric}{kind}"] = estimate.value
            metrics[f"{metric}_low{kind}"] = estimate.low
            metrics[f"{metric}_high{kind}"] = estimate.high
        metrics[f"{prefix}/tasks{kind}"] = int(ran[rows].any(axis=1).sum())
        metrics[f"{prefix}/failed{kind}"] = int((~ran[rows]).sum())
    return metrics


def _kinds(labels: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """The tasks of each kind by `/label=value`; labels in order of appearance, values sorted."""
    rows: dict[str, dict[str, list[int]]] = {}
    for row, task_labels in enumerate(labels):
        for label, value in task_labels.items():
            rows.setdefault(label, {}).setdefault(value, []).append(row)

    def by_number(value: str) -> tuple[int, str]:
        return (int(value) if value.isdecimal() else -1), value

    return {
        f"/{label}={value}": rows[label][value]
        for label in rows
        for value in sorted(rows[label], key=by_number)
    }


def evaluation_table(metrics: Mapping[str, float]) -> str:
    """The metrics of one evaluation as aligned text: a line for all tasks, and one for each kind.

    Raises:
      ValueError: there is not one evaluation in these metrics.
    """
    matches = [match for key in metrics if (match := _ROW.fullmatch(key))]
    names = list(dict.fromkeys(match["metric"] for match in matches))
    if len({match["prefix"] for match in matches}) != 1:
        raise ValueError(f"metrics: got {len(metrics)}; allowed: those of one evaluation.")
    rows = [("", "tasks", "failed", *names)]
    for kind in dict.fromkeys(match["kind"] for match in matches):
        prefix = matches[0]["prefix"]
        estimates = (
            Estimate(*(metrics[f"{prefix}/{name}{end}{kind}"] for end in ("", "_low", "_high")))
            for name in names
        )
        counts = (metrics[f"{prefix}/{name}{kind}"] for name in ("tasks", "failed"))
        name = " ".join(kind[1:].splitlines()) if kind else "all"
        rows.append((name, *map(str, counts), *map(str, estimates)))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns, a line a row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; no text in it ends a cell or a line."""
    lines = (head, ["---"] * len(head), *rows)
    texts = ([str(c).replace("|", "\\|").replace("\n", " ") for c in cells] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in texts)


def read_estimates(metrics: Mapping[str, object]) -> dict[str, Estimate]:
    """The estimates of all tasks among metrics, keyed like `eval/avg@4`; a missing bound or a null
    is NaN. Those of single kinds of tasks are left out.
    """
    names = [key for key in metrics if (match := _KEY.fullmatch(key)) and match.group(2) is None]
    return {
        name: Estimate(*(_number(metrics.get(name + end)) for end in ("", "_low", "_high")))
        for name in names
    }


def evaluation_prefix(reported: str, split: str) -> str:
    """The prefix of a split's metrics: `eval` where it is the one reported, else `eval_SPLIT`."""
    return "eval" if split == reported else f"eval_{split}"


def split_and_metric(key: str, split: str) -> tuple[str, str]:
    """A key in two: `eval/avg@4` is (`split`, avg@4), and `eval_NAME/avg@4` is (NAME, avg@4)."""
    prefix, metric = key.rsplit("/", 1)
    return (split if prefix == "eval" else prefix.removeprefix("eval_")), metric


def _number(value: object) -> float:
    return math.nan if value is None else float(value)


def _checked(success: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    success = np.asarray(success, dtype=np.float64)
    if success.ndim != 2 or success.shape[1] == 0:
        raise ValueError(f"success: got shape {success.shape}; allowed: [tasks, k] with k >= 1.")
    ran = ~np.isnan(success)
    wrong = success[ran & (success != 0) & (success != 1)]
    if wrong.size:
        raise ValueError(f"success: got {wrong[0]:g}; allowed: 0, 1, or NaN for a failed episode.")
    return success, ran


def _over_tasks(values: np.ndarray, resamples: int = 2000, seed: int = 0) -> Estimate:
    """The mean of one value per task in [0, 1], and its interval."""
    if values.size == 0:
        return Estimate(math.nan, math.nan, math.nan)
    value = float(values.mean())
    low, high = bootstrap_interval(values, resamples=resamples, seed=seed)
    others = min(np.count_nonzero(values != bound) for bound in (0, 1))
    if np.ptp(values) == 0 or others < _FEW:
        wilson = wilson_interval(value, values.size)
        low, high = min(low, wilson[0]), max(high, wilson[1])
    return Estimate(value, low, high)


def bootstrap_interval(
    values: np.ndarray, *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The 95% percentile interval of a mean of values [S]; of equal arguments it is the same."""
    picks = np.random.default_rng(seed).integers(values.size, size=(resamples, values.size))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def wilson_interval(mean: float, draws: float) -> tuple[float, float]:
    """The 95% Wilson score interval of a proportion; of a mean in [0, 1] it is one too wide."""
    shrink = 1 + _Z**2 / draws
    centre = (mean + _Z**2 / (2 * draws)) / shrink
    half = _Z / shrink * math.sqrt(mean * (1 - mean) / draws + _Z**2 / (4 * draws**2))
    return max(0.0, centre - half), min(1.0, centre + half)
