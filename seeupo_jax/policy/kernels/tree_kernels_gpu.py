"""Attention over token trees as Pallas kernels for GPU (Triton), forward and backward.

A program accumulates for one head and one block of queries, or of keys, in a loop over the list of
blocks that this one visits. No two programs add to one sum: their order changes no result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from seeupo_jax.policy.kernels.derivatives import FUSED, RECOMPUTE, dot, dot_t
from seeupo_jax.policy.kernels.scores import bound, unbound_gradient
from seeupo_jax.policy.kernels.tree_mask import (
    FLOOR,
    MASKED,
    BlockPairs,
    TreeMask,
    list_block_pairs,
    split_tree_mask,
    visible,
    visited_blocks,
)

WIDEST = 128  # channels of a head; the sums of wider ones do not fit in registers
_LOG2_E = math.log2(math.e)
_LEAST = 16  # rows, columns and channels of a product that Triton takes
BLOCKS = {2: (128, 64), 4: (32, 32)}  # by bytes of a number: rows held, rows visited
# How an array is cut, a letter an axis: n one row, h one head of queries, g the head of keys that
# it uses, b the block whose sums the program holds, 0 the axis whole.
_HELD, _VISITED, _ROWS_HELD, _ROWS_VISITED = "nbh0", "n0h0", "nhb", "nh0"
_KEYS_HELD, _KEYS_VISITED, _PLACES_HELD, _PLACES_VISITED = "nbg0", "n0g0", "n0b", "n00"

Refs = Sequence[jax.Array]  # arrays in the GPU's memory, which a kernel reads and writes in place
# Runs over the visits of a block, given what each makes of sums so far, and sums to begin with.
Loop = Callable[[Callable[[Any, tuple], tuple], tuple], tuple]


class _Plan(NamedTuple):
    """The static sizes that the kernels are compiled for.

    held, visited: rows of the block that a program accumulates for, and of those that it visits.
    channels: of a head, before padding.
    """

    held: int
    visited: int
    channels: int
    window: int | None
    cap: float | None

    @property
    def scale(self) -> float:
        return self.channels**-0.5

    def scores(self, product: jax.Array) -> jax.Array:
        """Scores for a softmax of powers of 2, which a GPU has an instruction for."""
        if self.cap is None:
            return product * (self.scale * _LOG2_E)
        return bound(product * self.scale, self.cap) * _LOG2_E

    @property
    def cap_2(self) -> float | None:
        """The bound of `scores`."""
        return None if self.cap is None else self.cap * _LOG2_E


def attend(
    q_NLHd: jax.Array,
    k_NCKd: jax.Array,
    v_NCKd: jax.Array,
    *tree_mask: jax.Array,
    window: int | None,
    cap: float | None = None,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`tree_attention.attend` by kernels, which CUDA compiles and CPU interprets.

    Raises:
      ValueError: a head_dim above 128, or a block that is no power of 2 from 16 on.
    """
    N, L, _, d = q_NLHd.shape
    if d > WIDEST:
        raise ValueError(
            f"attention over token trees: got head_dim={d}; allowed by triton: up to {WIDEST}."
        )
    if block is not None and (block < _LEAST or block & (block - 1)):
        raise ValueError(
            f"attention over token trees: got block={block}; allowed: powers of 2 from {_LEAST}."
        )
    held, other = BLOCKS[q_NLHd.dtype.itemsize] if block is None else (block, block)
    mask = TreeMask(*tree_mask)
    visited = visited_blocks(mask, window=window, block=held, key_block=other)
    visited_by = visited_blocks(mask, window=window, block=other, key_block=held)
    visits = list_block_pairs(visited), list_block_pairs(visited_by.transpose(0, 2, 1))
    order, depth, first, end, key_depth = (x.reshape(N, -1) for x in split_tree_mask(mask, held))
    places = jnp.stack([order, depth], 1), jnp.stack([first, end, key_depth], 1)
    plan = _Plan(held, other, d, window, cap)
    qkv = (_padded(x, held) for x in (q_NLHd, k_NCKd, v_NCKd))
    out, logsumexp_2 = _kernels(*qkv, places, visits, plan)
    return out[:, :L, :, :d], logsumexp_2.transpose(0, 2, 1)[:, :L] / _LOG2_E


