"""Policies of the laboratory and their exact values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.instruments.lab.policies import (
    POLICIES,
    all_probabilities,
    entropy,
    exact_value,
    first_context,
    log_probability,
    sequence_probability,
)

TURNS, ACTIONS = 3, 2
SEQUENCES = list(itertools.product(range(ACTIONS), repeat=TURNS))
MEAN = np.random.default_rng(0).normal(size=(ACTIONS,) * TURNS)


def contexts(sequence):
    """Numbers of the contexts that a sequence passes, counted by hand for two actions."""
    first, second, _ = sequence
    return np.array([0, 1 + first, 3 + 2 * first + second])


def started(name):
    """A policy and parameters away from the uniform start."""
    policy = POLICIES[name](TURNS, ACTIONS)
    params = policy.init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    moved = [leaf + jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    return policy, jax.tree.unflatten(tree, moved)


@pytest.mark.parametrize("name", POLICIES)
def test_the_exact_value_is_the_sum_over_all_sequences(name):
    policy, params = started(name)
    chance = [
        np.exp(np.sum(log_probability(policy, params, contexts(each), np.array(each))))
        for each in SEQUENCES
    ]
    probability_CA = all_probabilities(policy, params, TURNS, ACTIONS)
    np.testing.assert_allclose(np.sum(chance), 1, rtol=1e-5)
    np.testing.assert_allclose(sequence_probability(probability_CA, TURNS), chance, rtol=1e-5)
    expected = sum(p * MEAN[each] for p, each in zip(chance, SEQUENCES, strict=True))
    value = exact_value(probability_CA, jnp.asarray(MEAN, jnp.float32))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert abs(value - MEAN.mean()) > 0.05  # not as good as uniform by accident


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_starts_uniform(name):
    policy = POLICIES[name](TURNS, ACTIONS)
    params = policy.init(jax.random.key(3))
    np.testing.assert_allclose(all_probabilities(policy, params, TURNS, ACTIONS), 0.5, rtol=1e-6)


def test_a_table_moves_its_own_context_alone_and_the_network_moves_all():
    for name, others in (("tables", False), ("shared", True)):
        policy, params = started(name)
        grads = jax.grad(lambda p: log_probability(policy, p, jnp.array(1), jnp.array(0)))(params)  # noqa: B023
        moved = jax.tree.map(lambda p, g: p + 0.1 * g, params, grads)
        before, after = (all_probabilities(policy, p, TURNS, ACTIONS) for p in (params, moved))
        changed_C = np.abs(after - before).max(axis=1) > 1e-6
        assert changed_C[1]
        assert changed_C[[0, 2, 3, 4, 5, 6]].all() if others else changed_C.sum() == 1


def test_the_network_starts_differently_for_each_key():
    policy = POLICIES["shared"](TURNS, ACTIONS)
    kernels = [policy.init(jax.random.key(seed))[0]["kernel"] for seed in (0, 1)]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.1


def test_contexts_of_a_turn_begin_after_those_of_all_turns_before():
    assert [first_context(turn, 3) for turn in range(4)] == [0, 1, 4, 13]


@pytest.mark.parametrize("name", POLICIES)
def test_the_entropy_of_a_context_is_that_of_its_probabilities(name):
    policy, params = started(name)
    probability_CA = np.asarray(all_probabilities(policy, params, TURNS, ACTIONS), np.float64)
    wanted_C = -(probability_CA * np.log(probability_CA)).sum(axis=1)
    found_C = entropy(policy, params, jnp.arange(len(wanted_C)))
    np.testing.assert_allclose(found_C, wanted_C, rtol=1e-4)
