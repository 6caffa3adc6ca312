"""Attention over token trees as Pallas kernels for TPU, forward and backward.

The grid is a list of pairs of blocks, which the scalar core prefetches: a program makes a step for
each pair in which some key is visible to some query, and none for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from seeupo_jax.policy.kernels.derivatives import FUSED, RECOMPUTE, dot, dot_t
from seeupo_jax.policy.kernels.scores import bound, unbound_gradient
from seeupo_jax.policy.kernels.tree_mask import (
    FLOOR,
    MASKED,
    BlockPairs,
    TreeMask,
    list_block_pairs,
    split_blocks,
    split_tree_mask,
    visible,
    visited_blocks,
)

BLOCK = 256
Refs = Sequence[jax.Array]  # blocks in a kernel's memory, which it reads and writes in place
# How an array is cut, a letter an axis: n one row, h one head, i one block of queries, j one of
# keys, 0 the axis whole.
_Q, _Q_ROWS, _K = "nh0i0", "nh0i", "nhj0"
_ORDER, _INTERVAL, _INTERVAL_COLUMNS = "n0i", "n0j", "nj0"
_OF_QUERIES, _OF_KEYS = "nij", "nji"  # what the numbers are that make up a visit's
_LISTED = 2**17  # visits, of 4 bytes each, that half of the 1 MiB of scalar memory holds
_LANES = 128  # of a register, which a block of queries or keys fills


def attend(
    q_NLHd: jax.Array,
    k_NCKd: jax.Array,
    v_NCKd: jax.Array,
    *tree_mask: jax.Array,
    window: int | None,
    cap: float | None = None,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`tree_attention.attend` by kernels, which TPU compiles and CPU interprets.

    Raises:
      ValueError: 128 does not divide the block.
    """
    N, L, H, d = q_NLHd.shape
    if block is None:
        pairs = N * pl.cdiv(L, BLOCK) * pl.cdiv(k_NCKd.shape[1], BLOCK)
        block = BLOCK if pairs <= _LISTED else 2 * BLOCK
    if block % _LANES:
        raise ValueError(
            f"attention over token trees: got block={block}; allowed: multiples of {_LANES}."
        )
    kv_heads = k_NCKd.shape[2]
    mask = TreeMask(*tree_mask)
    visited = visited_blocks(mask, window=window, block=block)
    visits = list_block_pairs(visited), list_block_pairs(visited.transpose(0, 2, 1))
    order, depth, first, end, key_depth = (
        x.reshape(len(x), -1) for x in split_tree_mask(mask, block)
    )
    places = jnp.stack([order, depth], 1), jnp.stack([first, end, key_depth], 1)
    out, logsumexp = _kernels(
        _heads_first(q_NLHd, block, kv_heads),
        *(_heads_first(x, block, kv_heads)[:, :, 0] for x in (k_NCKd, v_NCKd)),
        places,
        visits,
        window,
        cap,
        block,
    )
    logsumexp = logsumexp.transpose(0, 3, 1, 2).reshape(N, -1, H)
    return out.transpose(0, 3, 1, 2, 4).reshape(N, -1, H, d)[:, :L], logsumexp[:, :L]


