"""What is read from HLO text, against programs whose traffic and arrays are known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_cases import needs_libtpu

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding
from seeupo_jax.planning import collectives as traffic
from seeupo_jax.planning import hlo
from seeupo_jax.planning.chips import parse_topology, topology_devices
from seeupo_jax.planning.collectives import Traffic, by_kind_and_axis, collectives
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.network import abstract_network

pytestmark = pytest.mark.usefixtures("optimized")  # as users compile

SHAPE = {"a": 2, "b": 4}
F32 = 4  # bytes


def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def per_device(f, *arguments):
    """The text of `f` run on every device on whole arguments."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
    specs = {"in_specs": P(), "out_specs": P()}
    sharded = jax.shard_map(f, mesh=mesh(), check_vma=False, **specs)
    return jax.jit(sharded).lower(*arguments).compile().as_text()


def test_each_kind_tells_its_axes_its_group_and_what_a_device_receives():
    def f(x):
        whole = jax.lax.all_gather(x, "a", tiled=True)
        part = jax.lax.psum_scatter(jnp.sin(whole), "b", tiled=True)
        turned = jax.lax.all_to_all(jnp.sin(part), "b", 0, 0, tiled=True)
        total = jax.lax.psum(jnp.sin(turned), ("a", "b"))
        return jax.lax.ppermute(jnp.sin(total), "a", [(0, 1), (1, 0)])

    found = collectives(per_device(f, ((16,), jnp.float32)), SHAPE)
    # 16 numbers become 32, an eighth of whose sums go to each of four, and so on.
    wanted = [
        ("all-gather", ("a",), 2, 16 * F32),
        ("reduce-scatter", ("b",), 4, 32 * F32 * 3 / 4),
        ("all-to-all", ("b",), 4, 8 * F32 * 3 / 4),
        ("all-reduce", ("a", "b"), 8, 2 * 8 * F32 * 7 / 8),
        ("collective-permute", ("a",), 2, 8 * F32),
    ]
    assert [(c.kind, c.axes, c.group, c.bytes) for c in found] == wanted
    assert {c.count for c in found} == {1}
    assert "psum" in found[3].scope


def test_what_decides_whether_a_loop_goes_on_is_traffic_too():
    def f(x):
        def unfinished(carry):
            return jax.lax.psum(carry[0], "b") < 100

        return jax.lax.while_loop(unfinished, lambda carry: (2 * carry[0] + 1,), (x,))

    (found,) = collectives(per_device(f, ((), jnp.float32)), SHAPE)
    assert (found.kind, found.axes, found.bytes) == ("all-reduce", ("b",), 2 * F32 * 3 / 4)


# As XLA for TPU writes what goes between slices: of all-gathers and sums of two and four slices.
BETWEEN_SLICES = """HloModule m

ENTRY %main (x: f32[2,96]) -> f32[2,96] {
  %x = f32[2,96]{1,0} parameter(0)
  %after-all = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="all-gather.7_0"}
  %send = (f32[2,96]{1,0}, u32[], token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-gather.7_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"}
  %send.1 = (f32[2,96]{1,0}, u32[], token[]) send(%x, %after-all), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="ADD",_xla_megascale_target="{1,2,3,4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send.2 = (f32[2,96]{1,0}, u32[], token[]) send(%x, %after-all), channel_id=6, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target={{100003->200000},{200000->100003}},_xla_megascale_transfer_type="ONE_TO_ONE"}
  %send.3 = (f32[2,96]{1,0}, u32[], token[]) send(%x, %after-all), channel_id=8, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="a callback"}
  ROOT %copy = f32[2,96]{1,0} copy(%x)
}
"""  # noqa: E501


def test_what_hosts_send_between_slices_is_traffic_over_them():
    found = collectives(BETWEEN_SLICES, SHAPE)
    sent = 2 * 96 * F32
    assert [(c.kind, c.axes, c.group, c.bytes) for c in found] == [
        ("all-gather", ("slices",), 2, sent),
        ("all-reduce", ("slices",), 4, 2 * sent * 3 / 4),
        ("collective-permute", ("slices",), 2, sent),
    ]


def looped(x, n):
    def twice(x, _):
        return jax.lax.psum(jnp.sin(x), "b"), None

    def outer(x, _):
        return jax.lax.scan(twice, x, None, length=3)[0], None

    x = jax.lax.scan(outer, x, None, length=5)[0]
    with jax.named_scope("until"):
        x = jax.lax.fori_loop(0, n, lambda _, x: jax.lax.psum(jnp.cos(x), "a"), x)
    return x


