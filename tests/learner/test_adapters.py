"""A sweep that trains adapters only."""

import dataclasses

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np

from seeupo_jax.configuration import schema
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.lora import TARGETS, attach_adapters, merge_adapters
from seeupo_jax.policy.network import join_params, split_model, split_trainable
from seeupo_jax.types import Trajectory

LORA = LoraAdapters(rank=4, alpha=6.0, targets=TARGETS)
TRAJECTORIES = cases.ragged()


def models():
    """A model with adapters that matter, and the same one with them merged."""
    network, params = cases.policy()
    network, params = split_model(
        attach_adapters(network.bind(jax.device_put(params)), LORA, seed=7)
    )
    adapters, frozen = split_trainable(network, params)
    adapters = jax.device_put(cases.jittered(adapters, 0.1))
    model = network.bind(join_params(adapters, frozen))
    return model, merge_adapters(model)


def learner_of(model):
    """A learner of what trains in a model, and that."""
    network, params = split_model(model)
    params, frozen = split_trainable(network, params)
    algorithm = schema.Algorithm()
    made = Learner(network, cases.recording(), algorithm, cases.SHAPES, 1.0, 5, frozen=frozen)
    return made, params


def swept(model):
    """The state and the metrics after a sweep, and the parameters before."""
    learner, params = learner_of(model)
    before = cases.host(params)
    state = cases.new_state(learner.optimizer, params)
    state, metrics, *_ = sweep(learner, state, params, TRAJECTORIES, iteration=3)
    return cases.host(state), metrics, before, learner


def test_a_sweep_changes_every_adapter_and_nothing_else():
    model, _ = models()
    state, metrics, before, learner = swept(model)
    assert metrics["sweep/turns"] == 4
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, before)
    assert all(jax.tree.leaves(changed))
    assert jax.tree.structure(state.params) == jax.tree.structure(before)
    whole = split_model(model)[1]
    jax.tree.map(
        np.testing.assert_array_equal, learner.frozen, split_trainable(learner.network, whole)[1]
    )


def pairs(tree, inside=()):
    """Every adapter's two factors, and where they are."""
    for key, node in tree.items():
        if "lora_a" in node:
            yield (*inside, key), node["lora_a"], node["lora_b"]
        else:
            yield from pairs(node, (*inside, key))


def test_gradients_are_the_merged_models_by_the_chain_rule():
    """W = W0 + s·AB, so dA = s·dW·Bᵀ and dB = s·Aᵀ·dW: the first step's, from two programs."""
    model, merged = models()
    rng = np.random.default_rng(6)
    one_turn = [cases.segment(rng, (0, 4, size)) for size in (3, 4)]
    pair = [Trajectory.of((each,), float(i), 0) for i, each in enumerate(one_turn)]
    gradients, losses = [], []
    for each in (model, merged):
        learner, params = learner_of(each)
        state = cases.new_state(learner.optimizer, params)
        state, metrics, *_ = sweep(learner, state, params, pair, iteration=0)
        gradients.append(cases.host(state.opt_state[0]))
        losses.append(metrics["sweep/loss"])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-6)
    adapters = split_trainable(*split_model(model))[0]
    names = 0
    for (path, a, b), (_, da, db) in zip(pairs(adapters), pairs(gradients[0]), strict=True):
        dw = gradients[1]
        for key in path:
            dw = dw[key]
        dw = dw["kernel"]
        for got, wanted in ((da, LORA.scale * dw @ b.T), (db, LORA.scale * a.T @ dw)):
            np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max() + 1e-7)
        names += np.abs(dw).max() > 0
    assert names == len(TARGETS) * cases.ARCH.layers


def test_the_programs_are_compiled_once_for_adapters_too():
    model, _ = models()
    learner, params = learner_of(model)
    half = dataclasses.replace(learner, frozen=jax.tree.map(jnp.copy, learner.frozen))
    compiled = []
    for each in (learner, half):  # equal learners of other tests have the same programs
        before = each.turn_step.func._cache_size()
        state = cases.new_state(each.optimizer, params)
        sweep(each, state, params, TRAJECTORIES, iteration=3)
        compiled.append(each.turn_step.func._cache_size() - before)
    assert compiled[0] <= 1 and compiled[1] == 0
