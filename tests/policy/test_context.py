"""Rows cut over the mesh axis `context` give what whole rows on one device give."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_cases
from twin_policy import random_network

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import constrain, make_mesh, param_shardings, sharding
from seeupo_jax.policy import network as policy
from seeupo_jax.policy import zigzag
from seeupo_jax.policy.architecture import Architecture, Moe
from seeupo_jax.policy.kernels.attention import KeyValues, Past, Tree, attend
from seeupo_jax.policy.kernels.fused import select_kernel

ARCH = Architecture(
    vocab_size=32,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    tied=False,
    remat="full",
)

# What families beside Qwen's have.
BENT = {
    "input_norms": False,
    "output_norms": True,
    "joint_qk_norm": True,
    "attention_cap": 2.0,
    "sinks": True,
    "embedding_scale": 2.0,
    "residual_scale": 0.5,
    "logit_cap": 5.0,
    "windows": (5, None),
}


def mesh_of(**sizes):
    return make_mesh(schema.Mesh(**{"data": 1, **sizes}))


def random_pass(N, L, H, kv_heads, d):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(N, L, heads, d)).astype(np.float32) for heads in (H, kv_heads))
    v, pull = (rng.uniform(-1, 1, size=x.shape).astype(np.float32) for x in (k, q))
    return (q, k, v), pull


def output_and_gradients(qkv, pull, *, kernel="xla", window=None, packed=False):
    """Of attention over whole rows; where packed, two sequences a row, cut between devices."""
    N, L = pull.shape[:2]
    index_NL = np.broadcast_to(np.arange(L, dtype=np.int32), (N, L))
    start_N = np.arange(N, dtype=np.int32) * 3 + L // 2 + 5
    segment_NL = (index_NL >= start_N[:, None]).astype(np.int32) if packed else None
    position_NL = index_NL - segment_NL * start_N[:, None] if packed else index_NL

    def loss(q, k, v):
        out = attend(
            q,
            KeyValues(k, v),
            position_NL,
            position_NL,
            window=window,
            segment_NL=segment_NL,
            key_segment_NC=segment_NL,
            kernel=kernel,
        )
        return jnp.sum(out * pull), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*qkv)
    return out, *grads


@pytest.mark.parametrize(
    "kernel, L, sizes, case",
    [
        ("xla", 16, {"fsdp": 2, "context": 2, "tensor": 2}, {"packed": True, "window": 5}),
        ("xla", 13, {"fsdp": 2, "context": 4}, {"packed": True}),
        ("splash", 256, {"fsdp": 2, "context": 2, "tensor": 2}, {"packed": True, "window": 70}),
        ("splash", 512, {"context": 4, "tensor": 2}, {}),
    ],
)
def test_queries_on_several_devices_see_the_keys_of_all(kernel, L, sizes, case):
    qkv, pull = random_pass(2, L, 4, 2, 8)
    wanted = output_and_gradients(qkv, pull, **case)
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        got = output_and_gradients(qkv, pull, kernel=kernel, **case)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    if L % sizes["context"] == 0:
        cut = sharding(mesh, ("rows", "length", "heads", "head_dim"))
        assert got[0].sharding.is_equivalent_to(cut, 4)


@functools.partial(jax.jit, static_argnums=0)
def logp_and_gradients(network, params, tokens_NL, segment_NL):
    """Log-probabilities of whole rows, and the gradient of their mean."""

    def loss(params):
        hidden_NLD, keys = network.bind(params).hidden(tokens_NL, segment_NL=segment_NL)
        hidden_NAD, target_NA = hidden_NLD[:, :-1], tokens_NL[:, 1:]
        logp_NA = policy.token_logp(network, params, hidden_NAD, target_NA, temperature=0.8)
        return logp_NA.mean(), (constrain(logp_NA, "rows", None), keys)

    grads, (logp_NA, keys) = jax.grad(loss, has_aux=True)(params)
    return logp_NA, grads, keys


@functools.partial(jax.jit, static_argnums=0)
def continued(network, params, tokens_NL, keys, length_N):
    N, L = tokens_NL.shape

    def chain(length):
        return jnp.full((N, length), length)

    C = keys[0].k.shape[1]
    old = Tree(jnp.broadcast_to(jnp.arange(C)[None, :], (N, C)), chain(C))
    new = Tree(length_N[:, None] + jnp.arange(L)[None, :], chain(L))
    at_NL = jnp.broadcast_to(length_N[:, None] - 1, (N, L))
    past = Past(keys, old, at_NL)
    hidden_NLD, _ = policy.hidden(network, params, tokens_NL, tree=new, past=past)
    return constrain(hidden_NLD, "rows", None, "embed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes, L, changes",
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, 8, {"windows": (3, 3), "scan_layers": True}),
        ({"fsdp": 2, "context": 4}, 10, {"layers": 1}),  # of lengths that do not divide
        ({"expert": 2, "context": 2, "tensor": 2}, 8, {"layers": 1, "moe": Moe(4, 2, 24, True)}),
        ({"fsdp": 2, "context": 2, "tensor": 2}, 8, BENT),
    ],
)
def test_a_policy_computes_the_same_with_its_rows_cut(capfd, sizes, L, changes):
    arch = dataclasses.replace(ARCH, **changes)
    network, params = random_network(arch)
    rng = np.random.default_rng(0)
    tokens_NL, more_NL = (rng.integers(0, 32, (4, n)).astype(np.int32) for n in (L, 6))
    segment_NL = np.sort(rng.integers(0, 2, (4, L)), axis=1).astype(np.int32)
    length_N = np.asarray([L, 1, 5, 3], np.int32)
    wanted = logp_and_gradients(network, params, tokens_NL, segment_NL)
    wanted_more = continued(network, params, more_NL, wanted[2], length_N)
    mesh = mesh_of(**sizes)
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    capfd.readouterr()
    with jax.set_mesh(mesh):
        got = logp_and_gradients(network, placed, tokens_NL, segment_NL)
        more = continued(network, placed, more_NL, got[2], length_N)
    assert "rematerialization" not in capfd.readouterr().err
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)
    np.testing.assert_allclose(more, wanted_more, atol=1e-5)
    if L % sizes["context"] == 0:
        k = got[2][0].k
        assert k.sharding.shard_shape(k.shape)[1] == L // sizes["context"]


@functools.partial(jax.jit, static_argnums=0)
def trees_and_gradients(network, params, tokens_NL, tree, pull_NLD, given_NLG=None):
    """Of a pass over token trees: what it computes, and the gradient of a sum of it."""

    def loss(params):
        found = policy.compute(network, params, tokens_NL, tree=tree, given_NLG=given_NLG)
        return jnp.sum(found.hidden_NLD * pull_NLD), found

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes, changes",
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, {"windows": (9, None)}),
        (
            {"fsdp": 2, "context": 4},
            # Weights drawn for a width of 24 move their gradients by 1.2e-4 for one ulp.
            {"scan_layers": True, "attention": "all_pairs", "mlp_width": 32},
        ),
        ({"expert": 2, "context": 2, "tensor": 2}, {"moe": Moe(4, 2, 24, True)}),
        ({"fsdp": 2, "context": 2, "tensor": 2}, BENT),
    ],
)
def test_token_trees_are_computed_the_same_dealt_to_devices(capfd, sizes, changes):
    network, params = random_network(dataclasses.replace(ARCH, **changes))
    rng = np.random.default_rng(0)
    tokens_NL = rng.integers(0, 32, (4, 32)).astype(np.int32)
    pull_NLD = rng.normal(0, 1 / 64, (4, 32, ARCH.width)).astype(np.float32)
    # A path of 12 tokens that two of 8 and 4 continue, and another tree of 8.
    depth_L = np.r_[:20, 12:16, :8].astype(np.int32)
    end_L = np.r_[[24] * 12, [20] * 8, [24] * 4, [32] * 8].astype(np.int32)
    tree = Tree(*(np.tile(x_L, (4, 1)) for x_L in (depth_L, end_L)))
    case = (tokens_NL, tree, pull_NLD)
    if "moe" in changes:  # routers that are given what another pass chose, for one token otherwise
        routed_NLG = trees_and_gradients(network, params, *case)[1].routed_NLG
        case = (*case, routed_NLG.at[1, 5].set(routed_NLG[1, 5, ::-1]))
    wanted = trees_and_gradients(network, params, *case)
    mesh = mesh_of(**sizes)
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    capfd.readouterr()
    with jax.set_mesh(mesh):
        got = trees_and_gradients(network, placed, *case)
    assert "rematerialization" not in capfd.readouterr().err
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)
    for x in (got[1].hidden_NLD, got[1].keys[1].v):
        assert x.sharding.shard_shape(x.shape)[1] == 32 // sizes["context"]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_dealt_rows_have_every_device_attend_to_equally_many_keys(devices):
    index_NL = jnp.arange(64)[None]
    dealt_NL = zigzag.to_zigzag(index_NL, devices)
    seen = [int(part.sum()) for part in jnp.split(dealt_NL + 1, devices, axis=1)]
    assert seen == [64 * 65 // 2 // devices] * devices
    assert jnp.array_equal(zigzag.from_zigzag(dealt_NL, devices), index_NL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("optimized")
def test_splash_over_cut_rows_compiles_for_tpu_without_scores_of_whole_rows(packed):
    devices = tpu_cases.devices("v5e:2x4")
    N, L, H, kv_heads, d = 2, 512, 4, 2, 128
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, context=2, tensor=2), devices)
    place = sharding(mesh, ("rows", "length", "heads", "head_dim"))
    qkv = [
        jax.ShapeDtypeStruct((N, L, heads, d), jnp.bfloat16, sharding=place)
        for heads in (H, kv_heads, kv_heads)
    ]
    options = {"kernel": "splash", "packed": packed, "window": 200}
    f = functools.partial(output_and_gradients, pull=jnp.ones((N, L, H, d)), **options)
    with jax.set_mesh(mesh):
        program = jax.jit(f).trace(qkv).lower(lowering_platforms=("tpu",)).compile().as_text()
    # Forward, queries' gradient, keys' gradient.
    assert program.count('custom_call_target="tpu_custom_call"') == 3
    assert re.search(r"bf16\[1,512,1,128\]", program)  # all keys of the device's row and head
    for dims in re.findall(r"\[([\d,]+)\]", program):
        sizes = [int(size) for size in dims.split(",")]
        assert not (512 in sizes and sizes.count(512) + sizes.count(256) > 1)


def test_kernels_that_cannot_take_cut_rows_fall_back_with_the_reason():
    shape = {"length": 256, "head_dim": 64, "kv_heads": 2, "heads": 4, "dtype": "bfloat16"}
    with jax.set_mesh(mesh_of(data=4, context=2)):
        assert select_kernel("splash", **shape) == ("splash", "as wanted")
        reason = "cudnn needs whole rows: got mesh axis context=2"
        assert select_kernel("cudnn", **shape) == ("xla", reason)
    with jax.set_mesh(mesh_of(data=2, context=4)):
        reason = "splash needs a length divisible by 128, on each of context=4 devices: got 256"
        assert select_kernel("splash", **shape) == ("xla", reason)
