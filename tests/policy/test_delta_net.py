"""Networks with layers of gated DeltaNet: whole rows, packed rows, states, meshes, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from twin_policy import random_network

from seeupo_jax.configuration import schema
from seeupo_jax.learner.optimization.muon import matrix_axes
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.planning.activation_memory import microbatch_bytes
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture, DeltaNet, LoraAdapters
from seeupo_jax.policy.kernels.attention import NOWHERE, Tree
from seeupo_jax.policy.kernels.paged import PageTable, StateRows
from seeupo_jax.policy.lora import attach_adapters, merge_adapters
from seeupo_jax.rollout.engine import sampler
from seeupo_jax.rollout.engine.sampler_layout import SamplerLayout

ARCH = Architecture(
    vocab_size=23,
    width=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp_width=20,
    norm_eps=1e-3,  # rounding of what a state gives near 0 stays small
    norm_offset=1.0,
    attention_gate=True,
    delta=DeltaNet((0, 2), key_heads=2, value_heads=4, key_dim=6, value_dim=5, conv=4),
    family="qwen3_5_text",
)
GROUPED = dataclasses.replace(ARCH, delta=dataclasses.replace(ARCH.delta, grouped=True))
ROWS, LENGTH, PAGE = 3, 14, 4
TOKENS_NL = np.random.default_rng(1).integers(0, 23, (ROWS, LENGTH)).astype(np.int32)
network_of = functools.cache(random_network)


@functools.partial(jax.jit, static_argnums=0)
def full_pass(network, params, tokens_NL, **rows):
    return policy.hidden(network, params, tokens_NL, **rows)[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", [ARCH, GROUPED], ids=["plain", "grouped"])
def test_a_row_of_several_sequences_gives_what_each_gives_alone(arch):
    network, params = network_of(arch)
    segment_NL = np.array([[0] * 5 + [1] * 9, [3] * 14, [0] * 1 + [1] * 2 + [2] * 11], np.int32)
    packed = full_pass(network, params, TOKENS_NL, segment_NL=segment_NL)
    for row in range(ROWS):
        for number in set(segment_NL[row]):
            own = segment_NL[row] == number
            alone_1L = np.zeros((1, LENGTH), np.int32)
            alone_1L[0, : own.sum()] = TOKENS_NL[row, own]
            alone = full_pass(network, params, alone_1L)[0, : own.sum()]
            np.testing.assert_allclose(packed[row, own], alone, atol=2e-5)


def test_what_stands_to_the_right_never_reaches_a_row():
    network, params = network_of(ARCH)
    other_NL = TOKENS_NL.copy()
    other_NL[:, 6:] = (other_NL[:, 6:] + 1) % 23
    one, two = (full_pass(network, params, tokens) for tokens in (TOKENS_NL, other_NL))
    np.testing.assert_array_equal(one[:, :6], two[:, :6])
    assert not np.array_equal(one[:, 6:], two[:, 6:])


@functools.partial(jax.jit, static_argnums=0)
def extend(network, params, tokens_RL, position_RL, cache, page_table):
    return network.bind(params).extend(tokens_RL, position_RL, cache, page_table)[:2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunk", [5, 2, 1])
def test_states_filled_in_chunks_give_the_full_pass(chunk):
    network, params = network_of(ARCH)
    wanted = full_pass(network, params, TOKENS_NL)
    cache, _ = sampler.allocate(ARCH, ROWS * PAGE, PAGE, ROWS, 5)
    table = np.arange(ROWS * PAGE, dtype=np.int32).reshape(ROWS, PAGE)
    state_R = np.array([4, 0, 2], np.int32)
    page_table = PageTable(table, np.zeros(ROWS, np.int32), states=StateRows(state_R, state_R))
    length_N = np.array([LENGTH, 9, 4])  # a row that has ended changes nothing more
    for _ in range(2):  # a conversation begins from nothing also where another one was before
        for start in range(0, LENGTH, chunk):
            where = start + np.arange(chunk)
            position = np.where(where < length_N[:, None], where, NOWHERE).astype(np.int32)
            tokens = TOKENS_NL[:, np.minimum(where, LENGTH - 1)]
            out, cache = extend(network, params, tokens, position, cache, page_table)
            for row, end in enumerate(length_N):
                real = where[where < end]
                got, same = out[row, : len(real)], wanted[row, real]
                np.testing.assert_allclose(got, same, atol=2e-5)
    for layer in ARCH.delta.layers:
        for states in cache[layer]:
            untouched = np.delete(states, state_R, axis=0)
            assert untouched.shape[0] == 2 and not untouched.any()


def test_rows_continue_one_state_and_leave_it_as_it_is():
    network, params = network_of(ARCH)
    tokens = np.concatenate([TOKENS_NL[:1, :5].repeat(ROWS, axis=0), TOKENS_NL[:, 5:10]], axis=1)
    cache, _ = sampler.allocate(ARCH, ROWS * PAGE, PAGE, ROWS, ROWS + 1)
    table = np.arange(ROWS * PAGE, dtype=np.int32).reshape(ROWS, PAGE)
    start, position = np.zeros(ROWS, np.int32), np.tile(np.arange(10, dtype=np.int32), (ROWS, 1))
    # The first five tokens of all rows, whose states but the first one's are dropped.
    none = ROWS + 1
    states = StateRows(np.full(ROWS, none, np.int32), np.array([1, none, none], np.int32))
    page_table = PageTable(table, start, states=states)
    _, cache = extend(network, params, tokens[:, :5], position[:, :5], cache, page_table)
    states = StateRows(np.full(ROWS, 1, np.int32), np.array([0, 2, 3], np.int32))
    page_table = PageTable(table, start, states=states)
    out, after = extend(network, params, tokens[:, 5:], position[:, 5:], cache, page_table)
    np.testing.assert_allclose(out, full_pass(network, params, tokens)[:, 5:], atol=2e-5)
    for layer in ARCH.delta.layers:
        for old, new in zip(cache[layer], after[layer], strict=True):
            np.testing.assert_array_equal(old[1], new[1])


def test_a_row_without_tokens_writes_no_state():
    network, params = network_of(ARCH)
    cache, _ = sampler.allocate(ARCH, ROWS * PAGE, PAGE, ROWS, ROWS)
    table = np.arange(ROWS * PAGE, dtype=np.int32).reshape(ROWS, PAGE)
    state_R = np.arange(ROWS, dtype=np.int32)
    page_table = PageTable(table, np.zeros(ROWS, np.int32), states=StateRows(state_R, state_R))
    position = np.broadcast_to(np.arange(5, dtype=np.int32), (ROWS, 5))
    _, before = extend(network, params, TOKENS_NL[:, :5], position, cache, page_table)
    nowhere = np.full((ROWS, 5), NOWHERE, np.int32)
    _, after = extend(network, params, TOKENS_NL[:, 5:10], nowhere, before, page_table)
    jax.tree.map(np.testing.assert_array_equal, before, after)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(network, params, tokens_NL):
    def loss(params):
        hidden, _ = policy.hidden(network, params, tokens_NL[:, :-1])
        return policy.token_logp(network, params, hidden, tokens_NL[:, 1:], temperature=1.0).sum()

    return jax.value_and_grad(loss)(params)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [ARCH, GROUPED], ids=["plain", "grouped"])
def test_a_mesh_gives_what_one_device_gives(arch):
    network, params = network_of(dataclasses.replace(arch, vocab_size=24))
    tokens_NL = np.random.default_rng(2).integers(0, 24, (4, 9)).astype(np.int32)
    wanted = loss_and_gradient(network, params, tokens_NL)
    mesh = make_mesh(schema.Mesh(data=2, context=2, tensor=2))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
        got = jax.device_get(loss_and_gradient(network, placed, jnp.asarray(tokens_NL)))
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4 * np.abs(other).max() + 1e-6)


def test_the_samplers_copy_keeps_what_decays_depend_on_in_float32():
    network, shapes = policy.abstract_network(dataclasses.replace(ARCH, dtype="bfloat16"))
    copy = SamplerLayout(network, None).shapes(shapes)["layers"][0]["delta"]
    kept = {name: x.dtype for name, x in copy.items() if not isinstance(x, dict)}
    assert kept == dict.fromkeys(("a_log", "conv1d", "dt_bias", "norm_scale"), jnp.float32)
    assert copy["qkv"]["kernel"].dtype == jnp.bfloat16


def test_muon_takes_projections_for_matrices_and_no_convolution():
    axes = matrix_axes(policy.abstract_network(ARCH)[1])["layers"][0]["delta"]
    assert axes["conv1d"] is None and axes["a_log"] is None
    assert axes["qkv"]["kernel"] is not None


def test_adapters_are_those_of_attention_layers_and_of_feed_forwards():
    network, params = network_of(ARCH)
    lora = LoraAdapters(2, 4.0, ("q_proj", "o_proj", "down_proj"))
    model = attach_adapters(network.bind(params), lora, seed=0)
    paths, _ = zip(*jax.tree.leaves_with_path(policy.split_model(model)[1]), strict=True)
    adapted = {"/".join(str(k.key) for k in path[1:-1]) for path in paths if "lora" in path[-1].key}
    assert adapted == {"1/q", "1/out", "0/mlp/down", "1/mlp/down", "2/mlp/down"}
    factors = jax.tree.map(lambda x: x + 0.1, policy.split_model(model)[1])
    moved = policy.split_model(model)[0].bind(factors)
    np.testing.assert_allclose(merge_adapters(moved)(TOKENS_NL), moved(TOKENS_NL), atol=1e-4)


def test_activations_of_a_layer_are_those_of_its_kind_wherever_it_stands():
    def needed(*layers):
        delta = dataclasses.replace(ARCH.delta, layers=layers)
        arch = dataclasses.replace(ARCH, delta=delta)
        return microbatch_bytes(arch, "none", rows=2, length=64, platform="cpu")

    assert needed(0) == needed(2) != needed(0, 1) == needed(1, 2)


def test_token_trees_are_refused():
    network, params = network_of(ARCH)
    depth_NL = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    with pytest.raises(ValueError, match=r"got token trees; allowed .*: whole rows"):
        full_pass(network, params, TOKENS_NL, tree=Tree(depth_NL, np.full((ROWS, LENGTH), LENGTH)))


def test_layers_of_both_kinds_cannot_be_stacked():
    with pytest.raises(ValueError, match=r"scan_layers: got True .* attention; allowed: False"):
        dataclasses.replace(ARCH, scan_layers=True)
