"""The network's functions: log-probabilities of target tokens without all logits at once."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from twin_policy import random_network

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer

# No other size is 97, so a shape with 97 in it holds logits, the embedding or its gradient.
V, D, R, L, A = 97, 16, 3, 10, 8
ARCH = Architecture(V, D, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24)


@functools.cache
def make():
    network, params = random_network(ARCH)
    rng = np.random.default_rng(0)
    tokens_RL = rng.integers(0, V, (R, L)).astype(np.int32)
    position_RA = np.stack([rng.permutation(np.arange(1, L))[:A] for _ in range(R)])
    return network, params, tokens_RL, position_RA.astype(np.int32)


@functools.cache
def program(at_once=policy.LOGITS_AT_ONCE, temperature=0.7):
    """The loss and its gradient, lowered and compiled with a bound on the logits held."""
    network, params, tokens_RL, position_RA = make()

    def loss(params):
        hidden_RLD, _ = policy.hidden(network, params, tokens_RL)
        hidden_RAD = policy.gather_positions(hidden_RLD, position_RA - 1)
        target_RA = jnp.take_along_axis(tokens_RL, position_RA, axis=1)
        logp_RA = policy.token_logp(network, params, hidden_RAD, target_RA, temperature=temperature)
        return jnp.sum(logp_RA * jnp.linspace(-1, 1, A)[None, :]), logp_RA

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "LOGITS_AT_ONCE", at_once)
        traced = jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(params)
    return traced, traced.lower().compile()


def logit_shapes(text):
    """Shapes with an axis of the vocabulary's size that a program's text names."""
    shapes = (tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[(\d[\d,]*)\]", text))
    return {shape for shape in shapes if V in shape}


def test_logp_is_of_the_softmax_at_the_temperature():
    network, params, tokens_RL, position_RA = make()
    _, call = program()
    (_, logp_RA), _ = call(params)
    logits_RLV = np.asarray(jax.jit(network.bind(params))(tokens_RL), np.float64) / 0.7
    log_softmax = logits_RLV - np.log(np.exp(logits_RLV).sum(-1, keepdims=True))
    for row in range(R):
        for column, position in enumerate(position_RA[row]):
            wanted = log_softmax[row, position - 1, tokens_RL[row, position]]
            assert logp_RA[row, column] == pytest.approx(wanted, abs=1e-5)


# One token at a time where the head alone is beyond the bound; 5 of 24, so the last chunk has 4.
@pytest.mark.parametrize("at_once", [1, 6 * V - 1])
def test_chunks_change_no_value_and_no_gradient(at_once):
    _, params, _, _ = make()
    (_, wanted), wanted_grads = program()[1](params)
    (_, got), grads = program(at_once)[1](params)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, wanted_grads)


@pytest.mark.parametrize("at_once, tokens", [(1, 1), (6 * V - 1, 5)])
@pytest.mark.usefixtures("optimized")
def test_training_never_holds_the_logits_of_all_tokens(at_once, tokens):
    whole, _ = program()
    assert (R * A, V) in logit_shapes(str(whole.jaxpr))  # one chunk: the search finds them
    traced, compiled = program(at_once)
    for text in (str(traced.jaxpr), compiled.as_text()):
        assert (tokens, V) in logit_shapes(text)
        assert max(np.prod(shape) for shape in logit_shapes(text)) == V * D


@pytest.mark.parametrize("trained", [(0, 1), (0,)], ids=["head trains", "head is frozen"])
def test_chunks_without_a_prediction_have_no_part_in_the_gradient(trained, monkeypatch):
    """Of 24 tokens in chunks of 5 the middle ones predict nothing; by the plain log-softmax."""
    monkeypatch.setattr(policy, "TOKENS_AT_ONCE", 5)
    network, params, tokens_RL, _ = make()
    rng = np.random.default_rng(1)
    hidden_RAD = rng.normal(size=(R, A, D)).astype(np.float32)
    target_RA = tokens_RL[:, :A].copy()
    target_RA.reshape(-1)[7:18] = policy.NO_TARGET
    real_RA = target_RA != policy.NO_TARGET
    weight_RA = np.where(real_RA, rng.normal(size=(R, A)), 0).astype(np.float32)

    def ours(hidden_RAD, table_VD):
        own = params | {"embedding": table_VD}
        logp_RA = policy.token_logp(network, own, hidden_RAD, target_RA, temperature=0.7)
        return jnp.sum(weight_RA * logp_RA)

    def plain(hidden_RAD, table_VD):
        logp_RAV = jax.nn.log_softmax(hidden_RAD @ table_VD.T / 0.7)
        target_logit = jnp.take_along_axis(
            logp_RAV, np.where(real_RA, target_RA, 0)[..., None], axis=2
        )
        return jnp.sum(weight_RA * target_logit[..., 0])

    given = hidden_RAD, params["embedding"]
    got, wanted = (jax.jit(jax.value_and_grad(f, trained))(*given) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)


def test_pick_takes_each_rows_own_positions():
    x_RLD = jnp.arange(12.0).reshape(2, 3, 2)
    picked = policy.gather_positions(x_RLD, jnp.asarray([[2, 0], [1, 1]]))
    np.testing.assert_array_equal(picked, [[[4, 5], [0, 1]], [[8, 9], [8, 9]]])


def logp_and_grads(network, params, tokens_RL, position_RA):
    """On whatever mesh is in force."""

    def loss(params, tokens_RL, position_RA):
        hidden_RLD, _ = policy.hidden(network, params, tokens_RL)
        hidden_RAD = policy.gather_positions(hidden_RLD, position_RA - 1)
        target_RA = jnp.take_along_axis(tokens_RL, position_RA, axis=1)
        logp_RA = policy.token_logp(network, params, hidden_RAD, target_RA, temperature=0.7)
        return jnp.sum(logp_RA * jnp.linspace(-1, 1, position_RA.shape[1])[None, :]), logp_RA

    jitted = jax.jit(jax.value_and_grad(loss, has_aux=True))
    compiled = jitted.lower(params, tokens_RL, position_RA).compile()
    return compiled(params, tokens_RL, position_RA), compiled.as_text()


@pytest.mark.usefixtures("optimized")
def test_a_device_holds_the_logits_of_its_own_tokens_and_words_only(monkeypatch):
    words, local = 58, 29  # no other size is either
    arch = dataclasses.replace(ARCH, vocab_size=words, kv_heads=2, tied=False)
    network, params = random_network(arch)
    rng = np.random.default_rng(0)
    tokens_RL = rng.integers(0, words, (4, 12)).astype(np.int32)
    position_RA = np.sort(rng.integers(1, 12, (4, 7)), axis=1).astype(np.int32)
    wanted, _ = logp_and_grads(network, params, tokens_RL, position_RA)
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", 3 * local)
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, context=2, tensor=2))
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        rows = jax.device_put((tokens_RL, position_RA), sharding(mesh, ("rows",)))
        got, text = logp_and_grads(network, placed, *rows)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[(\d[\d,]*)\]", text)}
    assert (3, local) in shapes
    assert not [shape for shape in shapes if words in shape]
    held = {int(np.prod(shape)) // local for shape in shapes if local in shape}
    assert max(held - {D, D // 2}) <= 3 * 2  # nothing but head and embedding is larger


@pytest.mark.parametrize("positions", [4, 5])
@pytest.mark.usefixtures("optimized")
def test_pick_takes_from_rows_that_are_cut_over_devices_without_gathering_them(positions):
    mesh = make_mesh(schema.Mesh(data=2, context=4))
    rng = np.random.default_rng(0)
    x_RLD = rng.normal(size=(2, 12, 3)).astype(np.float32)
    position_RA = rng.integers(0, 12, (2, positions)).astype(np.int32)
    with jax.set_mesh(mesh):
        x = jax.device_put(x_RLD, sharding(mesh, ("rows", "length", None)))
        compiled = jax.jit(policy.gather_positions).lower(x, position_RA).compile()
        picked = compiled(x, position_RA)
        grad = jax.jit(jax.grad(lambda x: (policy.gather_positions(x, position_RA) ** 2).sum()))(x)
    wanted = np.take_along_axis(x_RLD, position_RA[:, :, None], axis=1)
    np.testing.assert_array_equal(picked, wanted)
    wanted_grad = np.zeros_like(x_RLD)
    for row in range(2):
        np.add.at(wanted_grad[row], position_RA[row], 2 * wanted[row])
    np.testing.assert_allclose(grad, wanted_grad, rtol=1e-6)
    assert "f32[1,12,3]" not in compiled.as_text()


HOLES = (5, 9, 20, 21, 50, 58)  # ids 5 to 8, 20, and from 50 on


def over_assigned(network, params, tokens_RL, position_RA, unassigned_V):
    """In float64 NumPy: log-probabilities and entropies of softmaxes without those ids."""
    logits_RLV = np.asarray(network.bind(params)(tokens_RL), np.float64) / 0.7
    logits_RLV = logits_RLV[:, :, ~unassigned_V]
    logp_RLX = logits_RLV - np.logaddexp.reduce(logits_RLV, axis=-1, keepdims=True)
    place_V = np.cumsum(~unassigned_V) - 1
    row_R1 = np.arange(len(tokens_RL))[:, None]
    target_RA = tokens_RL[row_R1, position_RA]
    entropy_RL = -(np.exp(logp_RLX) * logp_RLX).sum(-1)
    logp_RA = logp_RLX[row_R1, position_RA - 1, place_V[target_RA]]
    return logp_RA, entropy_RL[row_R1, position_RA - 1]


@pytest.mark.parametrize("cut", [False, True], ids=["one device", "a cut vocabulary"])
def test_ids_without_a_token_have_no_probability_and_no_gradient(monkeypatch, cut):
    """Of a head whose unassigned rows would be the likeliest; by the twin, and by finite zeros."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", 6 * 29)
    arch = dataclasses.replace(ARCH, vocab_size=58, kv_heads=2, tied=False, unassigned=HOLES)
    network, params = random_network(arch)
    unassigned_V = np.zeros(58, bool)
    unassigned_V[[*range(5, 9), 20, *range(50, 58)]] = True
    params = params | {"head": np.where(unassigned_V[:, None], 300.0, 1.0) * params["head"]}
    rng = np.random.default_rng(0)
    assigned = np.flatnonzero(~unassigned_V)
    tokens_RL = rng.choice(assigned, (4, 12)).astype(np.int32)
    tokens_RL[:, 3] = 55  # as context such an id may stand
    position_RA = np.sort(rng.choice([1, 2, *range(4, 12)], (4, 7)), axis=1).astype(np.int32)
    wanted = over_assigned(network, params, tokens_RL, position_RA, unassigned_V)
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, context=2, tensor=2)) if cut else None
    given = tokens_RL, position_RA
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        if cut:
            params = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
            given = jax.device_put(given, sharding(mesh, ("rows",)))
        alone_RA, logp_RA, entropy_RA = both(network, params, *given)
        (_, again_RA), grads = logp_and_grads(network, params, *given)[0]
        slope = jax.jit(jax.grad(total_entropy, argnums=1), static_argnums=0)
        slope = slope(network, params, *given)
    for got_RA in (alone_RA, logp_RA, again_RA):
        np.testing.assert_allclose(got_RA, wanted[0], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(entropy_RA, wanted[1], rtol=1e-5, atol=2e-5)
    for gradient in (grads["head"], slope["head"]):
        moved_V = np.abs(np.asarray(gradient)).max(axis=1) > 0
        np.testing.assert_array_equal(moved_V, ~unassigned_V)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, slope)))
    assert np.abs(wanted[0] - over_all(network, params, tokens_RL, position_RA)).max() > 100


