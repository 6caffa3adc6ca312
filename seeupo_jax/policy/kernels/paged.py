"""A KV cache in pages: rows of a pass write into it, and attend to it by tables of pages.

On a mesh the pages are cut over the axes of the rows: every row shard has a pool of its own, and
tables, prefixes and copies name pages and rows by their numbers within the shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from seeupo_jax.parallel.mesh import axis_parts, constrain, head_axes, kv_copies, per_shard
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.attention import NOWHERE, KeyValues, attend_per_shard
from seeupo_jax.policy.kernels.scores import bound

BLOCK = 256  # tokens of a row that are gathered at once
_KERNEL_BLOCK = 512  # tokens that the TPU kernel holds at once, at most
_LANES, _SUBLANES = 128, 8  # of a TPU register
T = TypeVar("T")
# A sum over no key has a top of _LOWEST: the weight of a hidden key, exp(_HIDDEN - top), is 0 then
# too, and so is that sum's own weight when it is merged with a sum over keys.
_LOWEST, _HIDDEN = -1e30, -2e30


class Pages(NamedTuple):
    """Keys and values of one layer, in pages.

    k, v: [kv_heads, pages, page_size, head_dim]. v: None: the keys are the values too, as latents.
    """

    k: jax.Array
    v: jax.Array | None


class Prefixes(NamedTuple):
    """Prefixes that several rows of a pass share, to be read once for all.

    table_QP: int32, the pages of each prefix.
    length_Q: int32, its tokens, a multiple of the page size; 0 for none.
    rows_QG: int32, the rows of this shard that begin with it; R (one past the last row) for none.
      A row begins with one prefix at most.
    """

    table_QP: jax.Array
    length_Q: jax.Array
    rows_QG: jax.Array


class StateRows(NamedTuple):
    """Which recurrent states, of their shard's pool, the rows of a pass read and write.

    read_R, write_R: int32; one past the last: none. No two rows write the same.
    """

    read_R: jax.Array
    write_R: jax.Array


class PageTable(NamedTuple):
    """Where the rows of a pass read and write the cache.

    table_RP: int32, the pages of each row's own positions, from `start_R` on. Where a row has no
      page, any number: nothing is written to a page below 0 or beyond the pool.
    start_R: int32, the first of these positions, a multiple of the page size; what lies before it
      is in `prefixes`.
    states: of recurrent layers; None: there are none, or theirs are in the order of the rows.
    adapter_R: int32, the adapter of each row, where adapters are per turn; None: they are not.
    """

    table_RP: jax.Array
    start_R: jax.Array
    prefixes: Prefixes | None = None
    states: StateRows | None = None
    adapter_R: jax.Array | None = None


def new_pages(arch: Architecture, pages: int, page_size: int) -> list[Pages]:
    """An empty cache, keys and values per layer that has attention.

    Its heads are those that `mesh.repeat_kv_heads` gives on the mesh in force.

    Args:
      pages: of all shards together; they divide it.
    """
    kv_heads = arch.cached_heads
    kv_heads *= kv_copies(arch.heads, kv_heads, axis_parts("kv_heads"))
    shape = (kv_heads, pages, page_size, arch.cached_dim)

    def make() -> jax.Array:
        return constrain(jnp.zeros(shape, arch.dtype), *page_axes(kv_heads))

    recurrent = sum(map(arch.is_recurrent, range(arch.layers)))
    return [
        Pages(make(), make() if arch.latent is None else None)
        for _ in range(arch.layers - recurrent)
    ]


def page_axes(kv_heads: int) -> tuple[str | None, ...]:
    """Logical axes of `Pages.k` and `Pages.v` on the mesh in force."""
    return (head_axes(kv_heads)[0], "pages", None, "head_dim")


def write(pages: Pages, new: KeyValues, position_RL: jax.Array, page_table: PageTable) -> Pages:
    """Puts a pass's keys and values into the pages of its rows.

    Args:
      new: [R, L, kv_heads, head_dim]; values are written where pages have some.
      position_RL: int32; a token `NOWHERE` or outside of its row's table is written nowhere.
    """
    kv_heads = pages.k.shape[0]
    axes = page_axes(kv_heads)
    tokens = ("rows", None, head_axes(kv_heads)[0], "head_dim")
    rows = (("rows", None), ("rows", None), ("rows",))
    put = per_shard(_write, (axes, tokens, *rows), axes)
    return Pages(
        *(
            old
            if old is None
            else put(old, x, position_RL, page_table.table_RP, page_table.start_R)
            for old, x in zip(pages, new, strict=True)
        )
    )


def _write(
    x_KPSd: jax.Array,
    new_RLKd: jax.Array,
    position_RL: jax.Array,
    table_RP: jax.Array,
    start_R: jax.Array,
) -> jax.Array:
    kv_heads, pages, page_size, d = x_KPSd.shape
    offset_RL = jnp.where(position_RL == NOWHERE, -1, position_RL - start_R[:, None])
    column_RL = offset_RL // page_size
    page_RL = jnp.take_along_axis(table_RP, column_RL, axis=1, mode="clip")
    held = (column_RL >= 0) & (column_RL < table_RP.shape[1]) & (page_RL >= 0) & (page_RL < pages)
    pool = pages * page_size
    slot_1X = (page_RL * page_size + offset_RL % page_size).reshape(1, -1)
    # Heads' pools one after the other: a scatter along a middle axis would make TPU copy all pages
    # into a layout of its own and back.
    first_K1 = pool * jnp.arange(kv_heads)[:, None]
    row_KX = jnp.where(held.reshape(1, -1), first_K1 + slot_1X, kv_heads * pool)
    new = new_RLKd.transpose(2, 0, 1, 3).reshape(-1, d).astype(x_KPSd.dtype)
    flat = x_KPSd.reshape(kv_heads * pool, d)
    return flat.at[row_KX.reshape(-1)].set(new, mode="drop").reshape(x_KPSd.shape)


def copy_pages(pages: Pages, source_X: jax.Array, target_X: jax.Array) -> Pages:
    """Copies pages within each shard's pool; all are read before one is written.

    Args:
      source_X, target_X: int32, page numbers, as many for each shard; a target beyond the pool is
        no copy.
    """
    axes = page_axes(pages.k.shape[0])
    copy = per_shard(_copy, (axes, ("pages",), ("pages",)), axes)
    return Pages(*(x if x is None else copy(x, source_X, target_X) for x in pages))


def _copy(x_KPSd: jax.Array, source_X: jax.Array, target_X: jax.Array) -> jax.Array:
    return x_KPSd.at[:, target_X].set(x_KPSd.at[:, source_X].get(mode="clip"), mode="drop")


def attend(
    q_RLHd: jax.Array,
    pages: Pages,
    position_RL: jax.Array,
    page_table: PageTable,
    *,
    window: int | None = None,
    cap: float | None = None,
    sink_H: jax.Array | None = None,
    kernel: str = "xla",
    block: int | None = BLOCK,
) -> jax.Array:
    """Softmax attention of a pass whose own keys and values have been written; as `attention`'s.

    The keys at a query's own position and before are visible to it: those of its row's table and
    those of the prefix that its row begins with. Scores, softmax and sums are float32.

    Args:
      q_RLHd: [R, L, H, head_dim].
      position_RL: int32; the result of a query `NOWHERE` is 0.
      window: how many positions are visible, the query's own included; None: all before it.
      cap: of scores, as `scores.bound`. sink_H: as `scores.add_sinks`.
      kernel: xla | paged; `decode_kernel` says which passes the second takes.
      block: tokens of a row that "xla" gathers at once, in a loop that ends with the longest row;
        None: all, without a loop.

    Returns: [R, L, H, head_dim] in the dtype of q.

    Raises:
      ValueError: an unknown kernel, or a pass that it does not take.
    """
    if kernel not in _KERNELS:
        raise ValueError(f"attend: got kernel {kernel!r}; allowed: {', '.join(_KERNELS)}.")
    kv_heads = pages.k.shape[0]
    queries, keys = ("rows", None, head_axes(kv_heads)[1], "head_dim"), page_axes(kv_heads)
    held = [x for x in pages if x is not None]
    layouts = [queries, *(keys for _ in held), ("rows", None), ("rows", None), ("rows",)]
    arrays = [q_RLHd, *held, position_RL, page_table.table_RP, page_table.start_R]
    if page_table.prefixes is not None:
        layouts += [("prefixes", None), ("prefixes",), ("prefixes", None)]
        arrays += page_table.prefixes
    run = functools.partial(_KERNELS[kernel], window=window, cap=cap, block=block)
    if pages.v is None:
        run = functools.partial(_of_keys_alone, run)
    if kernel == "xla":
        return attend_per_shard(run, layouts, queries, sink_H)(*arrays)
    if sink_H is not None:
        raise ValueError(f"attend: kernel {kernel!r} got sinks; allowed: none.")
    return per_shard(run, layouts, queries)(*arrays)


def _of_keys_alone(attend: Callable[..., T], q: jax.Array, k: jax.Array, *rest: jax.Array) -> T:
    """Attention whose values are the keys."""
    return attend(q, k, k, *rest)


def _xla(
    q_RLHd: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position_RL: jax.Array,
    table_RP: jax.Array,
    start_R: jax.Array,
    *prefixes: jax.Array,
    window: int | None,
    cap: float | None,
    block: int | None,
) -> tuple[jax.Array, jax.Array]:
    R, L, H, d = q_RLHd.shape
    kv_heads, _, page_size, _ = k.shape
    groups = H // kv_heads
    q_KRXd = q_RLHd.reshape(R, L, kv_heads, groups, d).transpose(2, 0, 3, 1, 4)
    q_KRXd = q_KRXd.reshape(kv_heads, R, groups * L, d)
    position_RL = jnp.where(position_RL == NOWHERE, -1, position_RL)  # before every key
    position_RX = jnp.tile(position_RL, (1, groups))
    over = functools.partial(_sum, k=k, v=v, window=window, cap=cap, block=block)
    end_R = start_R + table_RP.shape[1] * page_size
    attended = over(q_KRXd, position_RX, table=table_RP, start=start_R, end=end_R)
    if prefixes:
        attended = _joined(attended, _prefix_sum(q_KRXd, position_RX, Prefixes(*prefixes), over))
    # A sum over any key is 1 at least: the weight of its top.
    out = attended.weighted / jnp.maximum(attended.total, 1)[..., None]
    logsumexp = attended.top + jnp.log(jnp.maximum(attended.total, 1))

    def by_rows(x: jax.Array) -> jax.Array:
        return x.reshape(kv_heads, R, groups, L, -1).transpose(1, 3, 0, 2, 4).reshape(R, L, H, -1)

    return by_rows(out).astype(q_RLHd.dtype), by_rows(logsumexp)[..., 0]


class _Sum(NamedTuple):
    """A softmax-weighted sum of values that more keys may be added to; float32.

    weighted: [kv_heads, B, X, head_dim], the sum of values weighted with exp(score - top).
    total: [kv_heads, B, X], the sum of the weights. top: [kv_heads, B, X], the largest score.
    """

    weighted: jax.Array
    total: jax.Array
    top: jax.Array


def _joined(a: _Sum, b: _Sum) -> _Sum:
    """The sum over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    x, y = jnp.exp(a.top - top), jnp.exp(b.top - top)
    weighted = a.weighted * x[..., None] + b.weighted * y[..., None]
    return _Sum(weighted, a.total * x + b.total * y, top)


