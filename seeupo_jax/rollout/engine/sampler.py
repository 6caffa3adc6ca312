"""The sampler's programs: prefill and decode over a paged KV cache.

Axes beyond the legend in `types.py`: R rows of one dispatch, S slots, P pages of a row, W words of
a mask over the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.parallel.mesh import constrain, per_shard
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.delta_net import (
    STATE_AXES,
    DeltaStates,
    new_states,
    put_states,
    take_states,
)
from seeupo_jax.policy.kernels import paged
from seeupo_jax.policy.kernels.attention import NOWHERE
from seeupo_jax.policy.kernels.paged import Pages, PageTable
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.engine.grammar import apply_mask
from seeupo_jax.rollout.engine.row_sampling import (
    RowSampling,
    begin_histories,
    count_tokens,
    draw_rows,
    top_size,
)
from seeupo_jax.rollout.engine.sampling import (
    Sampling,
    Streams,
    draw,
    relative_entropy,
    stream_keys,
)


class Slots(NamedTuple):
    """The state of each slot's action that stays on the device between dispatches.

    token_S: int32, the last token, not in the cache yet; position_S: int32, where it goes.
    step_S: int32, how many tokens of the action have been sampled. alive_S: bool, not at its end.
    history_SV: int32, the tokens of the context and the action, where rows have their own sampling;
      see `row_sampling`.
    """

    token_S: jax.Array
    position_S: jax.Array
    step_S: jax.Array
    alive_S: jax.Array
    history_SV: jax.Array | None = None


class SlotRows(NamedTuple):
    """The rows of one decode dispatch.

    slot_R: int32, whose row it is, among its shard's slots; one past the last: padding.
    fresh_R: bool, the action begins, after token_R (int32) at position_R (int32).
    limit_R: int32, tokens that the action may have.
    mask_RW: uint32, bits of the tokens that a grammar allows next; None: all.
    own: the sampling of each row; None: the program's.
    """

    slot_R: jax.Array
    fresh_R: jax.Array
    token_R: jax.Array
    position_R: jax.Array
    limit_R: jax.Array
    mask_RW: jax.Array | None = None
    own: RowSampling | None = None


class Sampled(NamedTuple):
    """The samples of a dispatch: tokens_RK and logp_RK, the first count_R of each row.

    alive_R: the action is not at its end. steps: how many the dispatch took, int32 [1].
    entropy_RK: of the tokens that are among an action's first ones (`Action.entropy`), 0 of others;
      None: not computed.
    routed_RKG: experts of the tokens that these were sampled behind; None: not recorded.
    top_RKT, top_logp_RKT: the likeliest tokens, where rows have their own sampling.
    """

    tokens_RK: jax.Array
    logp_RK: jax.Array
    count_R: jax.Array
    alive_R: jax.Array
    steps: jax.Array
    entropy_RK: jax.Array | None = None
    routed_RKG: jax.Array | None = None
    top_RKT: jax.Array | None = None
    top_logp_RKT: jax.Array | None = None


HISTORY_AXES = ("rows", "vocab")
LayerCache = Pages | DeltaStates  # of a layer with attention, of a recurrent one


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def allocate(
    arch: Architecture,
    pages: int,
    page_size: int,
    slots: int,
    states: int,
    histories: bool = False,
) -> tuple[Sequence[LayerCache], Slots]:
    """An empty cache and empty slots, laid out on the mesh in force.

    Args:
      histories: whether slots have one, as of `Slots`.
    """

    def make() -> jax.Array:
        return constrain(jnp.zeros(slots, jnp.int32), "rows")

    paged_layers = iter(paged.new_pages(arch, pages, page_size))
    cache = [
        new_states(arch, states) if arch.is_recurrent(layer) else next(paged_layers)
        for layer in range(arch.layers)
    ]
    history_SV = None
    if histories:
        empty_SV = jnp.zeros((slots, arch.vocab_size), jnp.int32)
        history_SV = constrain(empty_SV, *HISTORY_AXES)
    return cache, Slots(make(), make(), make(), make() > 0, history_SV)


@functools.partial(jax.jit, donate_argnames="slots")
def begin_contexts(slots: Slots, slot_R: jax.Array, context_RC: jax.Array) -> Slots:
    """Slots whose histories begin; see `begin_histories`."""
    assert slots.history_SV is not None
    history_SV = begin_histories(slots.history_SV, slot_R, context_RC)
    return slots._replace(history_SV=constrain(history_SV, *HISTORY_AXES))


def cache_axes(layer: LayerCache) -> tuple[str | None, ...]:
    """Logical axes of a layer's cache on the mesh in force; those of an array are the first."""
    return STATE_AXES if isinstance(layer, DeltaStates) else paged.page_axes(layer.k.shape[0])


