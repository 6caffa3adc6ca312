"""Each named reward's share of the gradient, by hand."""

import dataclasses

import learner_cases as cases
import numpy as np
import pytest
from stored_fields import with_fields

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner.batching import SegmentBatch, Shapes
from seeupo_jax.learner.credit.advantages import assign_credit
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.types import Trajectory

SHAPES = Shapes((16,), action=8, rows=4, trajectories=4)


def trajectories(*rewards):
    """Two and two of a group; the first has 3 tokens, the others 1; the last failed."""
    rng = np.random.default_rng(0)
    sizes = (3, 1, 1, 1)
    stops = ("done", "done", "done", "env_error")
    return [
        Trajectory.of((cases.segment(rng, (0, 2, size)),), 9.0, i // 2, stop=stop, rewards=named)
        for i, (size, stop, named) in enumerate(zip(sizes, stops, rewards, strict=True))
    ]


def shares(given, weights, **choices):
    algorithm = Algorithm(**choices)
    masks = algorithm.truncated == "mask"
    rows = SegmentBatch.of(given, grouped=algorithm.grouped, mask_truncated=masks)
    arrays = CreditArrays(algorithm, SHAPES, rows, given, {}, weights)
    found = assign_credit(arrays)[1]
    return {name.removeprefix("sweep/reward_share/"): share for name, share in found.items()}


NAMED = [{"env": 0.0, "form": 1.0}, {"env": 1.0}, {"env": 9.0, "form": 9.0}, {"env": -9.0}]


def test_a_sum_has_the_shares_of_its_centred_weighted_parts():
    # In the group of two, either is half a unit from its mean; the other has one survivor.
    for scale in ("batch", "none", "group"):
        found = shares(trajectories(*NAMED), {"form": -0.5}, scale=scale)
        assert found == pytest.approx({"form": 1 / 3, "env": 2 / 3})
    # Without groups the third counts: means 10/3 and 10/3 over three, tokens 3, 1 and 1.
    found = shares(trajectories(*NAMED), {"form": 0.5}, estimator={"baseline": "batch"})
    env = np.dot([3, 1, 1], np.abs([0, 1, 9] - np.mean([0, 1, 9])))
    form = np.dot([3, 1, 1], np.abs([1, 0, 9] - np.mean([1, 0, 9]))) / 2
    assert found == pytest.approx({"form": form / (form + env), "env": env / (form + env)})


def test_a_cut_trajectory_that_is_masked_counts_in_the_means_and_has_no_share():
    first, *others = trajectories(*NAMED)
    given = [dataclasses.replace(first, stop="max_turns"), *others]
    found = shares(given, {"form": 0.5}, estimator={"baseline": "batch"}, truncated="mask")
    # As above, with no token of the first.
    env = abs(1 - 10 / 3) + abs(9 - 10 / 3)
    form = (abs(0 - 10 / 3) + abs(9 - 10 / 3)) / 2
    assert found == pytest.approx({"form": form / (form + env), "env": env / (form + env)})


def test_estimators_that_combine_afterwards_have_their_own_parts():
    wide = [{"env": 0.0, "form": 100.0}, {"env": 1.0, "form": 0.0}, *NAMED[2:]]
    found = shares(trajectories(*wide), {"form": 3.0}, **RECIPES["gdpo"])
    assert found == pytest.approx({"form": 0.75, "env": 0.25}, rel=1e-5)
    found = shares(trajectories(*wide), {"form": 3.0}, **RECIPES["dvao"])
    assert found == pytest.approx({"form": 300 / 301, "env": 1 / 301}, rel=1e-5)


def test_rewards_that_are_equal_in_every_group_have_none_and_those_without_names_no_share():
    equal = [{"env": 0.1, "form": 100.1}] * 4
    assert shares(trajectories(*equal), {}) == {"env": 0.0, "form": 0.0}
    for advantage in ("grae", "gdpo", "dvao"):
        assert shares(trajectories({}, {}, {}, {}), {}, advantage=advantage) == {}


def test_columns_are_of_one_number_whatever_names_there_are():
    """One program; the names of an iteration change no bit of what they do not weigh."""
    algorithm = Algorithm(**RECIPES["gdpo"])
    given = trajectories(*NAMED)
    more = [with_fields(t, rewards=t.rewards | {"nobody": 0.0}) for t in given]
    credits = []
    for batch in (given, more):
        rows = SegmentBatch.of(batch, grouped=True)
        arrays = CreditArrays(algorithm, SHAPES, rows, batch, {}, {"form": 0.5})
        assert arrays.rewards_NQ.shape == (4, 4) and arrays.rewards_NQ.dtype == np.float32
        assert arrays.reward_weight_Q.tolist() == [0.5, 1.0, 1.0 if batch is more else 0.0, 0.0]
        credits.append(np.concatenate(assign_credit(arrays)[0]["advantage"]))
    np.testing.assert_array_equal(*credits)
