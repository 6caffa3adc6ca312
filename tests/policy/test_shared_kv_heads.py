"""More devices along `tensor` than key-value heads: each has its query heads and a copy of one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from twin_policy import random_network

from seeupo_jax.configuration import schema
from seeupo_jax.parallel import mesh as mesh_module
from seeupo_jax.parallel.mesh import constrain, head_axes, kv_copies, make_mesh, param_shardings
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture, LoraAdapters
from seeupo_jax.policy.kernels.attention import Tree

ARCH = Architecture(
    vocab_size=32,
    width=16,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    tied=False,
    qkv_bias=True,
)


@functools.partial(jax.jit, static_argnums=0)
def logp_and_gradients(network, params, tokens_NL, tree):
    """Log-probabilities, and the gradients of their mean; of rows of trees, if there are some."""

    def loss(params):
        hidden_NLD, keys = network.bind(params).hidden(tokens_NL, tree=tree)
        target_NL = jnp.roll(tokens_NL, -1, axis=1)
        logp_NL = policy.token_logp(network, params, hidden_NLD, target_NL, temperature=0.8)
        return logp_NL.mean(), (constrain(logp_NL, "rows", None), keys)

    grads, (logp_NL, keys) = jax.grad(loss, has_aux=True)(params)
    return logp_NL, grads, keys


def trees_of(rows):
    """A path of 12 tokens that two of 8 and 4 continue, and another tree of 8."""
    depth_L = np.r_[:20, 12:16, :8].astype(np.int32)
    end_L = np.r_[[24] * 12, [20] * 8, [24] * 4, [32] * 8].astype(np.int32)
    return Tree(*(np.tile(x_L, (rows, 1)) for x_L in (depth_L, end_L)))


def placed_on(mesh, network, params):
    return jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sizes, length, changes",
    [
        ({"data": 2, "tensor": 4}, 32, {}),
        ({"fsdp": 2, "tensor": 4}, None, {"scan_layers": True, "remat": "full", "qk_norm": False}),
        ({"data": 1, "tensor": 8}, None, {"attention": "all_pairs"}),
        ({"context": 2, "tensor": 4}, None, {"windows": (9, None)}),
        ({"data": 2, "tensor": 4}, 128, {"attention": "splash"}),
        ({"data": 1, "tensor": 8}, 32, {"lora": LoraAdapters(3, 6.0, ("k_proj", "v_proj"))}),
        ({"data": 2, "tensor": 4}, None, {"kv_heads": 1, "attention": "splash", "layers": 1}),
    ],
    ids=str,
)
def test_devices_that_share_a_key_value_head_compute_what_one_does(capfd, sizes, length, changes):
    """Of rows of a length, or of token trees."""
    arch = dataclasses.replace(ARCH, **changes)
    network, params = random_network(arch)
    tree = trees_of(2) if length is None else None
    tokens_NL = np.random.default_rng(0).integers(0, 32, (2, length or 32)).astype(np.int32)
    wanted = logp_and_gradients(network, params, tokens_NL, tree)
    mesh = make_mesh(schema.Mesh(**{"data": 1, "fsdp": 1, **sizes}))
    capfd.readouterr()
    with jax.set_mesh(mesh):
        got = logp_and_gradients(network, placed_on(mesh, network, params), tokens_NL, tree)
    assert "rematerialization" not in capfd.readouterr().err
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got[:2], wanted[:2])
    for copied, one in zip(jax.tree.leaves(got[2]), jax.tree.leaves(wanted[2]), strict=True):
        assert copied.sharding.shard_shape(copied.shape)[2] == 1  # head per device
        np.testing.assert_allclose(
            copied, jnp.repeat(one, sizes["tensor"] // arch.kv_heads, axis=2), atol=1e-5
        )


def test_a_device_computes_its_own_query_heads_only():
    """As many FLOPs and bytes as if there were a key-value head for every device."""
    tokens_NL = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def cost(kv_heads, tensor):
        network, params = policy.abstract_network(dataclasses.replace(ARCH, kv_heads=kv_heads))
        mesh = make_mesh(schema.Mesh(data=1, tensor=tensor), jax.devices()[:tensor])
        with jax.set_mesh(mesh):
            program = logp_and_gradients.lower(network, params, tokens_NL, None).compile()
        return program.cost_analysis()["flops"], program.memory_analysis().temp_size_in_bytes

    (flops, memory), of_own, of_two = cost(2, 8), cost(8, 8), cost(2, 2)
    assert flops == pytest.approx(of_own[0], rel=0.02)
    assert memory == pytest.approx(of_own[1], rel=0.1)
    assert flops < 0.4 * of_two[0] and memory < 0.4 * of_two[1]


@pytest.mark.parametrize(
    "heads, kv_heads, tensor, copies",
    [(8, 2, 4, 2), (8, 2, 8, 4), (8, 1, 4, 4), (8, 2, 2, 1), (8, 4, 2, 1), (8, 8, 8, 1)]
    + [(14, 2, 4, 1), (12, 3, 4, 1), (12, 6, 4, 1)],  # what does not divide
)
def test_a_head_has_a_copy_on_every_device_whose_queries_read_it(heads, kv_heads, tensor, copies):
    assert kv_copies(heads, kv_heads, tensor) == copies


def test_heads_that_do_not_divide_are_computed_by_every_device_and_a_warning_says_so_once(caplog):
    arch = dataclasses.replace(ARCH, heads=6, layers=1)
    network, params = random_network(arch)
    tokens_NL = np.random.default_rng(0).integers(0, 32, (2, 16)).astype(np.int32)
    wanted = logp_and_gradients(network, params, tokens_NL, None)
    mesh_module._warn_of_whole_heads.cache_clear()
    mesh = make_mesh(schema.Mesh(data=2, tensor=4))
    with jax.set_mesh(mesh):
        got = logp_and_gradients(network, placed_on(mesh, network, params), tokens_NL, None)
        assert head_axes(2) == (None, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted)
    assert [record.getMessage() for record in caplog.records] == [
        "Each of the 4 devices along mesh axis tensor computes the attention of all heads: the"
        " heads, 2 of them for keys and values, do not divide evenly."
    ]
