"""The mesh takes what the configuration says, one table shards everything, and numbers stay."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import (
    ACTIVATION_RULES,
    AXES,
    RULES,
    axis_parts,
    check_lengths,
    constrain,
    make_mesh,
    param_shardings,
    partition,
    per_shard,
    row_shards,
    sampler_mesh,
    sharding,
)
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture, Moe
from seeupo_jax.policy.transformer import Transformer

ARCH = Architecture(
    vocab_size=32,
    width=16,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    qkv_bias=True,
    tied=False,
)


def mesh_of(devices=None, **sizes):
    return make_mesh(schema.Mesh(**{"data": 1, **sizes}), devices)


@pytest.mark.parametrize(
    "sizes, shape",
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1, 1, 2)),
        ({"data": -1}, (8, 1, 1, 1, 1)),
        ({"data": -1, "fsdp": 4}, (2, 4, 1, 1, 1)),
        ({"data": 2, "fsdp": 4, "tensor": -1}, (2, 4, 1, 1, 1)),
        ({"fsdp": -1, "tensor": 2}, (1, 4, 1, 1, 2)),
        ({"expert": -1, "tensor": 2}, (1, 1, 4, 1, 2)),
        ({"data": -1, "expert": 4}, (2, 1, 4, 1, 1)),
        ({"fsdp": 2, "context": -1, "tensor": 2}, (1, 2, 1, 2, 2)),
    ],
)
def test_minus_one_takes_the_devices_that_are_left(sizes, shape):
    mesh = mesh_of(**sizes)
    assert (mesh.axis_names, mesh.devices.shape) == (AXES, shape)
    assert set(mesh.devices.flat) == set(jax.devices())


def test_a_mesh_may_use_some_devices_only():
    devices = jax.devices()[:2]
    assert set(mesh_of(fsdp=2, devices=devices).devices.flat) == set(devices)


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"data": -1, "fsdp": -1}, "'fsdp': -1, .*allowed: -1 at one axis at most"),
        ({"data": 3}, "a product of 3; allowed: a product of 8, the devices here"),
        ({"data": 2, "fsdp": 2}, "a product of 4; allowed: a product of 8, the devices here"),
        ({"data": -1, "tensor": 3}, "'tensor': 3.*a product of 3;"),
        ({"data": -1, "expert": 5}, "'expert': 5.*a product of 5;"),
        ({"data": -1, "context": 3}, "'context': 3.*a product of 3;"),
        ({"data": -1, "tensor": 16}, "a product of 16;"),
        ({"data": 16}, "a product of 16;"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_named(sizes, reason):
    with pytest.raises(ValueError, match=f"config.mesh: got .*{reason}"):
        mesh_of(**sizes)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("qk_norm, tied", [(True, True), (False, False)])
def test_every_parameter_has_logical_names_that_the_table_knows(scan_layers, qk_norm, tied):
    changes = {"qk_norm": qk_norm, "tied": tied, "scan_layers": scan_layers}
    arch = Architecture(**{**vars(ARCH), **changes})
    network, params = policy.split_model(nnx.eval_shape(lambda: Transformer(arch, nnx.Rngs(0))))
    names = network.logical_axes()
    leaves = jax.tree.leaves(names, is_leaf=lambda node: isinstance(node, tuple))
    assert {name for leaf in leaves for name in leaf} <= set(RULES)
    assert [len(leaf) for leaf in leaves] == [p.ndim for p in jax.tree.leaves(params)]
    assert set(RULES) == set(ACTIVATION_RULES)


def test_rules_name_axes_of_the_mesh_only():
    for axis in (*RULES.values(), *ACTIVATION_RULES.values()):
        assert axis is None or {axis} <= set(AXES) or set(axis) <= set(AXES)


def test_a_parameter_is_cut_by_the_table():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    kernel = jax.ShapeDtypeStruct((16, 24), jnp.float32)
    placed = param_shardings(mesh, {"up": ("embed", "mlp")}, {"up": kernel})
    assert placed["up"].shard_shape(kernel.shape) == (8, 12)
    cache = sharding(mesh, ("rows", "length", "kv_heads", "head_dim"))
    assert cache.shard_shape((8, 10, 2, 4)) == (2, 10, 1, 4)
    assert tuple(partition(("rows", None, "embed"), ACTIVATION_RULES)) == (
        ("data", "fsdp", "expert"),
        None,
        None,
    )


def test_experts_are_cut_by_their_own_axis_which_also_spreads_rows():
    mesh = mesh_of(fsdp=2, expert=2, tensor=2)
    names = {"router": ("embed", None), "down": ("layers", "experts", "mlp", "embed")}
    shapes = {
        "router": jax.ShapeDtypeStruct((16, 4), jnp.float32),
        "down": jax.ShapeDtypeStruct((3, 4, 24, 16), jnp.float32),
    }
    placed = param_shardings(mesh, names, shapes)
    local = {name: placed[name].shard_shape(shapes[name].shape) for name in names}
    assert local == {"router": (8, 4), "down": (3, 2, 12, 8)}
    assert row_shards(mesh) == 4
    assert sharding(mesh, ("rows", "length")).shard_shape((8, 5)) == (2, 5)
    assert row_shards(mesh_of(data=2, fsdp=2, tensor=2)) == 4
    assert row_shards(mesh_of(data=2, expert=4)) == 8


def test_context_cuts_the_length_of_activations_and_the_width_of_parameters():
    mesh = mesh_of(fsdp=2, context=2, tensor=2)
    kernel = jax.ShapeDtypeStruct((16, 24), jnp.float32)
    placed = param_shardings(mesh, {"up": ("embed", "mlp")}, {"up": kernel})
    assert placed["up"].shard_shape(kernel.shape) == (4, 12)
    assert row_shards(mesh) == 2
    with jax.set_mesh(mesh):
        sharded = jax.jit(lambda x: constrain(x, "rows", "length", "embed"))(jnp.ones((4, 6, 16)))
        assert [axis_parts(name) for name in ("rows", "length", "heads", "embed")] == [2, 2, 2, 1]
    assert sharded.sharding.shard_shape((4, 6, 16)) == (2, 3, 16)


def test_row_lengths_that_context_does_not_divide_are_named():
    mesh = mesh_of(data=2, context=4)
    check_lengths(mesh, (32, 64, 100))
    with pytest.raises(
        ValueError, match="config.mesh.context: got 4, .* row lengths 30, 90; allow"
    ):
        check_lengths(mesh, (30, 60, 90))


def test_the_sampler_uses_the_same_devices_in_the_same_order():
    training = mesh_of(fsdp=2, context=2, tensor=2)
    assert sampler_mesh(mesh_of(data=4, tensor=2), None) == mesh_of(data=4, tensor=2)
    folded = sampler_mesh(training, None)
    own = sampler_mesh(training, schema.Mesh(data=-1, tensor=4))
    assert folded.devices.shape == (2, 2, 1, 1, 2) and own.devices.shape == (2, 1, 1, 1, 4)
    for mesh in (folded, own):
        assert mesh.axis_names == AXES and mesh.axis_types == training.axis_types
        assert list(mesh.devices.flat) == list(training.devices.flat)


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"data": 2, "tensor": 2}, "config.rollout.mesh: got .* a product of 4; allowed: a prod"),
        ({"data": -1, "context": 2}, "config.rollout.mesh.context: got 2; allowed: 1, since a dec"),
    ],
)
def test_a_layout_that_the_sampler_cannot_have_is_named(sizes, reason):
    with pytest.raises(ValueError, match=reason):
        sampler_mesh(mesh_of(data=8), schema.Mesh(**sizes))


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of several slices, as far as a layout looks at it."""

    id: int
    slice_index: int
    platform: str = "tpu"