def over_all(network, params, tokens_RL, position_RA):
    return over_assigned(network, params, tokens_RL, position_RA, np.zeros(58, bool))[0]


def test_the_gradient_is_that_of_a_head_without_the_unassigned_rows():
    arch = dataclasses.replace(ARCH, tied=False, unassigned=(90, V))
    network, params = random_network(arch)
    smaller, _ = policy.abstract_network(dataclasses.replace(arch, vocab_size=90, unassigned=()))
    trimmed = params | {name: params[name][:90] for name in ("embedding", "head")}
    _, _, tokens_RL, position_RA = make()
    tokens_RL = tokens_RL % 90
    got, _ = logp_and_grads(network, params, tokens_RL, position_RA)
    wanted, _ = logp_and_grads(smaller, trimmed, tokens_RL, position_RA)
    for name in ("embedding", "head"):
        got[1][name] = got[1][name][:90]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)


def test_logits_are_of_all_ids_whichever_have_a_token():
    network, params, tokens_RL, _ = make()
    masked, _ = policy.abstract_network(dataclasses.replace(ARCH, unassigned=(90, V)))
    logits = [jax.jit(each.bind(params))(tokens_RL) for each in (network, masked)]
    np.testing.assert_array_equal(*logits)


def test_networks_of_one_architecture_are_one_compiled_program():
    networks = [policy.split_model(Transformer(ARCH, nnx.Rngs(seed)))[0] for seed in (0, 1)]
    assert networks[0] == networks[1] and hash(networks[0]) == hash(networks[1])
    abstract, _ = policy.split_model(nnx.eval_shape(lambda: Transformer(ARCH, nnx.Rngs(0))))
    assert abstract == networks[0]  # a loaded policy compiles what a new one did


