"""Causal attention over keys that lie in the same pass, in a cache, or in both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from seeupo_jax.parallel.mesh import head_axes, per_shard
from seeupo_jax.policy.kernels import fused, tree_attention, tree_kernels, tree_kernels_gpu
from seeupo_jax.policy.kernels.scores import add_sinks, bound, unbound_gradient
from seeupo_jax.policy.kernels.tree_attention import block_for
from seeupo_jax.policy.kernels.tree_mask import TreeMask, visible_pairs

# Scores that a device holds at once: 2**24 float32 are 64 MiB. But no fewer queries than these,
# which keep the matrix products large.
SCORES_AT_ONCE, QUERIES_AT_LEAST = 2**24, 256
# Queries below which GPU computes all pairs: the smaller part of a block of its kernel.
FEWEST_QUERIES = 64
FEW_KEYS = 512  # with which it saves no time on CPU to leave out pairs of blocks
NOWHERE = jnp.iinfo(jnp.int32).max  # the position of a key that is masked for all queries
_ATTENDED = "attended"  # a chunk's output: kept, where its scores are recomputed


class KeyValues(NamedTuple):
    """Keys and values of one layer.

    k, v: [N, C, kv_heads, head_dim].
    """

    k: jax.Array
    v: jax.Array


class Tree(NamedTuple):
    """Token trees that lie in rows, each in pre-order.

    depth_NL: int32, of each token in its sequence: its position.
    end_NL: int32, one past the last index of the token's subtree. A token attends to those whose
      subtree it lies in.
    """

    depth_NL: jax.Array
    end_NL: jax.Array


class Past(NamedTuple):
    """An earlier pass over rows of trees, which new tokens continue.

    keys: of each layer. tree: of its tokens, C a row.
    at_NL: int32, index in it of the token that each new token's tree hangs below: the same for all
      tokens of a tree.
    """

    keys: Sequence[KeyValues]
    tree: Tree
    at_NL: jax.Array


def tree_mask_of(tree: Tree, past: Past | None = None) -> TreeMask:
    """The attention mask of tokens of trees, and of the past's tokens that they continue."""
    N, L = tree.end_NL.shape
    index_NL = jnp.broadcast_to(jnp.arange(L)[None, :], (N, L))
    if past is None:
        return TreeMask(index_NL, tree.depth_NL, index_NL, tree.end_NL, tree.depth_NL)
    # New tokens are ordered between the past's token that they follow and the next. A coordinate is
    # the place in that merged order, up to C + L: at * (L + 1) + index would leave
    # int32 at 131,072 past and 16,384 new tokens.
    C = past.tree.end_NL.shape[1]
    count_NC = jax.vmap(functools.partial(jnp.bincount, length=C + 1))(past.at_NL + 1)
    before_NC = jnp.cumsum(count_NC, axis=1)  # new tokens that stand before each of the past's
    rank_NL = jnp.argsort(jnp.argsort(past.at_NL, axis=1), axis=1)  # stable: their own order
    place_NL = past.at_NL + 1 + rank_NL
    past_end_NC = past.tree.end_NL + jnp.take_along_axis(before_NC, past.tree.end_NL, axis=1)
    concatenate = functools.partial(jnp.concatenate, axis=1)
    return TreeMask(
        place_NL,
        tree.depth_NL,
        concatenate([jnp.arange(C)[None, :] + before_NC[:, :C], place_NL]),
        concatenate([past_end_NC, place_NL + tree.end_NL - index_NL]),
        concatenate([past.tree.depth_NL, tree.depth_NL]),
    )


def attend_trees(
    q_NLHd: jax.Array,
    keys: KeyValues,
    tree_mask: TreeMask,
    *,
    window: int | None = None,
    cap: float | None = None,
    sink_H: jax.Array | None = None,
    kernel: str = "xla",
    longest: int | None = None,
) -> jax.Array:
    """Softmax attention as `attend`, of each query to the keys that the tree mask shows it.

    Args:
      kernel: as `fused.select_kernel` gives it. With splash, trees have a kernel of their own on
        TPU, with cudnn on GPU; with xla only CPU skips masked pairs of blocks, with all_pairs
        no platform does.
      longest: tokens of the longest path in a tree, which sets the size of blocks on CPU.
    """
    kv_heads, heads = head_axes(keys.k.shape[2])
    query_axes = ("rows", "length", heads, "head_dim")
    key_axes = ("rows", None, kv_heads, "head_dim")
    by_query, all_ = ("rows", "length"), ("rows", None)
    layouts = [query_axes, key_axes, key_axes, by_query, by_query, all_, all_, all_]
    run = functools.partial(OF_TREES[kernel], window=window, cap=cap)
    if kernel == "xla":
        run = functools.partial(run, longest=longest)
    return attend_per_shard(run, layouts, query_axes, sink_H)(q_NLHd, *keys, *tree_mask)