def two_slices(**sizes):
    """A trainer's mesh over two slices of four chips, the first half of it in the first."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    chips = np.array([Chip(i, i // 4) for i in range(8)], object).reshape(shape)
    return jax.sharding.Mesh(chips, AXES)


@pytest.mark.parametrize(
    "sizes, shape",
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1, 1, 2)),  # stays as it is
        ({"fsdp": 8}, (2, 4, 1, 1, 1)),
        ({"fsdp": 4, "tensor": 2}, (2, 2, 1, 1, 2)),
        ({"fsdp": 2, "tensor": 4}, (2, 1, 1, 1, 4)),
        ({"fsdp": 2, "expert": 4}, (2, 1, 4, 1, 1)),
        ({"fsdp": 4, "context": 2}, (2, 4, 1, 1, 1)),  # of which `context` frees a half
    ],
)
def test_a_replica_of_the_sampler_lies_within_a_slice(sizes, shape):
    training = two_slices(**sizes)
    mesh = sampler_mesh(training, None)
    assert mesh.devices.shape == shape
    assert list(mesh.devices.flat) == list(training.devices.flat)
    for replica in mesh.devices:
        assert len({chip.slice_index for chip in replica.flat}) == 1


@pytest.mark.parametrize(
    "sizes, got",
    [
        ({"data": 1, "tensor": 8}, "fsdp=1 x expert=1 x tensor=8, a product of 8"),
        ({"data": 1, "fsdp": 8}, "fsdp=8 x expert=1 x tensor=1, a product of 8"),
        ({"data": 1, "expert": 2, "tensor": 4}, "fsdp=1 x expert=2 x tensor=4, a product of 8"),
    ],
)
def test_a_layout_whose_decode_steps_would_cross_slices_is_refused(sizes, got):
    training = two_slices(data=2, fsdp=4)
    with pytest.raises(ValueError, match=f"config.rollout.mesh: got {got} that lies .* divides 4,"):
        sampler_mesh(training, schema.Mesh(**sizes))
    assert sampler_mesh(training, schema.Mesh(data=2, tensor=4)).shape["tensor"] == 4
    assert sampler_mesh(mesh_of(data=8), schema.Mesh(**sizes)).size == 8  # of no slices


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"tensor": 8}, r"\['down'\]\['kernel'\] has mlp=12, which mesh axis tensor=8 does not"),
        ({"fsdp": 8}, r"\['norm'\]\['scale'\] has embed=20, which mesh axis fsdp=8 does not"),
        ({"expert": 8}, r"\['moe'\]\['up'\] has experts=4, which mesh axis expert=8 does not"),
        (
            {"fsdp": 4, "context": 2},
            r"\['norm'\]\['scale'\] has embed=20, which mesh axis fsdp=4 x context=2 does not",
        ),
    ],
)
def test_an_axis_that_does_not_divide_is_named(sizes, reason):
    names = {
        "down": {"kernel": ("mlp", "embed")},
        "norm": {"scale": ("embed",)},
        "moe": {"up": ("experts", "embed", "mlp")},
    }
    width = 20 if "fsdp" in sizes else 16
    shapes = {
        "down": {"kernel": jax.ShapeDtypeStruct((12, 16), jnp.float32)},
        "norm": {"scale": jax.ShapeDtypeStruct((width,), jnp.float32)},
        "moe": {"up": jax.ShapeDtypeStruct((4, 16, 24), jnp.float32)},
    }
    with pytest.raises(ValueError, match=f"config.mesh: {reason} divide; allowed: a divisor of"):
        param_shardings(mesh_of(**sizes), names, shapes)


def test_an_unknown_logical_name_is_an_error():
    with pytest.raises(KeyError, match="heds"):
        partition(("embed", "heds"))


def test_constraining_without_a_mesh_does_nothing():
    program = jax.make_jaxpr(lambda x: constrain(x, "rows", "embed"))(jnp.ones((8, 16)))
    assert not program.eqns
    with jax.set_mesh(mesh_of(devices=jax.devices()[:1])):
        assert not jax.make_jaxpr(lambda x: constrain(x, "rows", "embed"))(jnp.ones((8, 16))).eqns


def test_constraining_spreads_the_rows():
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        sharded = jax.jit(lambda x: constrain(x, "rows", "embed"))(jnp.ones((8, 16)))
    assert sharded.sharding.shard_shape((8, 16)) == (2, 16)


def test_a_function_runs_as_it_is_where_no_mesh_is_set():
    def double(x):
        return 2 * x

    assert per_shard(double, [("rows", "embed")], ("rows", "embed")) is double
    with jax.set_mesh(mesh_of(devices=jax.devices()[:1])):
        assert per_shard(double, [("rows", "embed")], ("rows", "embed")) is double


def test_a_function_sees_the_part_of_its_device():
    seen = []

    def partial_matmul(x, w):
        seen.append((x.shape, w.shape))
        return jax.lax.psum(x @ w, "tensor")

    x, w = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    with jax.set_mesh(mesh_of(data=2, expert=2, tensor=2)):
        run = per_shard(partial_matmul, [("rows", "mlp"), ("mlp", "embed")], ("rows", "embed"))
        got = jax.jit(run)(x, w)
    assert seen == [((2, 4), (4, 8))]
    np.testing.assert_allclose(got, x @ w, rtol=1e-5)
    assert got.sharding.shard_shape(got.shape) == (2, 8)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_that_do_not_divide_are_filled_up_and_cut_again(rows):
    x = np.random.default_rng(0).normal(size=(2, rows, 3)).astype(np.float32)
    scale = np.asarray([1.0, -2.0, 3.0], np.float32)

    def multiply(x, scale):
        return x * scale[None, None, :]

    names = ("length", "rows", "embed")
    with jax.set_mesh(mesh_of(data=2, fsdp=2, expert=2)):
        run = per_shard(multiply, [names, ("embed",)], names)
        got, pull = jax.vjp(jax.jit(run), x, scale)
        grads = pull(np.ones_like(got))
    np.testing.assert_array_equal(got, multiply(x, scale))
    np.testing.assert_array_equal(grads[0], np.broadcast_to(scale[None, None, :], x.shape))
    np.testing.assert_allclose(grads[1], x.sum((0, 1)), rtol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def logp_and_grads(network, params, tokens_NL):
    def loss(params):
        hidden_NLD, _ = policy.hidden(network, params, tokens_NL)
        logp_NL = policy.token_logp(
            network, params, hidden_NLD[:, :-1], tokens_NL[:, 1:], temperature=0.8
        )
        return logp_NL.mean(), logp_NL

    grads, logp_NL = jax.grad(loss, has_aux=True)(params)
    return logp_NL, grads


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fields, sizes",
    [
        ({}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"moe": Moe(4, 2, 24, True)}, {"expert": 2, "fsdp": 2, "tensor": 2}),
        (
            {"moe": Moe(4, 2, 24, True), "layers": 2, "scan_layers": True},
            {"expert": 2, "fsdp": 2, "tensor": 2},
        ),
    ],
)
def test_eight_devices_compute_what_one_computes(capfd, fields, sizes):
    arch = dataclasses.replace(ARCH, **fields)
    network, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    tokens_NL = np.random.default_rng(0).integers(0, 32, (4, 6)).astype(np.int32)
    wanted = logp_and_grads(network, params, tokens_NL)
    mesh = mesh_of(**sizes)
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    rows = jax.device_put(tokens_NL, sharding(mesh, ("rows", "length")))
    capfd.readouterr()
    with jax.set_mesh(mesh):
        got = logp_and_grads(network, placed, rows)
    assert (
        "rematerialization" not in capfd.readouterr().err
    )  # XLA replicates nothing as a last resort
    assert len(got[0].sharding.device_set) == 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)