def _heads_first(x_NLHd: jax.Array, block: int, kv_heads: int) -> jax.Array:
    """[N, kv_heads, groups, length of whole blocks, head_dim]."""
    N, _, H, d = x_NLHd.shape
    x = split_blocks(x_NLHd, block).reshape(N, -1, kv_heads, H // kv_heads, d)
    return x.transpose(0, 2, 3, 1, 4)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _kernels(*arguments: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(*arguments)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: tuple[jax.Array, jax.Array],
    visits: tuple[BlockPairs, BlockPairs],
    window: int | None,
    cap: float | None,
    block: int,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    groups, d = q.shape[2], q.shape[4]
    out, logsumexp = _call(
        functools.partial(_attend, window=window, cap=cap),
        visits[0],
        _OF_QUERIES,
        [(q, _Q), (k, _K), (v, _K), (places[0], _ORDER), (places[1], _INTERVAL)],
        [(q, _Q), (jax.ShapeDtypeStruct(q.shape[:4], jnp.float32), _Q_ROWS)],
        [(groups, block, 1), (groups, block, 1), (groups, block, d)],
        block,
    )
    out, logsumexp = (checkpoint_name(x, FUSED) for x in (out, logsumexp))
    return (out, logsumexp), (q, k, v, places, visits, out, logsumexp)


def _backward(
    window: int | None,
    cap: float | None,
    block: int,
    residuals: tuple,
    d_results: tuple[jax.Array, jax.Array],
) -> tuple:
    q, k, v, places, visits, out, logsumexp = residuals
    d_out, d_logsumexp = d_results
    along = jnp.sum(d_out.astype(jnp.float32) * out, axis=4) - d_logsumexp
    groups, d = q.shape[2], q.shape[4]
    arrays = [(q, _Q), (k, _K), (v, _K), (d_out, _Q), (logsumexp, _Q_ROWS), (along, _Q_ROWS)]
    (d_q,) = _call(
        functools.partial(_queries_gradient, window=window, cap=cap),
        visits[0],
        _OF_QUERIES,
        [*arrays, (places[0], _ORDER), (places[1], _INTERVAL)],
        [(q, _Q)],
        [(groups, block, d)],
        block,
    )
    d_k, d_v = _call(
        functools.partial(_keys_gradient, window=window, cap=cap),
        visits[1],
        _OF_KEYS,
        [*arrays, (places[0], _ORDER), (places[1].transpose(0, 2, 1), _INTERVAL_COLUMNS)],
        [(k, _K), (v, _K)],
        [(block, d), (block, d)],
        block,
    )
    return d_q, d_k, d_v, None, None


_kernels.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None],
    visits: BlockPairs,
    held: str,
    arrays: Sequence[tuple[jax.Array, str]],
    results: Sequence[tuple[jax.Array | jax.ShapeDtypeStruct, str]],
    sums: Sequence[tuple[int, ...]],
    block: int,
) -> list[jax.Array]:
    """Runs a kernel on every visit; results of blocks without one are 0.

    Args:
      kernel: of whether the visit is the first, the last one of the block that sums are held for;
        and of blocks of the arrays, the results, and the sums, which last over its visits.
      held: `_OF_QUERIES` or `_OF_KEYS`, as visits are listed.
      arrays, results: each with how it is cut.
    """
    (q, _), (k, _) = arrays[:2]
    N, kv_heads = q.shape[:2]
    counts = {"i": q.shape[3] // block, "j": k.shape[2] // block}
    a, b = (counts[letter] for letter in held[1:])

    def spec(x: jax.Array | jax.ShapeDtypeStruct, how: str) -> pl.BlockSpec:
        sizes = {"n": None, "h": None, "i": block, "j": block}

        def index(h: jax.Array, t: jax.Array, pair_T: jax.Array) -> tuple:
            pair, second = _split(pair_T[t + 1], b)
            at = dict(zip(held, (*_split(pair, a), second), strict=True), h=h)
            return tuple(at.get(letter, 0) for letter in how)

        shape = [sizes.get(letter, size) for letter, size in zip(how, x.shape, strict=True)]
        return pl.BlockSpec(tuple(shape), index)

    def visit(pair_T: jax.Array, *refs: jax.Array) -> None:
        t = pl.program_id(1)
        before, here, after = (_split(pair_T[t + x], b)[0] for x in range(3))
        given, outputs_end = len(arrays), len(arrays) + len(results)
        kernel(
            here != before, here != after, refs[:given], refs[given:outputs_end], refs[outputs_end:]
        )

    def run(count: jax.Array, pair_T: jax.Array, *arrays_: jax.Array, interpret: bool) -> list:
        return pl.pallas_call(
            visit,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(kv_heads, count),
                in_specs=[spec(*array) for array in arrays],
                out_specs=[spec(*result) for result in results],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in sums],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            interpret=interpret,
        )(pair_T, *arrays_)

    outputs = jax.lax.platform_dependent(
        visits.start_B[-1],
        visits.pair_T,
        *(x for x, _ in arrays),
        tpu=functools.partial(run, interpret=False),
        cpu=functools.partial(run, interpret=True),
    )
    visited = jnp.repeat((jnp.diff(visits.start_B) > 0).reshape(N, a), block, axis=1)

    def filled(x: jax.Array, how: str) -> jax.Array:
        others = [axis for axis, letter in enumerate(how) if letter not in ("n", held[1])]
        return jnp.where(jnp.expand_dims(visited, others), x, jnp.zeros_like(x))

    return [filled(x, how) for x, (_, how) in zip(outputs, results, strict=True)]


