"""Estimates from repeated episodes."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from seeupo_jax.metrics.statistics import (
    Estimate,
    avg_at_k,
    evaluation_metrics,
    evaluation_table,
    pass_at_k,
    read_estimates,
    split_and_metric,
)

NAN = math.nan


def test_values_by_hand():
    success = [[1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert avg_at_k(success).value == pytest.approx((0.75 + 0 + 0.25) / 3)
    assert pass_at_k(success).value == pytest.approx(2 / 3)


def test_failed_episodes_and_tasks_without_any_other_are_left_out():
    success = [[1, NAN, NAN], [0, 1, NAN], [NAN, NAN, NAN], [0, 0, 0]]
    assert avg_at_k(success).value == pytest.approx((1 + 0.5 + 0) / 3)
    assert pass_at_k(success).value == pytest.approx(2 / 3)


def test_the_interval_is_that_of_every_possible_resample():
    solved = [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4]  # of 4 episodes
    share = np.ones(1)  # of the resamples that solve 0, 1, 2, ... episodes
    for _ in solved:
        share = np.convolve(share, np.bincount(solved) / len(solved))
    low, high = np.searchsorted(np.cumsum(share), [0.025, 0.975]) / 60
    estimate = avg_at_k(np.arange(4) < np.array(solved)[:, None], resamples=20_000)
    # Means lie 1/60 apart; the quantiles of 20,000 resamples may fall one off.
    assert estimate.low == pytest.approx(low, abs=1.1 / 60)
    assert estimate.high == pytest.approx(high, abs=1.1 / 60)


def test_the_interval_agrees_with_a_loop_that_resamples_tasks():
    success = (np.random.default_rng(3).random((40, 4)) < 0.6).astype(float)
    rng = random.Random(5)
    rows = success.tolist()
    means = sorted(sum(sum(row) / 4 for row in rng.choices(rows, k=40)) / 40 for _ in range(4000))
    estimate = avg_at_k(success, resamples=4000)
    assert estimate.low == pytest.approx(means[100], abs=0.01)
    assert estimate.high == pytest.approx(means[3899], abs=0.01)


def test_episodes_of_one_task_do_not_narrow_the_interval():
    tasks = np.repeat([[0.0], [1.0]], 10, axis=0)
    narrow, wide = avg_at_k(tasks), avg_at_k(np.repeat(tasks, 8, axis=1))
    assert narrow == wide


def test_order_of_tasks_changes_no_value_and_a_seed_fixes_the_interval():
    success = (np.random.default_rng(0).random((30, 4)) < 0.5).astype(float)
    assert avg_at_k(success) == avg_at_k(success.copy())
    assert avg_at_k(success, resamples=50, seed=1) != avg_at_k(success, resamples=50, seed=2)
    assert avg_at_k(success[::-1]).value == pytest.approx(avg_at_k(success).value)


@pytest.mark.parametrize(
    ("tasks", "value", "low", "high"),
    [
        # Wilson by hand for p=1: low = n / (n + z^2), with z^2 = 3.8415; p=0 mirrors it.
        (1, 1.0, 1 / 4.8415, 1.0),
        (64, 1.0, 64 / 67.8415, 1.0),
        (64, 0.0, 0.0, 3.8415 / 67.8415),
    ],
)
def test_equal_tasks_still_leave_doubt(tasks, value, low, high):
    estimate = avg_at_k(np.full((tasks, 4), value))
    assert estimate.value == value
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("tasks", [20, 64])
def test_near_a_bound_the_interval_covers_the_truth_as_often_as_it_says(tasks):
    estimates = [avg_at_k((np.arange(tasks) < n)[:, None]) for n in range(tasks + 1)]
    for truth in (*np.linspace(0.005, 0.2, 40), *np.linspace(0.8, 0.995, 40)):
        covers = [estimate.low <= truth <= estimate.high for estimate in estimates]
        assert stats.binom.pmf(range(tasks + 1), tasks, truth) @ covers > 0.94


def test_a_first_failure_lowers_the_interval_and_it_is_no_narrower_than_scipys_wilson():
    success = np.ones((64, 4))
    perfect = avg_at_k(success).low
    success[0, 0] = 0
    assert 0.9 < avg_at_k(success).low < perfect
    success[0] = 0
    wilson = stats.binomtest(63, 64).proportion_ci(0.95, method="wilson")
    assert avg_at_k(success).low == pytest.approx(wilson.low, abs=1e-6)
    assert pass_at_k(1 - success).high == pytest.approx(1 - wilson.low, abs=1e-6)


def test_one_task_solved_half_the_time_says_little():
    estimate = avg_at_k([[1, 0]])
    # Wilson for n=1, p=0.5: 0.5 -+ sqrt(z^2 (1 + z^2)) / (2 (1 + z^2)) = 0.5 -+ 0.4454
    assert (estimate.low, estimate.high) == pytest.approx((0.0546, 0.9454), abs=1e-3)


def test_no_episode_at_all_gives_no_number():
    for success in ([[NAN, NAN]], np.zeros((0, 4))):
        assert all(math.isnan(x) for x in vars(avg_at_k(success)).values())


@pytest.mark.parametrize("success", [[1, 0], np.zeros((3, 0)), [[0.5]], [[2]]])
def test_other_shapes_and_values_are_refused(success):
    with pytest.raises(ValueError, match="success: got"):
        avg_at_k(success)


def test_metrics_read_back_as_the_estimates_they_were_written_from():
    success = (np.random.default_rng(1).random((20, 4)) < 0.5).astype(float)
    metrics = {"sweep/kl": 0.1, "eval/tasks": 20, **evaluation_metrics("eval_train", success)}
    assert read_estimates(metrics) == {
        "eval_train/avg@4": avg_at_k(success),
        "eval_train/pass@4": pass_at_k(success),
    }


def test_a_split_may_have_a_slash_in_its_name():
    metrics = evaluation_metrics("eval_dev/easy", KINDS, LABELS)
    assert {"eval_dev/easy/avg@2", "eval_dev/easy/pass@2"} == set(read_estimates(metrics))
    assert split_and_metric("eval_dev/easy/avg@2", "test") == ("dev/easy", "avg@2")
    assert [line.split()[0] for line in evaluation_table(metrics).splitlines()[1:3]] == [
        "all",
        "kind=a",
    ]


def test_a_null_metric_reads_as_no_number():
    (estimate,) = read_estimates({"eval/avg@4": None}).values()
    assert math.isnan(estimate.value) and math.isnan(estimate.low)


def test_the_main_split_takes_the_name_it_is_given():
    assert split_and_metric("eval/avg@4", "test") == ("test", "avg@4")
    assert split_and_metric("eval_dev-easy/pass@8", "test") == ("dev-easy", "pass@8")


def test_an_estimate_prints_with_its_interval():
    assert str(Estimate(0.523, 0.46, 0.581)) == "0.52 [0.46, 0.58]"


def test_an_estimate_of_nothing_prints_as_a_dash_and_one_without_bounds_alone():
    assert str(Estimate(NAN, NAN, NAN)) == "-" and str(Estimate(0.5, NAN, NAN)) == "0.50"


LABELS = [
    {"kind": "a", "steps": "10"},
    {"kind": "b", "steps": "9"},
    {"kind": "a", "steps": "9"},
    {"kind": "a"},
]
KINDS = np.array([[1, 0], [0, NAN], [1, 1], [NAN, NAN]])


def test_each_kind_of_task_has_the_metrics_of_its_tasks_alone():
    metrics = evaluation_metrics("eval", KINDS, LABELS)
    assert metrics["eval/avg@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert metrics["eval/avg@2/kind=a"] == 0.75
    assert metrics["eval/pass@2/kind=b"] == metrics["eval/avg@2/kind=b"] == 0
    assert metrics["eval/avg@2/steps=9"] == 0.5
    for rows, kind in (([0, 2, 3], "kind=a"), ([1], "kind=b"), ([0], "steps=10")):
        alone = evaluation_metrics("eval", KINDS[rows])
        assert {name: metrics[f"{name}/{kind}"] for name in alone} == alone
    assert (metrics["eval/tasks"], metrics["eval/failed"]) == (3, 3)
    assert (metrics["eval/tasks/kind=a"], metrics["eval/failed/kind=a"]) == (2, 2)


def test_kinds_leave_the_metrics_of_all_tasks_as_they_are():
    alone, metrics = (evaluation_metrics("eval", KINDS, labels) for labels in ((), LABELS))
    assert {name: metrics[name] for name in alone} == alone
    assert read_estimates(metrics) == read_estimates(alone)
    assert list(read_estimates(alone)) == ["eval/avg@2", "eval/pass@2"]


def test_the_table_has_a_line_for_all_tasks_and_for_each_kind_numbers_in_order():
    metrics = evaluation_metrics("eval_dev", KINDS, LABELS)
    lines = evaluation_table(metrics).splitlines()
    assert lines[0].split() == ["tasks", "failed", "avg@2", "pass@2"]
    assert [line.split()[0] for line in lines[1:]] == "all kind=a kind=b steps=9 steps=10".split()
    assert lines[1].split()[1:3] == ["3", "3"]
    assert (
        str(Estimate(0.75, *(metrics[f"eval_dev/avg@2_{e}/kind=a"] for e in ("low", "high"))))
        in lines[2]
    )
    assert len({line.index("[") for line in lines[1:]}) == 1


def test_a_label_with_a_line_break_has_its_row_on_one_line():
    labels = [{"request": "cancel\nmy order"}, {"request": "refund"}]
    metrics = evaluation_metrics("eval", np.array([[1, 0], [0, 0]]), labels)
    *_, cancel, refund = evaluation_table(metrics).splitlines()
    assert cancel.startswith("request=cancel my order  1      0       0.50 [")
    assert refund.startswith("request=refund           1      0       0.00 [")


def test_a_table_is_of_one_evaluation():
    metrics = evaluation_metrics("eval", KINDS)
    assert len(evaluation_table(metrics).splitlines()) == 2
    for wrong in ({}, metrics | evaluation_metrics("eval_dev", KINDS)):
        with pytest.raises(ValueError, match="allowed: those of one evaluation"):
            evaluation_table(wrong)
