"""Rewards of turns from reference calls: MatchTIR's formulas by hand, and its plan by scipy."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment, minimize

from seeupo_jax.envs.call_matching import (
    MatchingReward,
    call_similarity,
    match_hard,
    match_soft,
    matching_rewards,
)
from seeupo_jax.envs.tool_calls import ToolCall


def call(name, *positional, **arguments):
    return ToolCall(name, arguments, positional)


@pytest.mark.parametrize(
    "got, wanted, similarity",
    [
        (call("f", a=1, b="x"), call("f", a=1, b="x"), 1),
        (call("f"), call("f"), 1),
        (call("g", a=1), call("f", a=1), 0),
        (call("f", a=2), call("f", a=1), (1 + 1 + 0) / 3),
        (call("f", a=1, c=3), call("f", a=1, b=2), (1 + 1 / 3 + 1) / 4),
        (call("f"), call("f", a=1, b=2), (1 + 0 + 0) / 4),
        (call("f", a=1), call("f"), (1 + 0 + 0) / 2),
        (call("f", a=1.0), call("f", a=1), 1),
        (call("f", a=(1, [2])), call("f", a=[1, (2,)]), 1),
        (call("f", a={"k": (1,)}), call("f", a={"k": [1]}), 1),
        (call("f", a={"k": 1}), call("f", a={"l": 1}), 2 / 3),
        (call("f", 1, b=2), call("f", 1, b=2), 1),
        (call("f", 1), call("f", 2), 2 / 3),
    ],
)
def test_similarity_is_the_published_formula(got, wanted, similarity):
    assert call_similarity(got, wanted) == pytest.approx(similarity, rel=1e-12)


def test_names_keep_their_case_and_true_is_not_one():
    # MatchTIR's code lowers names and compares as Python does; no tool is called `LS`, and JSON's
    # true is no number.
    assert call_similarity(call("LS"), call("ls")) == 0
    assert call_similarity(call("f", a=True), call("f", a=1)) == 2 / 3
    assert call_similarity(call("f", a=[1]), call("f", a=[True])) == 2 / 3


def test_hard_pairs_are_taken_greedily():
    similarity = np.array([[0.9, 0.8], [0.8, 0.1]])
    np.testing.assert_array_equal(match_hard(similarity), [0.9, 0.1])
    # MatchTIR's function is called Hungarian; the best assignment would be another one.
    assert similarity[linear_sum_assignment(-similarity)].sum() == 1.6


def test_among_equals_the_first_call_and_unmatched_calls_get_nothing():
    np.testing.assert_array_equal(match_hard(np.array([[0.5], [1.0], [1.0]])), [0, 1, 0])
    np.testing.assert_array_equal(match_hard(np.array([[0.0, 0.5, 0.5]])), [0.5])
    np.testing.assert_array_equal(match_hard(np.zeros((2, 0))), [0, 0])


def soft_by_scipy(similarity, regularization=0.1):
    """The same plan from the dual problem: unconstrained, smooth and convex."""
    calls, references = similarity.shape

    def dual(potentials):
        f_P, g_G = potentials[:calls], potentials[calls:]
        plan = np.exp((f_P[:, None] + g_G + similarity) / regularization)
        slope = [1 / calls - plan.sum(1), 1 / references - plan.sum(0)]
        value = f_P.mean() + g_G.mean() - regularization * plan.sum()
        return -value, -np.concatenate(slope)

    start = np.full(calls + references, -0.5 * (1 + 0.1 * np.log(calls * references)))
    options = {"maxiter": 10_000, "ftol": 0, "gtol": 1e-10}
    found = minimize(dual, start, jac=True, method="L-BFGS-B", options=options).x
    plan = np.exp((found[:calls, None] + found[calls:] + similarity) / regularization)
    return (plan * similarity).sum(1)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 3), (2, 5), (6, 4)])
def test_the_soft_matching_is_the_entropic_transport_plan(shape):
    similarity = np.random.default_rng(sum(shape)).uniform(size=shape)
    similarity[similarity < 0.3] = 0  # other names
    soft = match_soft(similarity)
    np.testing.assert_allclose(soft, soft_by_scipy(similarity), atol=1e-6)
    assert (soft <= 1 / shape[0] + 1e-9).all()


def test_the_soft_matching_by_hand():
    # One call: its share of each reference call is given by the marginals.
    np.testing.assert_allclose(match_soft(np.array([[1.0, 0.5]])), [0.75], atol=1e-9)
    # Two right calls: the plan is symmetric, x on the diagonal and 1/2 - x beside it.
    x = 0.5 / (1 + np.exp(-10))
    np.testing.assert_allclose(match_soft(np.eye(2)), [x, x], atol=1e-9)
    np.testing.assert_array_equal(match_soft(np.zeros((2, 0))), [0, 0])


@pytest.mark.parametrize("copies", [(2, 1), (5, 1), (1, 7), (9, 8), (6, 4)])
def test_plans_of_calls_in_two_groups_converge(copies):
    # Groups whose shares agree or nearly agree are where Sinkhorn's iteration takes thousands of
    # rounds: MatchTIR's code stops after one thousand.
    ones, others = copies
    rows, columns = np.arange(ones + others) < ones, np.arange(5) < 3
    similarity = (rows[:, None] == columns).astype(float)
    np.testing.assert_allclose(match_soft(similarity), soft_by_scipy(similarity), atol=1e-6)


def test_a_turn_gets_the_mean_over_its_calls():
    a, b, wrong = call("a", x=1), call("b", x=1), call("c")
    assert matching_rewards([[a, wrong], [], [b]], [b, a]) == [0.5, 0.0, 1.0]
    assert matching_rewards([[a], [a]], [a]) == [1.0, 0.0]
    assert matching_rewards([], [a]) == [] and matching_rewards([[]], [a], "soft") == [0.0]
    assert matching_rewards([[a, a]], [], "soft") == matching_rewards([[a]], []) == [0.0]
    with pytest.raises(ValueError, match="matching: got 'best'; allowed: hard, soft"):
        matching_rewards([[a]], [a], "best")


@pytest.mark.parametrize("matching", ["hard", "soft"])
def test_what_is_paid_step_by_step_is_right_at_every_cut(matching):
    near, right, other = call("f", x=2), call("f", x=1), call("g")
    parts = [([[near], [], [right, other]], [right, other]), ([[other], [other]], [other])]
    reward, paid = MatchingReward(parts[0][1], matching), np.zeros(0)
    done = []
    for turns, reference in parts:
        reward.begin(reference)
        for step, calls in enumerate(turns):
            paid = np.append(paid, 0.0) + reward.step_rewards(calls)
            wanted = done + matching_rewards(turns[: step + 1], reference, matching)
            np.testing.assert_allclose(paid, wanted, atol=1e-12)
        done = wanted
    if matching == "hard":  # the right call took the place of the one that was near
        np.testing.assert_allclose(paid, [0, 0, 1, 1, 0], atol=1e-12)