def _padded(x_NLHd: jax.Array, block: int) -> jax.Array:
    """Padded with zeros to whole blocks, and to channels that are a power of 2."""
    L, _, d = x_NLHd.shape[1:]
    wide = max(_LEAST, pl.next_power_of_2(d))
    return jnp.pad(x_NLHd, ((0, 0), (0, -L % block), (0, 0), (0, wide - d)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _kernels(*arguments: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(*arguments)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: tuple[jax.Array, jax.Array],
    visits: tuple[BlockPairs, BlockPairs],
    plan: _Plan,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    N, L, H, _ = q.shape
    out, logsumexp = _call(
        _attend,
        visits[0],
        [
            (q, _HELD),
            (k, _KEYS_VISITED),
            (v, _KEYS_VISITED),
            (places[0], _PLACES_HELD),
            (places[1], _PLACES_VISITED),
        ],
        [(q, _HELD), (jax.ShapeDtypeStruct((N, H, L), jnp.float32), _ROWS_HELD)],
        plan,
        last_first=True,
    )
    out, logsumexp = (checkpoint_name(x, FUSED) for x in (out, logsumexp))
    return (out, logsumexp), (q, k, v, places, visits, out, logsumexp)


def _backward(plan: _Plan, residuals: tuple, d_results: tuple[jax.Array, jax.Array]) -> tuple:
    q, k, v, places, visits, out, logsumexp = residuals
    d_out, d_logsumexp_2 = d_results
    along = jnp.sum(d_out.astype(jnp.float32) * out, axis=3).transpose(0, 2, 1)
    along -= d_logsumexp_2 * _LOG2_E

    def arrays(queries: str, keys: str, rows: str, order: str, interval: str) -> list:
        cuts = (queries, keys, keys, queries, rows, rows, order, interval)
        return list(zip((q, k, v, d_out, logsumexp, along, *places), cuts, strict=True))

    (d_q,) = _call(
        _queries_gradient,
        visits[0],
        arrays(_HELD, _KEYS_VISITED, _ROWS_HELD, _PLACES_HELD, _PLACES_VISITED),
        [(q, _HELD)],
        plan,
        last_first=True,
    )
    # Of each head of queries; the sum over those that share keys comes after it. So there are
    # enough programs where a pass has few rows.
    shares = jax.ShapeDtypeStruct((*k.shape[:2], *q.shape[2:]), jnp.float32)
    derivatives = _call(
        _keys_gradient,
        visits[1],
        arrays(_VISITED, _KEYS_HELD, _ROWS_VISITED, _PLACES_VISITED, _PLACES_HELD),
        [(shares, _HELD), (shares, _HELD)],
        plan,
        last_first=False,
    )
    N, C, kv_heads, d = k.shape
    d_k, d_v = (x.reshape(N, C, kv_heads, -1, d).sum(3).astype(k.dtype) for x in derivatives)
    return d_q, d_k, d_v, None, None


_kernels.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None],
    visits: BlockPairs,
    arrays: Sequence[tuple[jax.Array, str]],
    results: Sequence[tuple[jax.Array | jax.ShapeDtypeStruct, str]],
    plan: _Plan,
    *,
    last_first: bool,
) -> Sequence[jax.Array]:
    """Runs a kernel for each row, head and block that sums are held for.

    Args:
      kernel: of a loop over the block's visits, of the arrays, and of the results.
      arrays, results: each with how it is cut; queries and keys are the first two.
      last_first: whether the last blocks, which see most, begin, and the first ones fill the gaps.
    """
    (N, _, H, wide), kv_heads = arrays[0][0].shape, arrays[1][0].shape[2]
    count = (visits.start_B.size - 1) // N
    pairs = visits.pair_T.size - 2
    visited_T = jax.lax.rem(visits.pair_T[1:], jnp.int32(pairs // (N * count)))
    # Chosen by what the compiler says for H100: with fewer warps registers spill, with more a
    # product waits for the one before. In three stages a block is read while the one before it is
    # used, and the list one further ahead; deeper ones outgrow the shared memory of smaller GPUs.
    sums = plan.held * wide * sum(x.ndim == 4 for x, _ in results)
    params = pltriton.CompilerParams(num_warps=4 if sums <= 2**13 else 8, num_stages=3)

    def spec(x: jax.Array | jax.ShapeDtypeStruct, how: str) -> pl.BlockSpec:
        def index(h: jax.Array, n: jax.Array, b: jax.Array) -> tuple:
            b = count - 1 - b if last_first else b
            at = {"n": n, "h": h, "g": jax.lax.div(h, jnp.int32(H // kv_heads)), "b": b}
            return tuple(at.get(letter, 0) for letter in how)

        sizes = {"n": None, "h": None, "g": None, "b": plan.held}
        return pl.BlockSpec([sizes.get(*of) for of in zip(how, x.shape, strict=True)], index)

    def program(visited_ref: jax.Array, start_ref: jax.Array, *refs: jax.Array) -> None:
        n, b = (pl.program_id(axis) for axis in (1, 2))
        row = n * count + (count - 1 - b if last_first else b)

        def loop(visit: Callable[[Any, tuple], tuple], begin: tuple) -> tuple:
            def step(t: jax.Array, sums: tuple) -> tuple:
                return visit(pl.ds(visited_ref[t] * plan.visited, plan.visited), sums)

            return jax.lax.fori_loop(start_ref[row], start_ref[row + 1], step, begin)

        kernel(loop, refs[: len(arrays)], refs[len(arrays) :], plan)

    def run(*arrays_: jax.Array, interpret: bool) -> Sequence[jax.Array]:
        return pl.pallas_call(
            program,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results],
            grid=(H, N, count),
            in_specs=[spec(x, "0") for x in arrays_[:2]] + [spec(*array) for array in arrays],
            out_specs=[spec(*result) for result in results],
            compiler_params=params,
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )(*arrays_)

    return jax.lax.platform_dependent(
        visited_T,
        visits.start_B,
        *(x for x, _ in arrays),
        cuda=functools.partial(run, interpret=False),
        cpu=functools.partial(run, interpret=True),
    )


def _attend(loop: Loop, arrays: Refs, results: Refs, plan: _Plan) -> None:
    q_ref, k_ref, v_ref, order_ref, interval_ref = arrays
    out_ref, logsumexp_ref = results
    q = q_ref[...]
    columns = [order_ref[x, :][:, None] for x in range(2)]

    def visit(at: Any, sums: tuple) -> tuple:
        most, total, out = sums
        k, v = k_ref[at, :], v_ref[at, :]
        rows = (interval_ref[x, at][None, :] for x in range(3))
        visible_qc = visible(*columns, *rows, plan.window)
        scores = jnp.where(visible_qc, plan.scores(dot_t(q, k)), MASKED)
        grown = jnp.maximum(most, scores.max(1))
        weights, shrink = jnp.exp2(scores - grown[:, None]), jnp.exp2(most - grown)
        out = out * shrink[:, None] + dot(weights.astype(v.dtype), v)
        return grown, total * shrink + weights.sum(1), out

    zeros = jnp.zeros(plan.held, jnp.float32)
    begin = (zeros + FLOOR, zeros, jnp.zeros(q.shape, jnp.float32))
    most, total, out = loop(visit, begin)
    total = jnp.where(total > 0, total, 1.0)  # of a query without a visible key
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    logsumexp_ref[...] = most + jnp.log2(total)


def _queries_gradient(loop: Loop, arrays: Refs, results: Refs, plan: _Plan) -> None:
    q_ref, k_ref, v_ref, d_out_ref, logsumexp_ref, along_ref, order_ref, interval_ref = arrays
    (d_q_ref,) = results
    q, d_out = q_ref[...], d_out_ref[...]
    logsumexp, along = logsumexp_ref[...][:, None], along_ref[...][:, None]
    columns = [order_ref[x, :][:, None] for x in range(2)]

    def visit(at: Any, sums: tuple) -> tuple:
        k, v = k_ref[at, :], v_ref[at, :]
        rows = (interval_ref[x, at][None, :] for x in range(3))
        visible_qc = visible(*columns, *rows, plan.window)
        with jax.named_scope(RECOMPUTE):
            product = dot_t(q, k)
        scores = jnp.where(visible_qc, plan.scores(product), MASKED)
        d_scores = jnp.exp2(scores - logsumexp) * (dot_t(d_out, v) - along)
        d_scores = unbound_gradient(d_scores, scores, plan.cap_2)
        return (sums[0] + dot(d_scores.astype(k.dtype), k),)

    (d_q,) = loop(visit, (jnp.zeros(q.shape, jnp.float32),))
    d_q_ref[...] = (d_q * plan.scale).astype(d_q_ref.dtype)


def _keys_gradient(loop: Loop, arrays: Refs, results: Refs, plan: _Plan) -> None:
    q_ref, k_ref, v_ref, d_out_ref, logsumexp_ref, along_ref, order_ref, interval_ref = arrays
    d_k_ref, d_v_ref = results
    k, v = k_ref[...], v_ref[...]
    columns = [interval_ref[x, :][:, None] for x in range(3)]

    # Scores are keys by queries: no product needs the transpose of one.
    def visit(at: Any, sums: tuple) -> tuple:
        d_k, d_v = sums
        q, d_out = q_ref[at, :], d_out_ref[at, :]
        rows = (order_ref[x, at][None, :] for x in range(2))
        visible_cq = visible(*rows, *columns, plan.window)
        with jax.named_scope(RECOMPUTE):
            product, d_weights = dot_t(k, q), dot_t(v, d_out)
        scores = jnp.where(visible_cq, plan.scores(product), MASKED)
        weights = jnp.exp2(scores - logsumexp_ref[at][None, :])
        d_scores = weights * (d_weights - along_ref[at][None, :])
        d_scores = unbound_gradient(d_scores, scores, plan.cap_2)
        d_v += dot(weights.astype(d_out.dtype), d_out)
        return d_k + dot(d_scores.astype(q.dtype), q), d_v

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = loop(visit, (zeros, zeros))
    d_k_ref[...] = d_k * plan.scale
    d_v_ref[...] = d_v