def test_binding_gives_back_the_parameters():
    network, params, _, _ = make()
    again_network, again = policy.split_model(network.bind(params))
    assert again_network == network
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_chunks_of_tokens_are_of_like_size():
    # 24 tokens, 13 at once: two chunks of 12 rather than 13 and 11, filled up to 13.
    traced, _ = program(at_once=13 * V)
    assert {shape for shape in logit_shapes(str(traced.jaxpr)) if shape[0] not in (1, V)} == {
        (12, V)
    }


def both(network, params, tokens_RL, position_RA):
    """Log-probabilities by either function, and entropies."""

    def find(params, tokens_RL, position_RA):
        hidden_RLD, _ = policy.hidden(network, params, tokens_RL)
        hidden_RAD = policy.gather_positions(hidden_RLD, position_RA - 1)
        target_RA = jnp.take_along_axis(tokens_RL, position_RA, axis=1)
        given = network, params, hidden_RAD, target_RA
        alone_RA = policy.token_logp(*given, temperature=0.7)
        return alone_RA, *policy.token_logp_and_entropy(*given, temperature=0.7)

    return jax.jit(find)(params, tokens_RL, position_RA)


@pytest.mark.parametrize("at_once", [policy.LOGITS_AT_ONCE, 6 * V - 1])
def test_entropy_is_of_the_softmax_at_the_temperature(monkeypatch, at_once):
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", at_once)
    network, params, tokens_RL, position_RA = make()
    alone_RA, logp_RA, entropy_RA = both(network, params, tokens_RL, position_RA)
    np.testing.assert_array_equal(alone_RA, logp_RA)
    logits_RLV = np.asarray(jax.jit(network.bind(params))(tokens_RL), np.float64) / 0.7
    share_RLV = np.exp(logits_RLV) / np.exp(logits_RLV).sum(-1, keepdims=True)
    entropy_RL = -(share_RLV * np.log(share_RLV)).sum(-1)
    wanted = np.take_along_axis(entropy_RL, position_RA - 1, axis=1)
    np.testing.assert_allclose(entropy_RA, wanted, rtol=1e-5)
    assert np.ptp(wanted) > 1e-3