def test_loops_count_as_often_as_they_run():
    text = per_device(looped, ((8,), jnp.float32), ((), jnp.int32))
    rows = {row.axes: row for row in by_kind_and_axis(collectives(text, SHAPE))}
    each = 2 * 8 * F32
    assert rows["b",] == Traffic("all-reduce", ("b",), 15, 15 * each * 3 / 4)
    assert rows["a",].count == 1

    def trips(scope):
        return 7 if "until" in scope else 100

    found = by_kind_and_axis(collectives(text, SHAPE, unknown_trips=trips))
    assert found[1] == Traffic("all-reduce", ("a",), 7, 7 * each / 2)


def test_both_branches_count():
    def f(x):
        left, right = (lambda x, a=axis: jax.lax.psum(x, a) for axis in "ab")
        return jax.lax.cond(x.sum() > 0, left, right, x)

    found = collectives(per_device(f, ((8,), jnp.float32)), SHAPE)
    assert sorted(c.axes for c in found) == [("a",), ("b",)]


def test_what_the_compiler_inserts_is_found_too():
    sharding = NamedSharding(mesh(), P("a", "b"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    by_rows = NamedSharding(mesh(), P("a"))
    text = jax.jit(lambda x: x + 1, out_shardings=by_rows).lower(x).compile().as_text()
    (found,) = collectives(text, SHAPE)
    assert (found.kind, found.axes) == ("all-gather", ("b",))
    assert found.bytes == 32 * 64 * F32 * 3 / 4


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("b",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("b",)),
        ("{}", ("a", "b")),
        ("[2,4]<=[8]", ("b",)),
        ("[4,2]<=[2,4]T(1,0)", ("a",)),
        ("[1,8]<=[8]", ("a", "b")),
        ("mesh['x'=2,'y'=4] {'y'}", ("b",)),
        ("mesh['x'=2,'y'=4] {'x'}", ("a",)),
        ("mesh['x'=2,'y'=4] {'x','y'}", ("a", "b")),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ("b",)),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", ("a",)),
        ("mesh['x'=8] {'x':(1)2}", ("a",)),
    ],
)
def test_groups_are_read_in_every_notation(groups, axes):
    line = f"all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    assert traffic._span(traffic._groups(line, SHAPE), SHAPE)[0] == axes


def test_parts_of_named_axes_make_the_right_groups():
    groups = traffic._groups("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}, x", SHAPE)
    assert groups.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    groups = traffic._groups("replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}, x", SHAPE)
    assert groups.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