def attend_per_shard(
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    layouts: Sequence[Sequence[str | None]],
    query_axes: Sequence[str | None],
    sink_H: jax.Array | None,
) -> Callable[..., jax.Array]:
    """Attention on every device's own part, of a function that also gives the scores' logsumexp."""
    if sink_H is None:
        return per_shard(lambda *arrays: attend(*arrays)[0], layouts, query_axes)

    def run(sink_H: jax.Array, *arrays: jax.Array) -> jax.Array:
        return add_sinks(*attend(*arrays), sink_H)

    return functools.partial(per_shard(run, [(query_axes[2],), *layouts], query_axes), sink_H)


def all_pairs(
    q_NLHd: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *tree_mask: jax.Array,
    window: int | None,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention from the scores of all pairs, and a mask; every query needs a visible key.

    Returns: as `tree_attention.attend`.
    """
    order_NL, depth_NL, first_NC, end_NC, key_depth_NC = tree_mask

    def attend(
        keys: KeyValues, q: jax.Array, order_NL: jax.Array, depth_NL: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        mask = TreeMask(order_NL, depth_NL, first_NC, end_NC, key_depth_NC)
        return _attend(q, keys, visible_pairs(mask, window), cap)

    return _in_chunks(attend, KeyValues(k, v), q_NLHd, order_NL, depth_NL)


def _by_platform(
    *arrays: jax.Array, window: int | None, cap: float | None, longest: int | None
) -> tuple[jax.Array, jax.Array]:
    queries, heads = arrays[0].shape[1:3]
    block = block_for(heads, longest)
    loops = functools.partial(tree_attention.attend, window=window, cap=cap, block=block)
    dense = functools.partial(all_pairs, window=window, cap=cap)
    if arrays[1].shape[1] <= FEW_KEYS or queries <= block_for(heads):
        return dense(*arrays)
    # A loop over small products is fast where they are computed one after the other anyway.
    return jax.lax.platform_dependent(*arrays, cpu=loops, default=dense)


def _on_gpu(q_NLHd: jax.Array, *arrays: jax.Array, **scoring: Any) -> tuple[jax.Array, jax.Array]:
    if q_NLHd.shape[1] < FEWEST_QUERIES:
        return all_pairs(q_NLHd, *arrays, **scoring)
    return tree_kernels_gpu.attend(q_NLHd, *arrays, **scoring)


OF_TREES = {  # by the name of the kernel
    "xla": _by_platform,
    "all_pairs": all_pairs,
    "splash": tree_kernels.attend,
    "cudnn": _on_gpu,
}


def attend(
    q_NLHd: jax.Array,
    keys: KeyValues,
    position_NL: jax.Array,
    key_position_NC: jax.Array,
    *,
    window: int | None = None,
    cap: float | None = None,
    sink_H: jax.Array | None = None,
    segment_NL: jax.Array | None = None,
    key_segment_NC: jax.Array | None = None,
    kernel: str = "xla",
) -> jax.Array:
    """Softmax attention of each query to the keys at its own position and before.

    Heads are grouped over the key-value heads (GQA). Scores and softmax are float32. On a mesh each
    device has its own rows, heads and queries; keys and values are gathered over `context`.

    Args:
      q_NLHd: [N, L, H, head_dim].
      position_NL, key_position_NC: int, of every token in its sequence.
      window: how many positions are visible, the query's own included; None: all before it.
      cap: of scores, as `scores.bound`. sink_H: as `scores.add_sinks`.
      segment_NL, key_segment_NC: int, which of the sequences packed in a row a token is of; only a
        query's own is visible to it. None: one sequence per row.
      kernel: xla | all_pairs | splash | cudnn. The last two are for passes over whole rows: the
        keys are the queries' own (`key_position_NC` is `position_NL`), and positions grow by one
        along a segment. `fused.select_kernel` says which shapes they take.

    Returns: [N, L, H, head_dim] in the dtype of q.

    Raises:
      ValueError: an unknown kernel, a fused one with keys of another pass or with sinks, segments
        on one side.
    """
    if (segment_NL is None) != (key_segment_NC is None):
        raise ValueError("attend: segment_NL and key_segment_NC must be given both or neither.")
    if kernel in ("xla", "all_pairs"):
        kv_heads, heads = head_axes(keys.k.shape[2])
        query_axes = ("rows", "length", heads, "head_dim")
        key_axes = ("rows", None, kv_heads, "head_dim")
        layouts = [query_axes, key_axes, key_axes, ("rows", "length"), ("rows", None)]
        arrays = [q_NLHd, *keys, position_NL, key_position_NC]
        if segment_NL is not None:
            layouts += [("rows", "length"), ("rows", None)]
            arrays += [segment_NL, key_segment_NC]
        run = functools.partial(_plain, window=window, cap=cap)
        return attend_per_shard(run, layouts, query_axes, sink_H)(*arrays)
    if kernel not in _FUSED:
        raise ValueError(
            f"attend: got kernel {kernel!r}; allowed: {', '.join(('xla', 'all_pairs', *_FUSED))}."
        )
    if sink_H is not None:
        raise ValueError(f"attend: kernel {kernel!r} got sinks; allowed: none.")
    if key_position_NC is not position_NL or key_segment_NC is not segment_NL:
        raise ValueError(
            f"attend: kernel {kernel!r} got keys of another pass; allowed: a pass over whole rows,"
            " with the same positions and segments for queries and keys."
        )
    return _FUSED[kernel](q_NLHd, keys.k, keys.v, segment_NL, window=window, cap=cap)


_FUSED = {"splash": fused.splash, "cudnn": fused.cudnn}


def _plain(
    q_NLHd: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position_NL: jax.Array,
    key_position_NC: jax.Array,
    segment_NL: jax.Array | None = None,
    key_segment_NC: jax.Array | None = None,
    *,
    window: int | None,
    cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    def attend(
        keys: KeyValues, q: jax.Array, position: jax.Array, segment: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        visible = _visible(position, key_position_NC, window, segment, key_segment_NC)
        return _attend(q, keys, visible, cap)

    return _in_chunks(attend, KeyValues(k, v), q_NLHd, position_NL, segment_NL)


def _in_chunks(
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    keys: KeyValues,
    q_NLHd: jax.Array,
    position_NL: jax.Array,
    segment_NL: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention in chunks of queries where the scores of all would take too much memory.

    The backward pass computes a chunk's scores again: memory grows with the row's length, not with
    its square. Queries do not depend on each other, so neither do their results on the chunks. The
    gradients that chunks give the keys and values are summed in float32.
    """
    N, L, H, _ = q_NLHd.shape
    chunk = max(QUERIES_AT_LEAST, SCORES_AT_ONCE // (N * H * keys.k.shape[1]))
    if chunk >= L:
        return attend(keys, q_NLHd, position_NL, segment_NL)
    count = -(-L // chunk)

    def fold(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        pad = ((0, 0), (0, count * chunk - L), *((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(jnp.pad(x, pad).reshape(N, count, chunk, *x.shape[2:]), 1, 0)

    wide = KeyValues(*(x.astype(jnp.float32) for x in keys))

    def attend_part(part: tuple[jax.Array | None, ...]) -> tuple[jax.Array, jax.Array]:
        return attend(KeyValues(*(x.astype(keys.k.dtype) for x in wide)), *part)

    parts = (fold(q_NLHd), fold(position_NL), fold(segment_NL))
    keep = jax.checkpoint_policies.save_only_these_names(_ATTENDED)
    results = jax.lax.map(jax.checkpoint(attend_part, policy=keep), parts)

    def unfold(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(N, count * chunk, *x.shape[3:])[:, :L]

    return jax.tree.map(unfold, results)


def _visible(
    position_NL: jax.Array,
    key_position_NC: jax.Array,
    window: int | None,
    segment_NL: jax.Array | None,
    key_segment_NC: jax.Array | None,
) -> jax.Array:
    """Whether each key is visible to each query, [N, L, C]."""
    query_NLC, key_NLC = position_NL[:, :, None], key_position_NC[:, None, :]
    visible_NLC = key_NLC <= query_NLC
    if window is not None:
        visible_NLC &= key_NLC > query_NLC - window
    if segment_NL is not None and key_segment_NC is not None:
        visible_NLC &= segment_NL[:, :, None] == key_segment_NC[:, None, :]
    return visible_NLC


def _attend(
    q_NLHd: jax.Array, keys: KeyValues, visible_NLC: jax.Array, cap: float | None
) -> tuple[jax.Array, jax.Array]:
    N, L, H, d = q_NLHd.shape
    kv_heads = keys.k.shape[2]
    groups = H // kv_heads
    # Heads before positions: plain batched matrix products, 3x faster on CPU than one einsum.
    q = q_NLHd.reshape(N, L, kv_heads, groups, d).transpose(0, 2, 3, 1, 4)
    q = q.reshape(N, kv_heads, groups * L, d)
    k, v = (x.transpose(0, 2, 1, 3) for x in keys)
    out, logsumexp = _weigh(q, k, v, visible_NLC, cap)
    out = out.reshape(N, kv_heads, groups, L, d).transpose(0, 3, 1, 2, 4)
    logsumexp = logsumexp.reshape(N, kv_heads, groups, L).transpose(0, 3, 1, 2)
    return out.reshape(N, L, H, d), logsumexp.reshape(N, L, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weigh(
    q: jax.Array, k: jax.Array, v: jax.Array, visible_NLC: jax.Array, cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of queries [N, kv_heads, groups * L, head_dim], shaped as they are.

    On CPU, the cost apart from the matrix products is that of passes over the scores. So the output
    is divided by the softmax's total, instead of the weights and their derivative; the derivative's
    mean under the softmax is taken from the output too.

    Returns: the output, and the logsumexp of every query's scores, float32.
    """
    return _weigh_forward(q, k, v, visible_NLC, cap)[0]


def _bounded_scores(q: jax.Array, k: jax.Array, cap: float | None) -> jax.Array:
    product = jnp.einsum("nkqd,nkcd->nkqc", q, k, preferred_element_type=jnp.float32)
    return bound(product * q.shape[-1] ** -0.5, cap)


def _weigh_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visible_NLC: jax.Array, cap: float | None
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    N, kv_heads, _, d = q.shape
    scores = _bounded_scores(q, k, cap)
    grouped = scores.reshape(N, kv_heads, -1, *visible_NLC.shape[1:])
    scores = jnp.where(visible_NLC[:, None, None], grouped, -1e30).reshape(scores.shape)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights.astype(q.dtype)
    weighted = jnp.einsum("nkqc,nkcd->nkqd", weights, v, preferred_element_type=jnp.float32)
    out = checkpoint_name((weighted / total).astype(q.dtype), _ATTENDED)
    return (out, (top + jnp.log(total))[..., 0]), (q, k, v, weights, total, out)


def _weigh_backward(
    cap: float | None,
    residuals: tuple[jax.Array, ...],
    d_results: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, weights, total, out = residuals
    d_out, d_logsumexp = d_results
    d_weighted = d_out.astype(jnp.float32) / total
    mean = jnp.sum(d_weighted * out, axis=-1, keepdims=True) - d_logsumexp[..., None] / total
    d_weighted = d_weighted.astype(q.dtype)
    d_weights = jnp.einsum("nkqd,nkcd->nkqc", d_weighted, v, preferred_element_type=jnp.float32)
    d_scores = weights * (d_weights - mean) * q.shape[-1] ** -0.5
    if cap is not None:
        d_scores = unbound_gradient(d_scores, _bounded_scores(q, k, cap), cap)
    d_scores = d_scores.astype(q.dtype)
    # The small operand first, then a transpose of the result: 3x faster on CPU than the other way.
    d_k = jnp.einsum("nkqd,nkqc->nkdc", q, d_scores).swapaxes(2, 3)
    d_v = jnp.einsum("nkqd,nkqc->nkdc", d_weighted, weights).swapaxes(2, 3)
    return jnp.einsum("nkqc,nkcd->nkqd", d_scores, k), d_k, d_v, None


_weigh.defvjp(_weigh_forward, _weigh_backward)


def concatenate(past: KeyValues, new: KeyValues) -> KeyValues:
    """Past keys and values followed by new ones."""
    return KeyValues(*(jnp.concatenate(pair, axis=1) for pair in zip(past, new, strict=True)))