def _split(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder. `//` would ask which TPU this is, where programs compile without."""
    return jax.lax.div(number, jnp.int32(by)), jax.lax.rem(number, jnp.int32(by))


def _visible_qc(order_ref: jax.Array, interval_ref: jax.Array, window: int | None) -> jax.Array:
    columns = (order_ref[x, :][:, None] for x in range(2))
    rows = (interval_ref[x : x + 1, :] for x in range(3))
    return visible(*columns, *rows, window)


def _attend(
    first: jax.Array,
    last: jax.Array,
    arrays: Refs,
    results: Refs,
    sums: Refs,
    *,
    window: int | None,
    cap: float | None,
) -> None:
    q_ref, k_ref, v_ref, order_ref, interval_ref = arrays
    out_ref, logsumexp_ref = results
    most_ref, total_ref, sum_ref = sums

    @pl.when(first)
    def _() -> None:
        most_ref[...] = jnp.full_like(most_ref, FLOOR)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    visible_qc = _visible_qc(order_ref, interval_ref, window)
    k, v = k_ref[...], v_ref[...]
    for g in range(q_ref.shape[0]):
        scores = bound(dot_t(q_ref[g], k) * k.shape[1] ** -0.5, cap)
        scores = jnp.where(visible_qc, scores, MASKED)
        most = most_ref[g]
        grown = jnp.maximum(most, scores.max(1, keepdims=True))
        weights, shrink = jnp.exp(scores - grown), jnp.exp(most - grown)
        most_ref[g] = grown
        total_ref[g] = total_ref[g] * shrink + weights.sum(1, keepdims=True)
        sum_ref[g] = sum_ref[g] * shrink + dot(weights.astype(v.dtype), v)

    @pl.when(last)
    def _() -> None:
        for g in range(q_ref.shape[0]):
            total = jnp.where(
                total_ref[g] > 0, total_ref[g], 1.0
            )  # of a query without a visible key
            out_ref[g] = (sum_ref[g] / total).astype(out_ref.dtype)
            logsumexp_ref[g, :] = (most_ref[g] + jnp.log(total))[:, 0]


def _queries_gradient(
    first: jax.Array,
    last: jax.Array,
    arrays: Refs,
    results: Refs,
    sums: Refs,
    *,
    window: int | None,
    cap: float | None,
) -> None:
    q_ref, k_ref, v_ref, d_out_ref, logsumexp_ref, along_ref, order_ref, interval_ref = arrays
    (d_q_ref,), (sum_ref,) = results, sums

    @pl.when(first)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    visible_qc = _visible_qc(order_ref, interval_ref, window)
    k, v = k_ref[...], v_ref[...]
    scale = k.shape[1] ** -0.5
    for g in range(q_ref.shape[0]):
        with jax.named_scope(RECOMPUTE):
            product = dot_t(q_ref[g], k)
        scores = jnp.where(visible_qc, bound(product * scale, cap), MASKED)
        weights = jnp.exp(scores - logsumexp_ref[g, :][:, None])
        d_scores = weights * (dot_t(d_out_ref[g], v) - along_ref[g, :][:, None]) * scale
        d_scores = unbound_gradient(d_scores, scores, cap)
        sum_ref[g] += dot(d_scores.astype(k.dtype), k)

    @pl.when(last)
    def _() -> None:
        d_q_ref[...] = sum_ref[...].astype(d_q_ref.dtype)


def _keys_gradient(
    first: jax.Array,
    last: jax.Array,
    arrays: Refs,
    results: Refs,
    sums: Refs,
    *,
    window: int | None,
    cap: float | None,
) -> None:
    q_ref, k_ref, v_ref, d_out_ref, logsumexp_ref, along_ref, order_ref, interval_ref = arrays

    @pl.when(first)
    def _() -> None:
        for sum_ref in sums:
            sum_ref[...] = jnp.zeros_like(sum_ref)

    # Scores are keys by queries: no product needs the transpose of one.
    rows = (order_ref[x : x + 1, :] for x in range(2))
    columns = (interval_ref[:, x : x + 1] for x in range(3))
    visible_cq = visible(*rows, *columns, window)
    k, v = k_ref[...], v_ref[...]
    d_k_sum, d_v_sum = sums
    scale = k.shape[1] ** -0.5
    for g in range(q_ref.shape[0]):
        q, d_out = q_ref[g], d_out_ref[g]
        with jax.named_scope(RECOMPUTE):
            product, d_weights = dot_t(k, q), dot_t(v, d_out)
        scores = jnp.where(visible_cq, bound(product * scale, cap), MASKED)
        weights = jnp.exp(scores - logsumexp_ref[g : g + 1, :])
        d_scores = weights * (d_weights - along_ref[g : g + 1, :]) * scale
        d_scores = unbound_gradient(d_scores, scores, cap)
        d_v_sum[...] += dot(weights.astype(d_out.dtype), d_out)
        d_k_sum[...] += dot(d_scores.astype(q.dtype), q)

    @pl.when(last)
    def _() -> None:
        for ref, sum_ref in zip(results, sums, strict=True):
            ref[...] = sum_ref[...].astype(ref.dtype)
