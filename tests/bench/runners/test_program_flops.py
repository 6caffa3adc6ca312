"""FLOPs of programs whose loops are as long as the data say, worked by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.bench.runners.program_flops import Flops, Passes, Trips, count
from seeupo_jax.bench.runners.program_recorder import Call, trips
from seeupo_jax.learner.refresh_batch import RefreshBatch
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.attention import KeyValues, Tree, attend_trees, tree_mask_of
from seeupo_jax.types import NOTHING, TurnBatch

ARCH = Architecture(vocab_size=512, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=8)
ONE = 2 * 4**3  # FLOPs of `square`


def square(x):
    return x @ x


def heads(x):
    return jnp.einsum("hqd,hkd->hqk", x[None], x[None])[0]


def some(n, body, x):
    return jax.lax.fori_loop(0, n, lambda _, x: body(x), x)


ONCE = Trips(1, Passes())


def counted(f, *, given=ONCE, platform="cpu"):
    x, n = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    return count(jax.jit(f).trace(x, n).jaxpr, given, platform)


def test_heads_are_attention_and_parameters_are_not():
    assert counted(lambda x, n: square(heads(x))) == Flops(weights=ONE, attention=ONE)


def test_microbatches_continued_chunks_and_pairs_of_blocks_count_each_by_its_own_number():
    def attend(n, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: some(n, heads, x), x)  # 3 blocks of queries

    def step(x, n):
        def microbatch(x):
            x = attend(n, square(x))
            with jax.named_scope("sweep/refresh"):
                return some(n, lambda x: attend(n, square(square(x))), x)

        with jax.named_scope("sweep/turn"):
            return some(n, microbatch, x)

    given = Trips(5, Passes(visits=1.5), chunks=2.0, continued=Passes(visits=4.0))
    found = counted(step, given=given)
    assert found == Flops(
        weights=5 * (1 + 2.0 * 2) * ONE, attention=5 * (3 * 1.5 + 2.0 * 3 * 4.0) * ONE
    )
    assert found.total == found.weights + found.attention


def test_chunks_without_a_prediction_are_not_counted():
    def chunks(x, n):
        idle = jax.checkpoint(lambda x: jax.lax.cond(n > 0, square, jnp.zeros_like, x))
        return jax.lax.map(idle, jnp.stack([x] * 4))

    assert counted(chunks, given=Trips(1, Passes(predicting=0.25))).weights == ONE


def test_what_is_computed_again_is_told_from_its_derivatives():
    def f(x, n):
        with jax.named_scope("again"):
            _, back = jax.vjp(lambda x, y: heads(x) @ y, x, x)
        return back(x)[0]

    # The product of heads and the one after it; of each the derivatives, of heads by both sides.
    assert counted(f) == Flops(weights=3 * ONE, attention=3 * ONE, again=2 * ONE)


def test_the_branch_of_the_platform_counts():
    def f(x, n):
        twice = lambda x: square(square(x))  # noqa: E731
        return jax.lax.platform_dependent(x, cpu=twice, default=square)

    assert counted(f, platform="cpu").weights == 2 * ONE
    assert counted(f, platform="gpu").weights == ONE


def batch_of(depth, end, target, microbatches):
    tokens = np.zeros_like(depth)
    nothing = np.zeros((1, 1), np.float32)
    return TurnBatch(
        tokens, depth, end, tokens, target, nothing, nothing, nothing[0], np.int32(microbatches)
    )


def two_branches():
    """A prompt of 64 tokens and two members of 64 after it; a microbatch of it, one of nothing."""
    depth = np.concatenate([np.arange(128), np.arange(64, 128)])
    end = np.concatenate([np.full(64, 192), np.full(64, 128), np.full(64, 192)])
    fold = lambda x: np.stack([x, np.zeros_like(x)])[:, None].astype(np.int32)  # noqa: E731
    return fold(depth), fold(end)


def test_loops_run_as_often_as_the_trees_and_targets_say():
    depth, end = two_branches()
    target = np.full((2, 1, 192), NOTHING, np.int32)
    call = Call("score", None, (), batch_of(depth, end, target, 1), None)
    # Of three blocks of 64: the prompt sees itself, each member itself and the prompt.
    assert trips(call, ARCH) == Trips(1, Passes(visits=5 / 3, predicting=0.0))
    assert call.positions == 192

    wide = np.full((1, 1, 512), NOTHING, np.int32)
    wide[0, 0, 100] = 7
    zeros, ends = np.zeros((1, 1, 512), np.int32), np.arange(1, 513, dtype=np.int32)[None, None]
    call = Call("score", None, (), batch_of(zeros, ends, wide, 1), None)
    assert trips(call, ARCH).rows.predicting == 0.25  # the first of four chunks of 128


def test_continued_chunks_see_their_own_branch():
    depth, end = two_branches()
    target = np.zeros((2, 1, 192), np.int32)
    shape = (2, 3, 1, 128)  # microbatches, chunks of each, rows, tokens
    at = np.full(shape, 127, np.int32)  # after the first member's last token
    more = RefreshBatch(
        **dict.fromkeys(RefreshBatch._fields, None)
        | {
            "tokens_MQRC": np.zeros(shape, np.int32),
            "depth_MQRC": np.broadcast_to(128 + np.arange(128, dtype=np.int32), shape),
            "end_MQRC": np.full(shape, 128, np.int32),
            "at_MQRC": at,
            "target_MQRC": np.full(shape, NOTHING, np.int32),
            "chunks_M": np.array([2, 0], np.int32),
        }
    )
    call = Call("turn_step", None, (), batch_of(depth, end, target, 1), more)
    found = trips(call, ARCH)
    # A block of 64 sees the prompt and the member, but not the other one; then itself, and the
    # second block the first one too.
    assert (found.chunks, found.continued) == (2.0, Passes((3 + 4) / 2, predicting=0.0))
    assert call.positions == 192 + 2 * 128


def causal(length):
    depth = np.arange(length, dtype=np.int32)[None, None]
    return depth, np.full_like(depth, length)


def test_a_gpu_s_kernels_count_the_pairs_of_blocks_that_they_visit():
    """Their branch is CUDA's, and they estimate no cost of their own."""
    L, H, d = 256, 4, 16
    depth, end = causal(L)
    call = Call("score", None, (), batch_of(depth, end, np.zeros_like(depth), 1), None)
    arch = dataclasses.replace(ARCH, dtype="bfloat16")
    given = trips(call, arch, "gpu").rows
    # Two blocks of 128 held: the first meets two of 64, the second four. Two of keys likewise.
    assert (given.pairs, given.key_pairs) == (2 + 4, 4 + 2)

    def loss(q, k, v, depth, end):
        tree_mask = tree_mask_of(Tree(depth, end))
        return attend_trees(q, KeyValues(k, v), tree_mask, kernel="cudnn").astype(jnp.float32).sum()

    like = jax.ShapeDtypeStruct
    q, k = (like((1, L, heads, d), jnp.bfloat16) for heads in (H, 2))
    numbers = like((1, L), jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, numbers, numbers)
    found = count(traced.jaxpr, Trips(1, given), "gpu")
    product = H * 6 * 2 * 128 * 64 * d  # of all heads and pairs
    # Forwards 2; for queries scores again and 2 more; for keys 2 again and 2 more.
    assert found == Flops(attention=9 * product, again=3 * product)