# What only the TPU's compiler writes: loops that do not say their count, fusions that sum and
# slice, a kernel's attributes over several lines, sends that start and end apart.
TPU_TEXT = """HloModule jit_f, is_scheduled=true

%all-reduce-scatter.1 (input: bf16[64,8]) -> bf16[32,8] {
  %input = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[64,8]{1,0} all-reduce(%input), replica_groups={{0,4},{1,5},{2,6},{3,7}}, \
to_apply=%add
  ROOT %slice.1 = bf16[32,8]{1,0} dynamic-slice(%all-reduce.1, %zero), dynamic_slice_sizes={32,8}
}

%body (p: (u32[], bf16[64,8], u32[])) -> (u32[], bf16[64,8], u32[]) {
  %one = u32[]{:T(128)} constant(2)
  %p = (u32[]{:T(128)}, bf16[64,8]{1,0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[64,8]{1,0} get-tuple-element(%p), index=1
  %n = u32[]{:T(128)} get-tuple-element(%p), index=2
  %next = u32[]{:T(128)} add(%i, %one)
  %copy.7 = u32[]{:T(128)} copy(%next)
  %send = (bf16[64,8]{1,0}, bf16[64,8]{1,0}, u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
  %done = bf16[64,8]{1,0} collective-permute-done(%send)
  %fusion.1 = bf16[32,8]{1,0} fusion(%done), kind=kCustom, calls=%all-reduce-scatter.1, \
metadata={op_name="jit(f)/while/body/sum"}
  %kernel = bf16[8,64]{1,0} custom-call(%fusion.1), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"name":"one"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %t = (u32[], bf16[64,8]{1,0}, u32[]) tuple(%copy.7, %kernel, %n)
}

%condition (p.1: (u32[], bf16[64,8], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(8)
  %p.1 = (u32[]{:T(128)}, bf16[64,8]{1,0}, u32[]{:T(128)}) parameter(0)
  %i.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  %n.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=2
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: bf16[64,8], n.2: u32[]) -> bf16[32,8] {
  %start = u32[]{:T(128)} constant(3)
  %copy.8 = u32[]{:T(128)} copy(%start)
  %x.1 = bf16[64,8]{1,0} parameter(0)
  %n.2 = u32[]{:T(128)} parameter(1)
  %t.1 = (u32[], bf16[64,8]{1,0}, u32[]) tuple(%copy.8, %x.1, %n.2)
  %loop = (u32[], bf16[64,8]{1,0}, u32[]) while(%t.1), condition=%condition, body=%body, \
metadata={op_name="jit(f)/while"}
  %last = bf16[64,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %out = bf16[32,8]{1,0} fusion(%last), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_what_only_tpus_compiler_writes_is_read():
    permute, scatter = sorted(collectives(TPU_TEXT, SHAPE), key=lambda c: c.kind)
    # At 3, 5 and 7, and the sum once more after the loop.
    assert (permute.kind, permute.axes, permute.bytes) == ("collective-permute", ("b",), 64 * 8 * 2)
    assert (scatter.kind, scatter.axes, scatter.bytes) == ("reduce-scatter", ("a",), 64 * 8 * 2 / 2)
    assert (permute.count, scatter.count) == (3, 4)
    assert scatter.scope == "jit(f)/while/body/sum"
    (kernel,) = hlo.find_shapes(TPU_TEXT, lambda dtype, dims: dims == (8, 64))
    assert (kernel.dtype, kernel.bytes, kernel.scope) == ("bf16", 64 * 8 * 2, "jit(f)/kernel")


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("compare(%i.1, %limit)", "compare(%i.1, %n.1)"),
        ("tuple(%copy.8, %x.1", "tuple(%n.2, %x.1"),
        ("add(%i, %one)", "add(%i, %n)"),
        ("add(%i, %one)", "multiply(%i, %one)"),
        ("direction=LT", "direction=NE"),
    ],
)
def test_a_count_that_is_not_in_the_program_is_not_guessed(line, changed):
    assert line in TPU_TEXT
    for text, count in ((TPU_TEXT, 3), (TPU_TEXT.replace(line, changed), 7)):
        found = collectives(text, SHAPE, unknown_trips={"jit(f)/while": 7}.__getitem__)
        assert {c.count for c in found if c.kind == "collective-permute"} == {count}


def attention(q, k):
    scores = jax.nn.softmax(jnp.einsum("nqd,nkd->nqk", q, k))
    return jnp.einsum("nqk,nkd->nqd", scores, k)


def test_a_score_matrix_is_found_where_there_is_one():
    x = jax.ShapeDtypeStruct((3, 96, 20), jnp.float32)
    text = jax.jit(attention).lower(x, x).compile().as_text()
    found = hlo.find_shapes(text, hlo.score_matrix(96))
    assert ("f32", (3, 96, 96)) in {(array.dtype, array.dims) for array in found}
    largest = hlo.largest_arrays(text)[0]
    assert (largest.dims, largest.bytes) == ((3, 96, 96), 3 * 96 * 96 * F32)
    assert "jit(attention)" in largest.scope
    assert not hlo.find_shapes(text, hlo.score_matrix(80))


def test_values_inside_of_fusions_lie_nowhere():
    x = jax.ShapeDtypeStruct((96,), jnp.float32)

    def outer(x):
        return (x[:, None] * x[None, :]).sum()

    text = jax.jit(outer).lower(x).compile().as_text()
    assert not hlo.find_shapes(text, hlo.score_matrix(96))
    assert "f32[96,96]" in text
    assert hlo.largest_arrays(text)[0].dims == (96,)


def test_predicates_know_the_parts_of_cut_dimensions():
    scores = hlo.score_matrix(512)
    assert scores("f32", (2, 8, 512, 512)) and scores("f32", (4096, 512))
    assert not scores("f32", (2, 512, 320)) and not scores("f32", (512, 256))
    assert hlo.score_matrix(512, context=2)("f32", (256, 512))
    words = hlo.logits(1000, 64, tensor=4)
    assert words("f32", (2, 32, 250)) and words("f32", (64, 1000))
    assert not words("f32", (2, 31, 250)) and not words("f32", (64, 500))


@needs_libtpu
def test_splash_leaves_no_score_matrix_on_tpu_and_plain_attention_does():
    devices = topology_devices(parse_topology("v5e:2x2"))
    cut = make_mesh(schema.Mesh(fsdp=2, tensor=2), devices)
    tokens = jax.ShapeDtypeStruct((2, 384), jnp.int32, sharding=sharding(cut, ("rows", None)))

    def compiled(attention):
        arch = Architecture(512, 256, 1, 2, 2, 128, 320, dtype="bfloat16", attention=attention)
        network, shapes = abstract_network(arch)
        places = param_shardings(cut, network.logical_axes(), shapes)

        def place(x, at):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

        run = jax.jit(lambda params, tokens: network.bind(params).hidden(tokens)[0])
        with jax.set_mesh(cut):
            return run.lower(jax.tree.map(place, shapes, places), tokens).compile().as_text()

    texts = {name: compiled(name) for name in ("splash", "xla")}
    assert not hlo.find_shapes(texts["splash"], hlo.score_matrix(384))
    assert hlo.find_shapes(texts["xla"], hlo.score_matrix(384))
    found = collectives(texts["splash"], dict(cut.shape))
    assert {("all-gather", ("fsdp",)), ("all-reduce", ("tensor",))} <= {
        (c.kind, c.axes) for c in found
    }