def test_entropy_is_the_same_on_a_mesh_that_cuts_the_vocabulary():
    arch = dataclasses.replace(ARCH, vocab_size=58, kv_heads=2, tied=False)
    network, params = random_network(arch)
    rng = np.random.default_rng(0)
    tokens_RL = rng.integers(0, 58, (4, 12)).astype(np.int32)
    position_RA = np.sort(rng.integers(1, 12, (4, 7)), axis=1).astype(np.int32)
    wanted = both(network, params, tokens_RL, position_RA)
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, context=2, tensor=2))
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        rows = jax.device_put((tokens_RL, position_RA), sharding(mesh, ("rows",)))
        got = both(network, placed, *rows)
        slope = jax.jit(jax.grad(total_entropy, argnums=1), static_argnums=0)
        slope = slope(network, placed, *rows)
    for mine, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=2e-5)
    expected = jax.grad(entropy_of_all_logits, argnums=1)(network, params, tokens_RL, position_RA)
    for mine, other in zip(jax.tree.leaves(slope), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 0.1


def total_entropy(network, params, tokens_RL, position_RA):
    return both(network, params, tokens_RL, position_RA)[2].sum()


def entropy_of_all_logits(network, params, tokens_RL, position_RA):
    """The same from logits that are held at once, by JAX's own derivative."""
    logp_RLV = jax.nn.log_softmax(network.bind(params)(tokens_RL) / 0.7)
    entropy_RL = -(jnp.exp(logp_RLV) * logp_RLV).sum(-1)
    return jnp.take_along_axis(entropy_RL, position_RA - 1, axis=1).sum()


def test_entropy_changes_no_bit_of_the_log_probabilities():
    rng = np.random.default_rng(0)
    arch = dataclasses.replace(ARCH, vocab_size=512, width=64)
    network, params = random_network(arch)
    hidden_RAD = rng.normal(size=(2, 600, 64)).astype(np.float32)
    target_RA = rng.integers(0, 512, (2, 600)).astype(np.int32)
    alone_RA, (logp_RA, _) = (
        jax.jit(lambda *given, find=find: find(network, *given, temperature=0.9))(
            params, hidden_RAD, target_RA
        )
        for find in (policy.token_logp, policy.token_logp_and_entropy)
    )
    np.testing.assert_array_equal(alone_RA, logp_RA)


def test_no_gradient_is_summed_over_tokens_in_bfloat16():
    """XLA sums so on a GPU and a TPU; on CPU it does not show in the numbers."""
    biased = {"qkv_bias": True, "out_bias": True, "qk_norm": False}
    network, params = random_network(dataclasses.replace(ARCH, dtype="bfloat16", **biased))
    tokens_RL = make()[2]

    def loss(params):
        hidden_RLD, _ = policy.hidden(network, params, tokens_RL)
        return jnp.sum(
            policy.token_logp(network, params, hidden_RLD, jnp.asarray(tokens_RL), temperature=1.0)
        )

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert re.search(r"f32\[\d+,\d+\] = scatter-add", text)  # where it would be seen
    assert not re.findall(r"bf16\[[\d,]*\] = (?:scatter-add|reduce_sum|cumsum)", text)