@functools.partial(
    jax.jit, static_argnames=("network", "block", "records"), donate_argnames="pages"
)
def prefill(
    network: Network,
    params: Any,
    pages: Sequence[LayerCache],
    tokens_RL: jax.Array,
    position_RL: jax.Array,
    page_table: PageTable,
    block: int | None,
    records: bool = False,
) -> tuple[Sequence[LayerCache], jax.Array, jax.Array | None]:
    """Puts keys and values of context tokens into the cache.

    Rows are tiles: several of them may continue one conversation. Position `NOWHERE` is padding.

    Args:
      records: whether to return the experts of the tokens.

    Returns: the cache; an int32 [R] that is available once the cache is; and the experts
      [R, L, G], or None.
    """
    with jax.named_scope("rollout/prefill"):
        model = network.bind(params)
        found = model.extend(tokens_RL, position_RL, pages, page_table, block=block)
    routed_RLG = constrain(found.routed_NLG, "rows", None, None) if records else None
    return found.keys, position_RL[:, 0] + 0, routed_RLG


@functools.partial(jax.jit, donate_argnames="pages")
def copy_pages(
    pages: Sequence[LayerCache], source_X: jax.Array, target_X: jax.Array
) -> Sequence[LayerCache]:
    """Copies pages; a target beyond the pool is none."""
    return [
        layer if isinstance(layer, DeltaStates) else paged.copy_pages(layer, source_X, target_X)
        for layer in pages
    ]


