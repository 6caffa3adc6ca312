"""Attention over token trees by loops over the visible pairs of blocks, for CPU.

Queries and keys are cut into blocks. Compute follows the number of pairs that
`tree_mask.visited_blocks` marks; memory grows with the length, not with its square.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from seeupo_jax.policy.kernels.derivatives import RECOMPUTE
from seeupo_jax.policy.kernels.scores import bound, unbound_gradient
from seeupo_jax.policy.kernels.tree_mask import (
    FLOOR,
    MASKED,
    BlockPairs,
    TreeMask,
    list_block_pairs,
    split_blocks,
    split_tree_mask,
    visible_pairs,
    visited_blocks,
)


def attend(
    q_NLHd: jax.Array,
    k_NCKd: jax.Array,
    v_NCKd: jax.Array,
    *tree_mask: jax.Array,
    window: int | None,
    cap: float | None = None,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of each query to its visible keys.

    Heads are grouped over the key-value heads (GQA). Scores and softmax are float32. A query
    without a visible key gives 0, and no gradient.

    Args:
      q_NLHd: [N, L, H, head_dim].
      k_NCKd, v_NCKd: [N, C, kv_heads, head_dim].
      tree_mask: the arrays of a `TreeMask`.
      window: how many positions are visible, the query's own included; None: all.
      cap: of scores, as `scores.bound`.
      block: queries, and keys, of a block; None: `block_for`.

    Returns: [N, L, H, head_dim] in the dtype of q; the logsumexp of the scores, float32 [N, L, H].
    """
    N, L, H, _ = q_NLHd.shape
    block = block_for(H) if block is None else block
    mask = TreeMask(*tree_mask)
    visits = list_block_pairs(visited_blocks(mask, window=window, block=block))
    # The blocks of all rows in one list: [rows * blocks, block].
    blocks = TreeMask(*(x.reshape(-1, block) for x in split_tree_mask(mask, block)))
    qkv = (_heads_first(x, block, k_NCKd.shape[2]) for x in (q_NLHd, k_NCKd, v_NCKd))
    out, logsumexp = _loop(*qkv, blocks, visits, N, window, cap)
    out, logsumexp = (_heads_last(x, N, H)[:, :L] for x in (out, logsumexp[..., None]))
    return out, logsumexp[..., 0]


def block_for(heads: int, longest: int | None = None) -> int:
    """Tokens of a block in the loops.

    Args:
      longest: tokens of the longest path in a tree; None: any.
    """
    # Where paths are short, few keys of a block are visible. Trees of 8 paths, measured as below:
    # 32 is 1.4x as fast as 64 with paths of 60 tokens, 1.2x with 85, 1.1x with 170, 0.9x with 300.
    if longest is not None and longest <= 128:
        return 32
    # The scores of all heads for a pair of blocks fit in a core's cache. Forward and backward in
    # float32 on two shared CPU cores, 4 heads: 1.2x to 1.5x faster than with 128 on trees of 550
    # to 3804 tokens. With 14 heads and 1870 tokens 48 is 1.6x faster than 128, and 64 no faster.
    return 64 if heads <= 8 else 48


def _heads_first(x_NLHd: jax.Array, block: int, kv_heads: int) -> jax.Array:
    """[rows * blocks, kv_heads, groups * block, head_dim], for plain batched matrix products."""
    N, _, H, d = x_NLHd.shape
    groups = H // kv_heads
    x = split_blocks(x_NLHd, block).reshape(-1, block, kv_heads, groups, d)
    return x.transpose(0, 2, 3, 1, 4).reshape(-1, kv_heads, groups * block, d)


