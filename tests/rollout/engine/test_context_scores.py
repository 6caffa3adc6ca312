"""Scores of contexts are those of whole sequences, whatever the length and the mesh."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_cases
from flax import nnx

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.context_scores import score_context

ARCH = Architecture(
    vocab_size=32,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    rope=Rope(theta=100.0),
)


def make(arch):
    network, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    return network, rollout_cases.stir(params)


def expected(network, params, tokens):
    logits_LV = np.asarray(network.bind(params)(np.array([tokens])))[0, :-1].astype(np.float64)
    logits_LV[:, network.arch.unassigned_V()] = -np.inf
    return logits_LV - np.logaddexp.reduce(logits_LV, axis=1, keepdims=True)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 200])
def test_every_token_but_the_first_has_the_networks_log_probability(length):
    network, params = make(dataclasses.replace(ARCH, unassigned=(30, 32)))
    tokens = np.random.default_rng(length).integers(0, 30, length).tolist()
    logp_LV = expected(network, params, tokens)
    scores = score_context(network, params, tokens, 3)
    np.testing.assert_allclose(scores.logp, logp_LV[range(length - 1), tokens[1:]], atol=1e-5)
    assert len(scores.top) == length - 1
    for likeliest, logp_V in zip(scores.top, logp_LV, strict=True):
        assert [token for token, _ in likeliest] == np.argsort(-logp_V)[:3].tolist()
        np.testing.assert_allclose([p for _, p in likeliest], np.sort(logp_V)[:-4:-1], atol=1e-5)


def test_eight_devices_score_as_one_does():
    network, params = make(ARCH)
    tokens = np.random.default_rng(0).integers(0, 32, 90).tolist()
    alone = score_context(network, params, tokens, 2)
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        scores = score_context(network, placed, tokens, 2)
    np.testing.assert_allclose(scores.logp, alone.logp, atol=1e-5)
    assert [[t for t, _ in each] for each in scores.top] == [
        [t for t, _ in each] for each in alone.top
    ]