@functools.partial(
    jax.jit,
    static_argnames=("network", "sampling", "steps", "kernel", "block", "records", "fixed_steps"),
    donate_argnames=("pages", "slots"),
)
def decode(
    network: Network,
    sampling: Sampling,
    params: Any,
    pages: Sequence[LayerCache],
    slots: Slots,
    rows: SlotRows,
    page_table: PageTable,
    streams: Streams,
    steps: int,
    kernel: str,
    block: int | None,
    records: bool = False,
    fixed_steps: bool = False,
) -> tuple[Sampled, Sequence[LayerCache], Slots]:
    """Samples up to `steps` tokens a row; every row stops at its own end token or limit.

    Args:
      fixed_steps: whether all steps run even where every row has stopped. To stop with the last row
        is a collective over all row shards in every step, which must not go between TPU slices.
    """
    model, arch = network.bind(params), network.arch
    head_VD = model.head_VD(arch.dtype)
    end_ids = jnp.asarray(sampling.end_ids, jnp.int32)
    token_R, position_R, step_R, alive_R, history_RV = _of_rows(slots, rows)
    first_R = step_R
    pages, put_back = _states_of_rows(pages, page_table)
    page_table = page_table._replace(states=None)

    def body(carry: Any) -> Any:
        i, token_R, position_R, step_R, alive_R, history_RV, sampled, pages = carry
        at_R1 = jnp.where(alive_R, position_R, NOWHERE)[:, None]
        hidden_R1D, pages, routed_R1G, _ = model.extend(
            token_R[:, None], at_R1, pages, page_table, kernel=kernel, block=block
        )
        logits_RV = _logits(arch, hidden_R1D[:, 0], head_VD)
        drawn = _draw_next(logits_RV, history_RV, rows, streams, step_R, sampling, arch.tokens)
        sampled, drawn_R = _record(sampled, i, drawn, routed_R1G, alive_R), drawn[0]
        if history_RV is not None:
            history_RV = count_tokens(history_RV, drawn_R, alive_R)
        token_R = jnp.where(alive_R, drawn_R, token_R)
        ended_R = (drawn_R[:, None] == end_ids[None, :]).any(axis=1)
        position_R, step_R = position_R + alive_R, step_R + alive_R
        alive_R = alive_R & ~ended_R & (step_R < rows.limit_R)
        return i + 1, token_R, position_R, step_R, alive_R, history_RV, sampled, pages

    def unfinished(carry: Any) -> jax.Array:
        i, _, _, _, alive_R, *_ = carry
        return i < most if fixed_steps else (i < most) & alive_R.any()

    most = steps if rows.own is None else rows.own.most_R.max()
    padding = _padding(network, sampling, (token_R.shape[0], steps), records, rows.own)
    carry = jnp.int32(0), token_R, position_R, step_R, alive_R, history_RV, padding, pages
    with jax.named_scope("rollout/decode"):
        i, *after, drawn, pages = jax.lax.while_loop(unfinished, body, carry)
    _, _, step_R, alive_R, _ = after

    tokens_RK, logp_RK, entropy_RK, routed_RKG, top = jax.tree.map(_by_rows, drawn)
    sampled = Sampled(
        tokens_RK,
        logp_RK,
        constrain(step_R - first_R, "rows"),
        constrain(alive_R, "rows"),
        i[None],
        entropy_RK,
        routed_RKG,
        *top,
    )
    return sampled, put_back(pages), _remember(slots, rows, Slots(*after))


def _states_of_rows(
    cache: Sequence[LayerCache], page_table: PageTable
) -> tuple[Sequence[LayerCache], Callable[[Sequence[LayerCache]], Sequence[LayerCache]]]:
    """The cache with the rows' states in place of each pool, and what puts them into the pools.

    Once a dispatch: every step would read and write each state three times.
    """
    states = page_table.states

    def take(layer: LayerCache) -> LayerCache:
        return take_states(layer, states) if isinstance(layer, DeltaStates) else layer

    def put(before: LayerCache, after: LayerCache) -> LayerCache:
        return put_states(before, after, states) if isinstance(before, DeltaStates) else after

    return [*map(take, cache)], lambda after: [*map(put, cache, after)]


def _by_rows(x: jax.Array) -> jax.Array:
    return constrain(x, "rows", *(None,) * (x.ndim - 1))


def _padding(
    network: Network,
    sampling: Sampling,
    shape: tuple[int, int],
    records: bool,
    own: RowSampling | None,
) -> tuple[Any, ...]:
    """Empty arrays for a dispatch's samples, [R, K]; see `Sampled`."""
    empty, routing = jnp.zeros(shape), network.arch.routing
    entropy_RK = empty if sampling.entropy_tokens else None
    routed_RKG = jnp.zeros((*shape, routing.size), routing.dtype) if records else None
    empty_RKT = jnp.zeros((*shape, 0 if own is None else top_size(network.arch.vocab_size)))
    top = [] if own is None else [empty_RKT.astype(jnp.int32), empty_RKT]
    return empty.astype(jnp.int32), empty, entropy_RK, routed_RKG, top


