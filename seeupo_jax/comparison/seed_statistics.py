"""Statistics over seeds: intervals, paired differences, several tests at once, areas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

from seeupo_jax.metrics.statistics import Estimate

_SAME = 2e-6  # recorded successes have six digits, so that equal differences are this far apart


def seed_interval(values: Sequence[float] | np.ndarray) -> Estimate:
    """The mean over seeds and its 95% interval by Student's t, within [0, 1].

    Values that are NaN are left out; of one value there is no interval, of none no mean.
    """
    interval = student_interval(values)
    if math.isnan(interval.low):
        return interval
    return Estimate(interval.value, max(0.0, interval.low), min(1.0, interval.high))


def student_interval(values: Sequence[float] | np.ndarray) -> Estimate:
    """As `seed_interval`, of values without bounds: mean ± t(n-1, 97.5%) s / √n, s with n-1."""
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    if values.size == 0:
        return Estimate(math.nan, math.nan, math.nan)
    mean = float(values.mean())
    if values.size == 1:
        return Estimate(mean, math.nan, math.nan)
    half = float(stdtrit(values.size - 1, 0.975)) * _error(values)
    return Estimate(mean, mean - half, mean + half)


def _error(values: np.ndarray) -> float:
    """The standard error of the mean."""
    return float(values.std(ddof=1)) / math.sqrt(values.size)


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences, its 95% interval and a two-sided p-value."""

    estimate: Estimate
    p: float


def paired_difference(values: Sequence[float], others: Sequence[float]) -> Difference:
    """The mean of values minus others, seed by seed: t = mean / (s / √n), two-sided, n-1 degrees.

    Differences that are all the same have no spread, and t would be certain of any two seeds: their
    p is the exact sign test's, 2 / 2^n, or 1 where they are 0, and they have no interval. Pairs
    with NaN are left out; of fewer than two pairs there is no p-value.

    Args:
      values, others: success rates or means of them, in [0, 1].
    """
    differences = np.asarray(values, np.float64) - np.asarray(others, np.float64)
    differences = differences[~np.isnan(differences)]
    estimate = student_interval(differences)
    if differences.size < 2:
        return Difference(estimate, math.nan)
    if np.ptp(differences) <= _SAME:
        sign = 0.5 ** (differences.size - 1) if abs(estimate.value) > _SAME else 1.0
        return Difference(Estimate(estimate.value, math.nan, math.nan), sign)
    t = abs(estimate.value) / _error(differences)
    return Difference(estimate, 2 * float(stdtr(differences.size - 1, -t)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: of m tests the i-th smallest p times m - i + 1, at most 1, and none below
    one that is corrected before it. NaN is no test and stays."""
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = list(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        corrected[index] = largest
    return corrected


def mean_height(at: np.ndarray, values: np.ndarray, until: float) -> float:
    """The area under straight lines through (at, values) from 0 to `until`, divided by `until`.

    Args:
      at: rising; from 0 to the first the line is flat. NaN where they end before `until`; at 0 the
        first value.
    """
    if until <= 0:
        return float(values[0])
    if at[-1] < until:
        return math.nan
    if at[0] > 0:
        at, values = np.append(0.0, at), np.append(values[0], values)
    inside = at < until
    x = np.append(at[inside], until)
    y = np.append(values[inside], np.interp(until, at, values))
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / until)
