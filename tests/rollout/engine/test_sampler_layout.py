"""The sampler's own layout: the same actions, no parameter gathered twice, every byte counted."""

import dataclasses
import functools
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_cases import converse

from seeupo_jax.configuration import schema
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.mesh import (
    make_mesh,
    param_shardings,
    row_shards,
    sampler_mesh,
    sharding,
)
from seeupo_jax.planning.collectives import collectives
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.rollout.engine import sampler
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.sampler_layout import SamplerLayout, _received
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

ARCH = Architecture(
    vocab_size=32, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=24
)
WIDTH, HEADS, KV, MLP = 16, 32, 16, 24
MATRICES = (
    32 * WIDTH + ARCH.layers * (WIDTH * (2 * HEADS + 2 * KV) + 3 * WIDTH * MLP)  # tied
)
NORMS = (2 * ARCH.layers + 1) * WIDTH  # over the width; those of heads are cut nowhere
TRAINING = schema.Mesh(data=1, fsdp=4, tensor=2)
REPLICATED = schema.Mesh(data=4, tensor=2)
SAMPLING = Sampling(0.6, None, None, 4, (3, 7, 11))
ROLLOUT = schema.Rollout(tasks=2, group_size=4, max_action_tokens=4, max_context=96, page_size=8)


@functools.cache
def make(arch=ARCH):
    """A network and parameters that make its distributions far from uniform."""
    network, shapes = policy.abstract_network(arch)
    rng = np.random.default_rng(0)

    def fill(path, x):
        is_norm = path[-1].key == "scale"
        values = is_norm + rng.normal(size=x.shape) * (0.2 if is_norm else 1.4 * WIDTH**-0.5)
        return jnp.asarray(values, x.dtype)

    return network, jax.tree_util.tree_map_with_path(fill, shapes)


def structs(arch):
    """The network, and shape structs of its parameters on the trainer's mesh."""
    network, shapes = policy.abstract_network(arch)
    mesh = make_mesh(TRAINING)
    where = param_shardings(mesh, network.logical_axes(), shapes)

    def struct(x, where):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return network, mesh, jax.tree.map(struct, shapes, where)


@functools.cache
def placed(arch=ARCH):
    """The policy on the trainer's mesh, and the mesh."""
    network, params = make(arch)
    mesh = make_mesh(TRAINING)
    return mesh, jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))


def make_engine(mesh, arch=ARCH, **options):
    shards = 1 if mesh is None else row_shards(mesh)
    plan = plan_cache(arch, ROLLOUT, shards=shards)
    options = {"group_size": 4, "steps": 2, "prefill_tokens": 32} | options
    return SlotEngine(make(arch)[0], SAMPLING, plan, mesh=mesh, **options)


def prompt(group):
    return np.random.default_rng(group).integers(0, 32, 20 + 15 * group).tolist()