def _record(
    sampled: tuple[Any, ...],
    i: jax.Array,
    drawn: tuple[Any, ...],
    routed_R1G: jax.Array | None,
    alive_R: jax.Array,
) -> tuple[Any, ...]:
    """A dispatch's samples with those of step i, as `_draw_next` returns them."""
    tokens_RK, logp_RK, entropy_RK, routed_RKG, top = sampled
    token_R, logp_R, entropy_R, top_now = drawn
    tokens_RK = tokens_RK.at[:, i].set(jnp.where(alive_R, token_R, 0))
    logp_RK = logp_RK.at[:, i].set(jnp.where(alive_R, logp_R, 0.0))
    if entropy_RK is not None:
        entropy_RK = entropy_RK.at[:, i].set(jnp.where(alive_R, entropy_R, 0.0))
    if routed_RKG is not None:
        assert routed_R1G is not None
        routed_RKG = routed_RKG.at[:, i].set(routed_R1G[:, 0])
    top = [x_RKT.at[:, i].set(x_RT) for x_RKT, x_RT in zip(top, top_now, strict=True)]
    return tokens_RK, logp_RK, entropy_RK, routed_RKG, top


def _logits(arch: Architecture, hidden_RD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Float32 logits [R, V], -inf of ids that no token has."""
    product_RV = jnp.einsum("nd,vd->nv", hidden_RD, head_VD, preferred_element_type=jnp.float32)
    if not arch.unassigned:
        return arch.logits(product_RV)
    return jnp.where(jnp.asarray(arch.unassigned_V())[None, :], -jnp.inf, arch.logits(product_RV))


def _draw_next(
    logits_RV: jax.Array,
    history_RV: jax.Array | None,
    rows: SlotRows,
    streams: Streams,
    step_R: jax.Array,
    sampling: Sampling,
    tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None, Sequence[jax.Array]]:
    """Draws tokens [R]; returns them, their log-probabilities, the entropies of first tokens, and
    the likeliest tokens with their log-probabilities.

    tokens: of the vocabulary.
    """
    masked = rows.mask_RW is not None
    if masked:
        logits_RV = apply_mask(logits_RV, rows.mask_RW)
    keys_R = stream_keys(streams, step_R)
    if rows.own is not None:
        token_R, logp_R, *top = draw_rows(logits_RV, history_RV, keys_R, rows.own)
        return token_R, logp_R, None, top
    token_R, logp_R = draw(logits_RV, keys_R, sampling, masked=masked)
    if not sampling.entropy_tokens:
        return token_R, logp_R, None, ()
    entropy_R = relative_entropy(logits_RV, sampling, tokens)
    return token_R, logp_R, jnp.where(step_R < sampling.entropy_tokens, entropy_R, 0.0), ()


def _of_rows(slots: Slots, rows: SlotRows) -> Slots:
    """The state of the rows' slots, or the initial state of a new action."""

    def take(x_S: jax.Array) -> jax.Array:
        axes = _slot_axes(x_S)
        return per_shard(
            lambda x_S, slot_R: x_S.at[slot_R].get(mode="fill", fill_value=0),
            (axes, ("rows",)),
            axes,
        )(x_S, rows.slot_R)

    token_R, position_R, step_R, alive_R, history_RV = jax.tree.map(take, slots)
    fresh_R = rows.fresh_R
    return Slots(
        jnp.where(fresh_R, rows.token_R, token_R),
        jnp.where(fresh_R, rows.position_R, position_R),
        jnp.where(fresh_R, 0, step_R),
        fresh_R | alive_R,
        history_RV,  # it has begun before
    )


def _remember(slots: Slots, rows: SlotRows, after: Slots) -> Slots:
    def put(x_S: jax.Array, x_R: jax.Array) -> jax.Array:
        axes = _slot_axes(x_S)
        return per_shard(
            lambda x_S, x_R, slot_R: x_S.at[slot_R].set(x_R, mode="drop"),
            (axes, axes, ("rows",)),
            axes,
        )(x_S, x_R, rows.slot_R)

    return jax.tree.map(put, slots, after)


def _slot_axes(x: jax.Array) -> tuple[str, ...]:
    return HISTORY_AXES[: x.ndim]
