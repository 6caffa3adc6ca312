"""Attention over token trees equals attention along each path, and skips masked blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_cases
from tree_cases import CASES, assert_equal, attend, random_arrays, trained, trees, wanted

from seeupo_jax.policy.kernels.attention import KeyValues, attend_trees
from seeupo_jax.policy.kernels.tree_attention import block_for
from seeupo_jax.policy.kernels.tree_mask import (
    TreeMask,
    list_block_pairs,
    visible_pairs,
    visited_blocks,
)
from seeupo_jax.policy.transformer import REMAT

TRIALS = [
    *(("xla", 16, name, None) for name in CASES),
    ("xla", 16, "trees", 20),
    ("xla", 16, "continued", 20),
    ("xla", 128, "continued", None),
    ("xla", None, "long trees", 20),
    *(("pallas", 128, name, None) for name in CASES if name != "causal"),
    ("pallas", 128, "continued", 20),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("implementation, block, name, window", TRIALS)
def test_every_path_is_attended_as_if_it_were_alone(implementation, block, name, window):
    case = CASES[name]
    options = {"window": window, "implementation": implementation, "block": block}
    got = trained(*random_arrays(case), case.tree_mask, **options)
    assert_equal(got, wanted(name, window))


@pytest.mark.parametrize("implementation, block", [("pallas", 128), ("triton", 16)])
def test_a_layer_that_keeps_products_or_attention_keeps_what_a_kernel_gives(implementation, block):
    case = CASES["continued"]
    q, k, v, weight = random_arrays(case)

    def loss(remat, *qkv):
        options = {"implementation": implementation, "block": block}
        run = functools.partial(attend, tree_mask=case.tree_mask, **options)
        return jnp.sum(REMAT[remat](run)(*qkv) * weight)

    step = jax.grad(loss, (1, 2, 3))
    program = jax.make_jaxpr(step, static_argnums=0)
    calls = {remat: str(program(remat, q, k, v)).count("pallas_call[") for remat in REMAT}
    assert calls["none"] == calls["dots"] == calls["attention"] < calls["full"]


def test_short_paths_are_attended_in_smaller_blocks():
    case = trees(5, 1, 600)  # fewer keys are attended all at once
    q, k, v, _ = random_arrays(case)

    def in_blocks(longest):
        return lambda q, k, v: attend_trees(q, KeyValues(k, v), case.tree_mask, longest=longest)

    programs = [str(jax.make_jaxpr(in_blocks(longest))(q, k, v)) for longest in (None, 128, 129)]
    blocks = [{n for n in (32, 64) if f"f32[2,{2 * n},{n}]" in text} for text in programs]
    assert blocks == [{64}, {32}, {64}]
    assert [block_for(4, longest) for longest in (None, 128, 129)] == [64, 32, 64]
    out = attended(q, k, v, case.tree_mask, "all_pairs")
    for longest in (None, 128):
        np.testing.assert_allclose(jax.jit(in_blocks(longest))(q, k, v), out, atol=2e-6)


@pytest.mark.parametrize(
    "implementation, block", [("all_pairs", None), ("xla", 16), ("pallas", 128), ("triton", 16)]
)
def test_a_query_without_visible_keys_gives_zero_and_no_gradient(implementation, block):
    case = CASES["causal"]
    blind = np.arange(150) % 7 == 3
    blind[128:144] = True  # whole blocks, too
    order = np.where(blind[None, :], np.int32(1000), case.tree_mask.order_NL)
    tree_mask = case.tree_mask._replace(order_NL=order)
    q, k, v, weight = random_arrays(case)
    options = {"implementation": implementation, "block": block}
    got = trained(q, k, v, weight, tree_mask, window=None, **options)
    got = jax.device_get(got)
    assert not np.any(got[0][:, blind]) and not np.any(got[1][:, blind])
    # The others are as without blind ones, whose outputs have no weight in this loss.
    asked = np.where(blind[None, :, None, None], np.float32(0), weight)
    out, *gradients = trained(
        q, k, v, asked, case.tree_mask, window=None, implementation="all_pairs"
    )
    assert_equal(got, (np.where(blind[None, :, None, None], 0.0, out), *gradients))


@pytest.mark.parametrize("implementation, block", [("xla", 16), ("pallas", 128), ("triton", 16)])
def test_a_masked_block_is_never_read(implementation, block):
    case = CASES["continued"]
    q, k, v, weight = random_arrays(case)

    def hidden(x, value):
        more = np.full((len(x), block, *x.shape[2:]), value, x.dtype)
        return np.concatenate([more, x], axis=1)

    *queries, first, end, depth = case.tree_mask
    tree_mask = TreeMask(*queries, hidden(first, 5), hidden(end, 5), hidden(depth, 0))
    k, v = (hidden(x, np.nan) for x in (k, v))
    options = {"implementation": implementation, "block": block}
    out, d_q, d_k, d_v = jax.device_get(trained(q, k, v, weight, tree_mask, window=None, **options))
    assert_equal((out, d_q, d_k[:, block:], d_v[:, block:]), wanted("continued", None))
    assert not np.any(d_k[:, :block]) and not np.any(d_v[:, :block])


def trunk_and_branches():
    """A trunk of 64 tokens with four branches of 64."""
    index = np.arange(320)[None]
    start = index // 64 * 64
    end = np.where(start == 0, 320, start + 64)
    depth = np.where(start == 0, index, 64 + index - start)
    return TreeMask(*(np.asarray(x, np.int32) for x in (index, depth, index, end, depth)))


def test_branches_do_not_visit_each_other():
    tree_mask = trunk_and_branches()
    # Of blocks of 64 queries and 32 keys: the trunk's visits two, a branch's those and its own two.
    assert visits(tree_mask, block=64, key_block=32).sum() == 2 + 4 * (2 + 2)
    # Of blocks of 32: the trunk's two visit one and two, a branch's two visit three and four.
    assert visits(tree_mask, block=32).sum() == 1 + 2 + 4 * (3 + 4)
    # A window of 32 reaches into the block before, along the path: the trunk's second one.
    assert visits(tree_mask, window=32, block=32).sum() == 1 + 2 + 4 * (2 + 2)


visits = jax.jit(visited_blocks, static_argnames=("window", "block", "key_block"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("window", [None, 20])
def test_every_visible_pair_is_visited_and_without_a_window_no_other(name, window):
    tree_mask, block = CASES[name].tree_mask, 16
    (L, C), N = (x.shape[1] for x in tree_mask[1:3]), len(tree_mask.order_NL)
    padded = np.zeros((N, -(-L // block) * block, -(-C // block) * block), bool)
    padded[:, :L, :C] = jax.jit(visible_pairs, static_argnums=1)(tree_mask, window)
    needed = padded.reshape(N, -(-L // block), block, -1, block).any((2, 4))
    visited = np.asarray(visits(tree_mask, window=window, block=block))
    assert not np.any(needed & ~visited)
    if window is None:
        np.testing.assert_array_equal(visited, needed)


def test_visits_are_listed_by_the_block_that_holds_their_sums():
    visited = np.asarray([[[1, 0, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1]]], bool)
    pair, start = jax.jit(list_block_pairs)(visited)
    assert pair.tolist() == [12, 0, 2, 7, 9, 10, 11, *[12] * 7]
    assert start.tolist() == [0, 2, 2, 3, 6]


@functools.partial(jax.jit, static_argnames="implementation")
def attended(q, k, v, tree_mask, implementation):
    return attend(q, k, v, tree_mask=tree_mask, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "pallas", "triton"])
def test_bfloat16_is_as_near_to_the_exact_result_as_all_scores_at_once(implementation):
    tree_mask = CASES["trees"].tree_mask
    qkv = random_arrays(CASES["trees"], dtype=jnp.bfloat16)[:3]
    exact = attended(*(x.astype(np.float32) for x in qkv), tree_mask, "all_pairs")
    actual, all_pairs = (attended(*qkv, tree_mask, name) for name in (implementation, "all_pairs"))
    assert actual.dtype == jnp.bfloat16
    exact, actual, all_pairs = (np.asarray(x, np.float32) for x in (exact, actual, all_pairs))
    assert np.abs(actual - exact).max() <= 1.5 * np.abs(all_pairs - exact).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "topology, dtype, d",
    [
        ("v5e:2x2", jnp.bfloat16, 64),
        ("v5p:2x2x1", jnp.float32, 128),
        ("v6e:2x2", jnp.bfloat16, 128),
    ],
)
@pytest.mark.usefixtures("optimized")
def test_the_kernels_compile_for_tpu(topology, dtype, d):
    place = jax.sharding.SingleDeviceSharding(tpu_cases.devices(topology)[0])

    def like(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    numbers = like(2, 1000, dtype=jnp.int32)
    q, k = like(2, 1000, 4, d, dtype=dtype), like(2, 1000, 2, d, dtype=dtype)

    def loss(q, k, v, *tree_mask):
        options = {"window": 300, "cap": 50.0, "implementation": "pallas"}
        out = attend(q, k, v, tree_mask=TreeMask(*tree_mask), **options)
        return out.astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = gradient.lower(q, k, k, *[numbers] * 5).compile().as_text()
    # Forward, queries' gradient, keys' gradient.
    assert text.count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.parametrize(
    "implementation, block, allowed",
    [
        ("pallas", 96, "multiples of 128"),
        ("triton", 96, "powers of 2 from 16"),
        ("triton", 8, "powers of 2 from 16"),
    ],
)
def test_blocks_that_a_kernel_does_not_take_are_refused(implementation, block, allowed):
    case = CASES["causal"]
    options = {"tree_mask": case.tree_mask, "implementation": implementation, "block": block}
    with pytest.raises(ValueError, match=f"got block={block}; allowed: {allowed}"):
        attend(*random_arrays(case)[:3], **options)