PROMPTS = {key: (key // 4, prompt(key // 4)) for key in range(8)}
play = functools.partial(converse, prompts=PROMPTS, turns=2, answer=lambda key, turn: [key, turn])


@functools.cache
def alone():
    return play(make_engine(None), make()[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes",
    [REPLICATED, schema.Mesh(data=8), schema.Mesh(data=4, fsdp=2)],
    ids=("data 4 x tensor 2", "data 8", "data 4 x fsdp 2"),
)
def test_actions_do_not_depend_on_the_samplers_layout(sizes):
    mesh, params = placed()
    engine = make_engine(sampler_mesh(mesh, sizes))

    def run():  # as the thread that samples ahead does
        with jax.set_mesh(mesh):
            played = play(engine, params)
            assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
            return played

    with ThreadPoolExecutor(1) as thread:
        played = thread.submit(run).result()
    for key, turns in alone().items():
        for (context, action, logp), got in zip(turns, played[key], strict=True):
            assert got[:2] == (context, action)
            np.testing.assert_allclose(got[2], logp, atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [REPLICATED, schema.Mesh(data=2, fsdp=2, tensor=2), schema.Mesh(data=2, fsdp=4)],
    ids=("data 4 x tensor 2", "data 2 x fsdp 2 x tensor 2", "data 2 x fsdp 4"),
)
def test_with_fixed_steps_replicas_decode_apart_from_each_other(sizes):
    """As slices must, which only `data` lies across."""
    mesh, params = placed()
    own = sampler_mesh(mesh, sizes)
    inner = {axis for axis in ("fsdp", "tensor") if own.shape[axis] > 1}
    for fixed, crossing in ((True, set()), (False, {"data"})):
        engine = make_engine(own, fixed_steps=fixed)
        (decoded, *_) = (p for p in engine.programs(params) if "rollout/decode" in p.name)
        with engine.mesh_in_force():
            text = decoded.lower().compile().as_text()
        axes = {axis for each in collectives(text, own.shape) for axis in each.axes}
        assert axes == inner | crossing


def test_fixed_steps_sample_the_same_tokens():
    mesh, params = placed()
    engine = make_engine(sampler_mesh(mesh, REPLICATED), fixed_steps=True, steps=4)
    with jax.set_mesh(mesh):
        played = play(engine, params)
    for key, turns in alone().items():
        for (context, action, logp), got in zip(turns, played[key], strict=True):
            assert got[:2] == (context, action)
            np.testing.assert_allclose(got[2], logp, atol=1e-5)


def test_no_program_is_compiled_in_a_collection_on_a_layout_of_its_own():
    mesh, params = placed()
    engine = make_engine(sampler_mesh(mesh, REPLICATED))
    with jax.set_mesh(mesh):
        engine.compile(params)
        compilations = Compilations()
        play(engine, params)
        compilations.close()
    assert compilations.programs == 0


@pytest.mark.parametrize(
    "sizes, wanted",
    [
        # 8 x 4 numbers; a device holds 2 x 2 of them.
        (REPLICATED, (12,) * 8),  # wants 8 x 2
        (schema.Mesh(data=8), (28,) * 8),
        # Wants 4 x 1: its rows are among those, its column is in every other device's two.
        (schema.Mesh(data=1, fsdp=2, tensor=4), (2, 4, 4, 2, 2, 4, 4, 2)),
        (TRAINING, (0,) * 8),
    ],
)
def test_what_a_device_lacks_is_what_it_wants_without_what_it_holds(sizes, wanted):
    training = make_mesh(TRAINING)
    names = ("embed", "mlp")
    target = sharding(sampler_mesh(training, sizes), names)
    assert _received(sharding(training, names), target, (8, 4)) == wanted


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_a_policys_bytes_are_those_of_its_matrices_in_the_type_that_moves(scan, dtype, size):
    arch = dataclasses.replace(ARCH, scan_layers=scan, dtype=dtype)
    network, mesh, params = structs(arch)
    found = SamplerLayout(network, sampler_mesh(mesh, REPLICATED)).reshard(params)
    # A quarter of its rows is there already; columns are halved by `tensor` before and after.
    assert found.received_bytes == 3 * (MATRICES // 2 * size + NORMS * 4) // 4
    assert found.own_bytes == 8 * found.received_bytes
    heads = 2 * ARCH.layers * ARCH.head_dim * 4 * scan  # out of their stack, else as they are
    assert found.held_bytes == MATRICES // 2 * size + NORMS * 4 + heads
    assert str(found).startswith("sampler's layout: data 4 x tensor 2; ")


def test_parameters_that_need_no_change_come_back_themselves():
    mesh, params = placed()
    layout = SamplerLayout(make()[0], sampler_mesh(mesh, None))
    assert layout.place(params) is params and layout.program(params) is None
    assert layout.reshard(params).held_bytes == layout.reshard(params).received_bytes == 0
    half = dataclasses.replace(ARCH, dtype="bfloat16")
    kept = SamplerLayout(make(half)[0], sampler_mesh(mesh, None)).place(params)
    assert kept["norm"]["scale"] is params["norm"]["scale"]
    assert kept["embedding"].dtype == jnp.bfloat16


@pytest.mark.parametrize("scan", [False, True])
def test_the_samplers_parameters_are_the_trainers_in_the_compute_type_side_by_side(scan):
    arch = dataclasses.replace(ARCH, scan_layers=scan, dtype="bfloat16")
    mesh, params = placed(arch)
    own = sampler_mesh(mesh, REPLICATED)
    layout = SamplerLayout(make(arch)[0], own)
    got = layout.place(params)
    where = param_shardings(own, layout.network.logical_axes(), got)
    for index in range(ARCH.layers):
        up = params["layers"] if scan else params["layers"][index]
        up = up["mlp"]["up"]["kernel"][(index,) if scan else ()]
        wanted = np.asarray(up.astype(jnp.bfloat16))
        np.testing.assert_array_equal(got["layers"][index]["mlp"]["up"]["kernel"], wanted)
    shapes = layout.shapes(params)
    for x, place, struct in zip(*map(jax.tree.leaves, (got, where, shapes)), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)
        assert struct.sharding.is_equivalent_to(place, x.ndim)
        assert (x.shape, x.dtype) == (struct.shape, struct.dtype)


def rounded(kernel):
    """By hand: 255 steps from minus to plus the largest number of a column."""
    step = np.abs(kernel).max(axis=-2, keepdims=True) / np.float32(127)
    return np.round(kernel / step).astype(np.int8), step


@pytest.mark.parametrize("scan", [False, True])
def test_matrices_of_the_layers_are_rounded_to_8_bits_by_column(scan):
    arch = dataclasses.replace(ARCH, scan_layers=scan, dtype="bfloat16", qkv_bias=True)
    mesh, params = placed(arch)
    own = sampler_mesh(mesh, REPLICATED)
    layout = SamplerLayout(make(arch)[0], own, int8=True)
    got = layout.place(params)
    for index in range(ARCH.layers):
        up = params["layers"] if scan else params["layers"][index]
        up = np.asarray(up["mlp"]["up"]["kernel"][(index,) if scan else ()])
        kernel, step = rounded(up)
        mine = got["layers"][index]["mlp"]["up"]
        np.testing.assert_array_equal(mine["kernel"], kernel)
        np.testing.assert_allclose(mine["kernel_scale"], step[0], rtol=1e-6)
        assert got["layers"][index]["q"]["bias"].dtype == got["embedding"].dtype == jnp.bfloat16
    where = param_shardings(own, layout.network.logical_axes(), got)
    for x, place, struct in zip(
        *map(jax.tree.leaves, (got, where, layout.shapes(params))), strict=True
    ):
        assert x.sharding.is_equivalent_to(place, x.ndim)
        assert struct.sharding.is_equivalent_to(place, x.ndim)
        assert (x.shape, x.dtype) == (struct.shape, struct.dtype)
    found = layout.reshard(params)
    on_one = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(got)]
    heads = 0 if scan else 2 * ARCH.layers * ARCH.head_dim * 4  # stay where they are
    assert found.held_bytes == sum(on_one) - heads
    assert "its copy of the policy, layers in int8, " in str(found)


def test_the_bytes_of_8_bits_that_move_by_hand():
    network, mesh, params = structs(dataclasses.replace(ARCH, dtype="bfloat16"))
    found = SamplerLayout(network, sampler_mesh(mesh, REPLICATED), int8=True).reshard(params)
    of_layers, embedding = MATRICES - 32 * WIDTH, 32 * WIDTH
    # As above; a byte a number in layers, two in the embedding.
    assert found.received_bytes == 3 * (of_layers // 2 + embedding // 2 * 2 + NORMS * 4) // 4


@pytest.mark.usefixtures("optimized")
def test_what_devices_send_each_other_are_8_bits_of_a_number():
    mesh, params = placed()
    function, changed = SamplerLayout(make()[0], sampler_mesh(mesh, REPLICATED), int8=True).program(
        params
    )
    text = function.lower(changed).compile().as_text()
    sent = re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)", text)
    of_mlp = {(WIDTH, MLP // 2), (MLP // 2, WIDTH)}  # halves, by `tensor`
    types = [kind for kind, shape in sent if tuple(map(int, shape.split(","))) in of_mlp]
    assert types == ["s8"] * 3 * ARCH.layers


def test_an_engine_of_8_bits_plays_as_one_with_matrices_that_were_rounded_by_hand():
    network, params = make()
    played = play(make_engine(None, int8=True), params)

    def by_hand(path, x):
        if path[-1].key != "kernel":
            return x
        kernel, step = rounded(np.asarray(x))
        return jnp.asarray(kernel * step)

    wanted = play(make_engine(None), jax.tree_util.tree_map_with_path(by_hand, params))
    for key, turns in wanted.items():
        for (context, action, logp), got in zip(turns, played[key], strict=True):
            assert got[:2] == (context, action)
            np.testing.assert_allclose(got[2], logp, atol=1e-5)
    exact = [turn[2] for turns in alone().values() for turn in turns]
    assert not np.allclose(exact[0], [turn[2] for turn in played[0]][0], atol=1e-5)


def gathered(text):
    """Numbers in the results of a compiled program's all-gathers."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", text)
    return [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in found]


@pytest.mark.parametrize("sizes, whole", [(None, False), (REPLICATED, True)])
@pytest.mark.usefixtures("optimized")
def test_decoding_gathers_no_matrix_where_none_is_cut_over_fsdp(sizes, whole):
    mesh, params = placed()
    engine = make_engine(sampler_mesh(mesh, sizes))
    *_, program = engine.programs(params)
    assert program.name == f"rollout/decode 8x{96 // 8}"
    with engine.mesh_in_force():
        text = program.function.lower(*program.arguments).compile().as_text()
    smallest = WIDTH * KV // 2  # the keys' projection
    assert (max(gathered(text), default=0) < smallest) is whole


def test_the_programs_that_are_described_are_those_that_run(monkeypatch):
    arch = dataclasses.replace(ARCH, scan_layers=True)
    mesh, params = placed(arch)
    engine = make_engine(sampler_mesh(mesh, REPLICATED), arch)
    reshard, *others = engine.programs(params)
    assert reshard.name == "rollout/reshard"
    described, ran = [program.arguments for program in others], []

    def record(run):
        def recorded(*arguments):
            ran.append(jax.tree.map(as_struct, arguments))  # before they are donated
            return run(*arguments)

        recorded.lower = run.lower  # as it is compiled ahead
        return recorded

    def as_struct(x):
        is_array = isinstance(x, jax.Array)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if is_array else x

    for name in ("copy_pages", "prefill", "decode"):
        monkeypatch.setattr(sampler, name, record(getattr(sampler, name)))
    engine.compile(params)
    assert len(described) == len(ran) > 3
    for wanted, got in zip(map(jax.tree.leaves, described), map(jax.tree.leaves, ran), strict=True):
        for a, b in zip(wanted, got, strict=True):
            if not isinstance(a, jax.ShapeDtypeStruct):
                assert a == b
                continue
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.sharding.is_equivalent_to(b.sharding, len(a.shape))


def test_what_moved_is_counted_in_every_collection():
    mesh, params = placed()
    engine = make_engine(sampler_mesh(mesh, REPLICATED))
    for _ in range(2):
        engine.begin(params, seed=1)
        assert engine.usage()["reshard_bytes"] == 8 * 3 * 4 * (MATRICES // 2 + NORMS) // 4
    engine = make_engine(None)
    engine.begin(make()[1], seed=1)
    assert engine.usage()["reshard_bytes"] == 0


def test_a_matrix_that_the_samplers_mesh_does_not_divide_is_told_by_its_field():
    network, mesh, params = structs(dataclasses.replace(ARCH, mlp_width=12))
    layout = SamplerLayout(network, sampler_mesh(mesh, schema.Mesh(data=1, tensor=8)))
    with pytest.raises(ValueError, match=r"config.rollout.mesh: .*mlp=12, .*tensor=8 does not"):
        layout.reshard(params)