def _sum(
    q_KBXd: jax.Array,
    position_BX: jax.Array,
    *,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    start: jax.Array,
    end: jax.Array,
    window: int | None,
    cap: float | None,
    block: int | None,
) -> _Sum:
    """The sum over the keys of `table` [B, P] at positions from `start` to before `end` [B]."""
    kv_heads, pool, page_size, d = k.shape
    B, width = table.shape
    step = width if block is None else min(width, max(1, block // page_size))
    count = -(-width // step)
    table = jnp.pad(jnp.clip(table, 0, pool - 1), ((0, 0), (0, count * step - width)))
    slot = jnp.arange(step * page_size)

    def gather(x: jax.Array, here: jax.Array) -> jax.Array:
        return x.at[:, here].get(mode="promise_in_bounds").reshape(kv_heads, B, -1, d)

    def add(i: jax.Array | int, past: _Sum) -> _Sum:
        here = jax.lax.dynamic_slice_in_dim(table, i * step, step, axis=1)
        keys = gather(k, here)
        values = keys if v is k else gather(v, here)
        key_BC = start[:, None] + i * step * page_size + slot[None, :]
        key_BXC, query_BXC = key_BC[:, None, :], position_BX[:, :, None]
        visible = (key_BXC <= query_BXC) & (key_BXC < end[:, None, None])
        if window is not None:
            visible &= key_BXC > query_BXC - window
        scores = jnp.einsum("kbxd,kbcd->kbxc", q_KBXd, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(visible[None], bound(scores * d**-0.5, cap), _HIDDEN)
        top = jnp.maximum(scores.max(axis=-1), _LOWEST)
        weights = jnp.exp(scores - top[..., None])
        weighted = jnp.einsum(
            "kbxc,kbcd->kbxd",
            weights.astype(q_KBXd.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return _joined(past, _Sum(weighted, weights.sum(axis=-1), top))

    zeros = jnp.zeros(q_KBXd.shape, jnp.float32)
    empty = _Sum(zeros, zeros[..., 0], jnp.full_like(zeros[..., 0], _LOWEST))
    if count == 1:
        return add(0, empty)
    first, last = _reached(position_BX, start, end, window, step * page_size)
    return jax.lax.fori_loop(first, last, add, empty)


def _reached(
    position_BX: jax.Array, start_B: jax.Array, end_B: jax.Array, window: int | None, size: int
) -> tuple[jax.Array | int, jax.Array]:
    """The blocks of `size` tokens, from the first to before the last, that hold any visible key."""
    newest_B = jnp.minimum(position_BX.max(axis=1), end_B - 1)
    last = ((newest_B - start_B) // size + 1).max()
    if window is None:
        return 0, last
    oldest_B = jnp.where(position_BX < 0, NOWHERE, position_BX).min(axis=1) - (window - 1)
    first = ((jnp.maximum(oldest_B, start_B) - start_B) // size).min()
    return first, last


def _prefix_sum(
    q_KRXd: jax.Array,
    position_RX: jax.Array,
    prefixes: Prefixes,
    over: Callable[..., _Sum],
) -> _Sum:
    """Each row's sum over the prefix that it begins with, all rows of a prefix in one product."""
    kv_heads, R, X, d = q_KRXd.shape
    Q, G = prefixes.rows_QG.shape
    member = prefixes.rows_QG.reshape(-1)
    # Where there is no member, any row's queries: their results come back to no row.
    q = jnp.take(q_KRXd, member, axis=1, mode="clip").reshape(kv_heads, Q, G * X, d)
    position = jnp.take(position_RX, member, axis=0, mode="clip")
    part = over(
        q,
        position.reshape(Q, G * X),
        table=prefixes.table_QP,
        start=jnp.zeros_like(prefixes.length_Q),
        end=prefixes.length_Q,
    )
    # Back to the rows by a gather: a scatter is a loop on CPU.
    place_R = jnp.full(R, Q * G).at[member].set(jnp.arange(Q * G), mode="drop")

    def back(x: jax.Array, none: float) -> jax.Array:
        x = x.reshape(kv_heads, Q * G, X, *x.shape[3:])
        return jnp.take(x, place_R, axis=1, mode="fill", fill_value=none)

    return _Sum(back(part.weighted, 0), back(part.total, 0), back(part.top, _LOWEST))


def _paged(
    q_RLHd: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position_RL: jax.Array,
    table_RP: jax.Array,
    start_R: jax.Array,
    *prefixes: jax.Array,
    window: int | None,
    cap: float | None,
    block: int | None,
) -> jax.Array:
    L, d = q_RLHd.shape[1], q_RLHd.shape[3]
    if L != 1 or window is not None or prefixes:
        raise ValueError(
            f"attend: kernel 'paged' got {L} tokens a row, window {window} and"
            f" {'' if prefixes else 'no '}prefixes; allowed: 1 token, no window, no prefixes."
        )
    page_size, width = k.shape[2], table_RP.shape[1]
    length_RL = jnp.where(position_RL == NOWHERE, 0, position_RL - start_R[:, None] + 1)
    out = paged_attention(
        q_RLHd[:, 0] * d**-0.5,  # the kernel does not scale
        k,
        v,
        length_RL[:, 0],
        jnp.clip(table_RP, 0, k.shape[1] - 1),
        attn_logits_soft_cap=cap,
        pages_per_compute_block=_pages_at_once(width, page_size),
    )
    return out[:, None]


def _pages_at_once(width: int, page_size: int) -> int:
    """The most pages that divide a table's width, up to `_KERNEL_BLOCK` tokens."""
    most = max(1, _KERNEL_BLOCK // page_size)
    return max(n for n in range(1, min(width, most) + 1) if width % n == 0)


_KERNELS = {"xla": _xla, "paged": _paged}


def decode_kernel(
    platform: str,
    *,
    head_dim: int,
    page_size: int,
    dtype: str,
    window: int | None = None,
    sinks: bool = False,
) -> tuple[str, str]:
    """The kernel that suits a decode pass (a token per row, no prefixes), and why.

    Args:
      platform: as `jax.Device.platform` names it.
      dtype: of queries and pages, by name.

    Returns: paged | xla; the reason, words without a full stop.
    """
    if platform != "tpu":
        return "xla", f"paged is for tpu: got {platform}"
    if dtype != "bfloat16":  # the kernel would round keys and values to it
        return "xla", f"paged needs bfloat16: got {dtype}"
    if head_dim % _LANES:
        return "xla", f"paged needs a head_dim divisible by {_LANES}: got {head_dim}"
    if page_size % _SUBLANES:
        return "xla", f"paged needs a page_size divisible by {_SUBLANES}: got {page_size}"
    if window is not None:
        return "xla", f"paged needs a layer without a window: got {window}"
    if sinks:
        return "xla", "paged has no attention sinks"
    return "paged", "as preferred"
