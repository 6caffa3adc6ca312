"""Statistics over seeds against scipy, and against values worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from seeupo_jax.comparison.seed_statistics import (
    holm,
    mean_height,
    paired_difference,
    seed_interval,
    student_interval,
)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_paired_differences_are_scipys(count):
    actual, reference = np.random.default_rng(count).random((2, count))
    found = paired_difference(actual, reference)
    wanted = stats.ttest_rel(actual, reference)
    low, high = wanted.confidence_interval(0.95)
    estimate = found.estimate
    np.testing.assert_allclose(found.p, wanted.pvalue, rtol=1e-10)
    np.testing.assert_allclose(
        [estimate.value, estimate.low, estimate.high], [(actual - reference).mean(), low, high]
    )


def test_an_interval_of_a_mean_is_scipys_and_that_of_success_ends_at_its_bounds():
    values = [0.2, 0.9, 1.0, 0.4]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    found = student_interval(values)
    np.testing.assert_allclose([found.value, found.low, found.high], [0.625, low, high])
    assert high > 1 and seed_interval(values).high == 1.0
    assert seed_interval(values).low == pytest.approx(low)


def test_pairs_without_both_values_are_left_out():
    both = paired_difference([0.5, 0.7, math.nan], [0.4, 0.3, 0.1])
    assert both.estimate.value == pytest.approx(0.25)
    one = paired_difference([0.5, math.nan], [0.4, 0.1])
    assert math.isnan(one.p) and one.estimate.value == pytest.approx(0.1)
    assert math.isnan(paired_difference([], []).estimate.value)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_differences_that_are_all_the_same_have_scipys_sign_test_and_no_interval(count):
    actual = np.linspace(0.3, 0.8, count)
    # One episode of 256; the second as results have it, of six digits.
    for reference in (
        actual - 1 / 256,
        np.round(np.round(actual, 6) - 1 / 256, 6),
        actual + 1 / 256,
    ):
        found = paired_difference(actual, reference)
        assert found.p == stats.binomtest(count, count).pvalue
        assert abs(found.estimate.value) == pytest.approx(1 / 256, abs=1e-6)
        assert math.isnan(found.estimate.low) and math.isnan(found.estimate.high)
    assert paired_difference(actual, actual).p == 1


def test_holms_correction_by_hand():
    # 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 x 1, which may not be below the one before it.
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.4, 0.9]), [0.8, 0.9])
    assert holm([0.7, 0.9])[0] == 1.0
    corrected = holm([0.01, math.nan, 0.02])
    np.testing.assert_allclose([corrected[0], corrected[2]], [0.02, 0.02])
    assert math.isnan(corrected[1]) and holm([]) == []


def test_holm_rejects_what_the_steps_of_its_definition_do():
    rng = np.random.default_rng(0)
    for p in rng.random((50, 5)) ** 3:
        rejected, order = set(), np.argsort(p)
        for rank, index in enumerate(order):
            if p[index] > 0.05 / (5 - rank):
                break
            rejected.add(index)
        assert {i for i, q in enumerate(holm(list(p))) if q <= 0.05} == rejected


def test_an_area_by_hand_and_by_numpy():
    at, values = np.array([0.0, 100, 300]), np.array([0.2, 0.4, 0.8])
    # (0.3 x 100 + 0.5 x 100) / 200: half way between the last two it is 0.6.
    assert mean_height(at, values, 200) == pytest.approx(0.4)
    fine = np.linspace(0, 250, 100_001)
    twin = np.trapezoid(np.interp(fine, at, values), fine) / 250
    assert mean_height(at, values, 250) == pytest.approx(twin, rel=1e-6)
    assert mean_height(at, values, 300) == pytest.approx((30 + 120) / 300)
    assert math.isnan(mean_height(at, values, 301)) and mean_height(at, values, 0) == 0.2


def test_an_area_is_flat_up_to_its_first_value():
    at, values = np.array([100.0, 300]), np.array([0.2, 0.6])
    # 0.2 x 100, and 0.3 x 100 up to half way between the two.
    assert mean_height(at, values, 200) == pytest.approx((20 + 30) / 200)
    assert mean_height(at, values, 50) == mean_height(at, values, 0) == 0.2