def _heads_last(x: jax.Array, N: int, H: int) -> jax.Array:
    blocks, kv_heads, rows, d = x.shape
    groups = H // kv_heads
    x = x.reshape(blocks, kv_heads, groups, rows // groups, d).transpose(0, 3, 1, 2, 4)
    return x.reshape(N, -1, H, d)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _loop(*arguments: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(*arguments)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: TreeMask,
    visits: BlockPairs,
    N: int,
    window: int | None,
    cap: float | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    """An online softmax over the visits of one block of queries after another."""

    def queries(r: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_b = _at(q, r)

        def visit(t: jax.Array, carry: tuple) -> tuple:
            most, total, out = carry
            c = _key_block(q, k, visits, N, r, t)
            scores = _scores(q_b, _at(k, c), blocks, r, c, window, cap)
            grown = jnp.maximum(most, scores.max(2))
            weights, shrink = jnp.exp(scores - grown[:, :, None]), jnp.exp(most - grown)
            out = out * shrink[:, :, None] + _dot(
                "kqc,kcd->kqd", weights.astype(v.dtype), _at(v, c)
            )
            return grown, total * shrink + weights.sum(2), out

        empty = jnp.zeros(q_b.shape, jnp.float32)
        begin = (jnp.full_like(empty[:, :, 0], FLOOR), empty[:, :, 0], empty)
        most, total, out = jax.lax.fori_loop(*visits.start_B[r + jnp.arange(2)], visit, begin)
        total = jnp.where(total > 0, total, 1.0)  # of a query without a visible key
        return (out / total[:, :, None]).astype(q.dtype), most + jnp.log(total)

    out, logsumexp = jax.lax.map(queries, jnp.arange(q.shape[0]))
    return (out, logsumexp), (q, k, v, blocks, visits, out, logsumexp)


def _backward(
    N: int,
    window: int | None,
    cap: float | None,
    residuals: tuple,
    d_results: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    q, k, v, blocks, visits, out, logsumexp = residuals
    d_out, d_logsumexp = d_results
    along = jnp.sum(d_out.astype(jnp.float32) * out, axis=3) - d_logsumexp

    def queries(r: jax.Array, carry: tuple) -> tuple:
        d_q, *d_kv = carry
        q_b, d_out_b, logsumexp_b, along_b = (_at(x, r) for x in (q, d_out, logsumexp, along))

        def visit(t: jax.Array, carry: tuple) -> tuple:
            d_q_b, d_k, d_v = carry
            c = _key_block(q, k, visits, N, r, t)
            k_b = _at(k, c)
            with jax.named_scope(RECOMPUTE):
                scores = _scores(q_b, k_b, blocks, r, c, window, cap)
            weights = jnp.exp(scores - logsumexp_b[:, :, None])
            d_weights = _dot("kqd,kcd->kqc", d_out_b, _at(v, c))
            d_scores = weights * (d_weights - along_b[:, :, None]) * q.shape[3] ** -0.5
            d_scores = unbound_gradient(d_scores, scores, cap)
            weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
            # The small operand first, the result turned around: faster on CPU than the other way.
            d_v_c = _dot("kqd,kqc->kdc", d_out_b, weights).swapaxes(1, 2)
            d_k_c = _dot("kqd,kqc->kdc", q_b, d_scores).swapaxes(1, 2)
            d_v, d_k = _put(d_v, _at(d_v, c) + d_v_c, c), _put(d_k, _at(d_k, c) + d_k_c, c)
            return d_q_b + _dot("kqc,kcd->kqd", d_scores, k_b), d_k, d_v

        begin = (jnp.zeros(q_b.shape, jnp.float32), *d_kv)
        d_q_b, *d_kv = jax.lax.fori_loop(*visits.start_B[r + jnp.arange(2)], visit, begin)
        return _put(d_q, d_q_b.astype(q.dtype), r), *d_kv

    begin = (jnp.zeros_like(q), *(jnp.zeros(x.shape, jnp.float32) for x in (k, v)))
    d_q, d_k, d_v = jax.lax.fori_loop(0, q.shape[0], queries, begin)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_loop.defvjp(_forward, _backward)


def _key_block(
    q: jax.Array, k: jax.Array, visits: BlockPairs, N: int, r: jax.Array, t: jax.Array
) -> jax.Array:
    """The block of keys, among those of all rows, that the r-th block of queries visits at t."""
    queries, keys = q.shape[0] // N, k.shape[0] // N
    return r // queries * keys + visits.pair_T[t + 1] % keys


def _scores(
    q_b: jax.Array,
    k_b: jax.Array,
    blocks: TreeMask,
    r: jax.Array,
    c: jax.Array,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    """Scores of a pair of blocks, [kv_heads, groups * block, block]."""
    here = TreeMask(*(_at(x, at) for x, at in zip(blocks, (r, r, c, c, c), strict=True)))
    visible_qc = visible_pairs(here, window)
    scores = bound(_dot("kqd,kcd->kqc", q_b, k_b) * q_b.shape[2] ** -0.5, cap)
    grouped = scores.reshape(k_b.shape[0], -1, *visible_qc.shape)
    return jnp.where(visible_qc[None, None], grouped, MASKED).reshape(scores.shape)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _put(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, 0)


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
