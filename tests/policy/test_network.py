"""The network's functions: log-probabilities of chosen tokens without all logits at once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seeupo_jax.policy import network as policy
from seeupo_jax.policy.transformer import Architecture, Transformer

# No other size is 97, so a shape with 97 in it holds logits, the embedding or its gradient.
V, D, R, L, A = 97, 16, 3, 10, 8
ARCH = Architecture(V, D, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24)


@functools.cache
def make():
    network, params = policy.split(Transformer(ARCH, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    tokens_RL = rng.integers(0, V, (R, L)).astype(np.int32)
    position_RA = np.stack([rng.permutation(np.arange(1, L))[:A] for _ in range(R)])
    return network, params, tokens_RL, position_RA.astype(np.int32)


def loss_and_grads(temperature=0.7):
    """A fresh function: `LOGITS_AT_ONCE` is read when a program is traced."""
    network, params, tokens_RL, position_RA = make()

    def loss(params):
        hidden_RLD, _ = policy.hidden(network, params, tokens_RL)
        hidden_RAD = policy.pick(hidden_RLD, position_RA - 1)
        target_RA = jnp.take_along_axis(tokens_RL, position_RA, axis=1)
        logp_RA = policy.token_logp(network, params, hidden_RAD, target_RA, temperature=temperature)
        return jnp.sum(logp_RA * jnp.linspace(-1, 1, A)[None, :]), logp_RA

    return jax.jit(jax.value_and_grad(loss, has_aux=True)), params


def shapes_of_logits(jaxpr):
    """Shapes with an axis of the vocabulary's size, in a program and in all parts of it."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {v.aval.shape for v in equation.outvars if V in getattr(v.aval, "shape", ())}
        for inner in jax.core.jaxprs_in_params(equation.params):
            found |= shapes_of_logits(inner)
    return found


def test_logp_is_of_the_softmax_at_the_temperature():
    network, params, tokens_RL, position_RA = make()
    call, _ = loss_and_grads(temperature=0.7)
    (_, logp_RA), _ = call(params)
    logits_RLV = np.asarray(jax.jit(network.bind(params))(tokens_RL), np.float64) / 0.7
    log_softmax = logits_RLV - np.log(np.exp(logits_RLV).sum(-1, keepdims=True))
    for row in range(R):
        for column, position in enumerate(position_RA[row]):
            wanted = log_softmax[row, position - 1, tokens_RL[row, position]]
            assert logp_RA[row, column] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("tokens_a_chunk", [1, 5, 12])  # of 24 tokens: even and with a rest
def test_chunks_change_no_value_and_no_gradient(monkeypatch, tokens_a_chunk):
    call, params = loss_and_grads()
    (_, wanted), wanted_grads = call(params)
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", tokens_a_chunk * V + V - 1)
    call, _ = loss_and_grads()
    (_, got), grads = call(params)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, wanted_grads)


def test_a_head_larger_than_the_bound_still_works_token_by_token(monkeypatch):
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", 1)
    call, params = loss_and_grads()
    program = jax.make_jaxpr(call)(params)
    assert (1, V) in shapes_of_logits(program.jaxpr)


def test_training_never_holds_the_logits_of_all_tokens(monkeypatch):
    call, params = loss_and_grads()
    whole = shapes_of_logits(jax.make_jaxpr(call)(params).jaxpr)
    assert (R * A, V) in whole  # in one chunk they are held: the search finds them
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", 5 * V)
    call, _ = loss_and_grads()
    traced = shapes_of_logits(jax.make_jaxpr(call)(params).jaxpr)
    assert (5, V) in traced
    assert max(np.prod(shape) for shape in traced) <= V * D
    # Nor does the compiler join the chunks again.
    compiled = call.lower(params).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", compiled)}
    assert (5, V) in shapes
    assert max(np.prod(shape) for shape in shapes if V in shape) <= V * D


def test_pick_takes_each_rows_own_positions():
    x_RLD = jnp.arange(12.0).reshape(2, 3, 2)
    picked = policy.pick(x_RLD, jnp.asarray([[2, 0], [1, 1]]))
    np.testing.assert_array_equal(picked, [[[4, 5], [0, 1]], [[8, 9], [8, 9]]])


def test_networks_of_one_architecture_are_one_compiled_program():
    networks = [policy.split(Transformer(ARCH, nnx.Rngs(seed)))[0] for seed in (0, 1)]
    assert networks[0] == networks[1] and hash(networks[0]) == hash(networks[1])
    abstract, _ = policy.split(nnx.eval_shape(lambda: Transformer(ARCH, nnx.Rngs(0))))
    assert abstract == networks[0]  # a loaded policy compiles what a new one did


def test_binding_gives_back_the_parameters():
    network, params, _, _ = make()
    again_network, again = policy.split(network.bind(params))
    assert again_network == network
    jax.tree.map(np.testing.assert_array_equal, again, params)
