"""Attention by the platform's kernels against plain attention, outputs and gradients.

Plain attention in float32, with the matrix products' highest precision, is what both are held to:
the kernel, and plain attention in the kernel's own type, whose distance is the measure for
bfloat16.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.bench.accelerator.cases import (
    CACHED,
    FORESTS,
    PAGE,
    ROWS,
    SMALLEST_CACHED,
    SMALLEST_FORESTS,
    SMALLEST_ROWS,
    Cached,
    Forest,
    Heads,
    Rows,
)
from seeupo_jax.bench.accelerator.record import NotHere, Record
from seeupo_jax.bench.settings import Settings
from seeupo_jax.policy.kernels import attention, paged
from seeupo_jax.policy.kernels.attention import NOWHERE, KeyValues, attend_trees
from seeupo_jax.policy.kernels.fused import preferred_kernel, select_kernel
from seeupo_jax.policy.kernels.tree_mask import TreeMask

# Against the largest number of the exact result. A product in tf32, which float32 must not use
# here, is 5e-4 away.
FLOAT32 = 1e-4
# Times plain attention's own distance in bfloat16; the greatest of many rounding errors is chance.
AS_PLAIN = 2.0

Arrays = tuple[jax.Array, ...]
Attend = Callable[..., jax.Array]  # of queries, keys and values


def trees(record: Record, _: Settings, rehearse: bool, *, dtype: str) -> None:
    """Every forest: outputs and gradients."""
    platform = jax.devices()[0].platform
    # A CPU interprets the kernel for GPU.
    kernel = preferred_kernel(platform) if platform != "cpu" else "cudnn"
    for forest in SMALLEST_FORESTS[dtype] if rehearse else FORESTS:
        about = {"shape": str(forest), "dtype": dtype, "kernel": kernel}
        compare = functools.partial(_forest, forest, dtype, kernel, timed=not rehearse)
        _try(record, "attention over token trees", about, compare)


def _forest(
    forest: Forest, dtype: str, kernel: str, *, timed: bool
) -> tuple[dict[str, tuple[float, float]], dict[str, Any]]:
    tree_mask, heads = forest.tree_mask(), forest.heads
    (N, L), C = tree_mask.order_NL.shape, tree_mask.first_NC.shape[1]
    _require(kernel, L, heads, dtype, trees=True)
    real_NL = (
        jnp.ones((N, L), bool)
        if forest.continued
        else jnp.arange(L)[None, :] < forest.tree().end_NL[:, :1]
    )
    fused = functools.partial(_trees, tree_mask=tree_mask, window=forest.window, kernel=kernel)
    plain = functools.partial(_plain_trees, tree_mask=tree_mask, window=forest.window)
    return _compare(fused, plain, _random(N, L, C, heads), real_NL, dtype, timed=timed)


def _trees(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    return attend_trees(q, KeyValues(k, v), **options)


def _plain_trees(
    q: jax.Array, k: jax.Array, v: jax.Array, *, tree_mask: TreeMask, window: int | None
) -> jax.Array:
    return attention.all_pairs(q, k, v, *tree_mask, window=window)


def rows(record: Record, _: Settings, rehearse: bool) -> None:
    """The fused kernel over rows, then attention over pages, in both types."""
    platform = jax.devices()[0].platform
    kernel = preferred_kernel(platform) if platform != "cpu" else "splash"
    dtypes = ("float32",) if rehearse else ("bfloat16", "float32")
    for dtype in dtypes:
        for case in SMALLEST_ROWS if rehearse else ROWS:
            about = {"shape": str(case), "dtype": dtype, "kernel": kernel}
            compare = functools.partial(_rows, case, dtype, kernel, timed=not rehearse)
            _try(record, "fused attention over rows", about, compare)
        for case in SMALLEST_CACHED if rehearse else CACHED:
            reads = _page_kernel(case, dtype, platform)
            about = {"shape": str(case), "dtype": dtype, "kernel": reads}
            compare = functools.partial(_cached, case, dtype, reads, platform)
            _try(record, "attention over pages", about, compare)


def _rows(
    case: Rows, dtype: str, kernel: str, *, timed: bool
) -> tuple[dict[str, tuple[float, float]], dict[str, Any]]:
    _require(kernel, case.length, case.heads, dtype, trees=False)
    position, segment = case.places()

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str) -> jax.Array:
        return attention.attend(
            q,
            KeyValues(k, v),
            position,
            position,
            window=case.window,
            segment_NL=segment,
            key_segment_NC=segment,
            kernel=kernel,
        )

    return _compare(
        functools.partial(attend, kernel=kernel),
        functools.partial(attend, kernel="xla"),
        _random(case.rows, case.length, case.length, case.heads),
        jnp.ones(position.shape, bool),
        dtype,
        timed=timed,
    )


def _page_kernel(case: Cached, dtype: str, platform: str) -> str:
    options = {"head_dim": case.heads.channels, "page_size": PAGE, "dtype": dtype}
    only_decodes = case.tokens == 1 and not case.prefix
    return paged.decode_kernel(platform, **options)[0] if only_decodes else "xla"


def _cached(
    case: Cached, dtype: str, kernel: str, platform: str
) -> tuple[dict[str, tuple[float, float]], dict[str, Any]]:
    R, longest = len(case.lengths), max(case.lengths)
    heads = case.heads
    q, k, v = _random(R, case.tokens, longest, heads)[:3]
    k, v = (x.at[:, : case.prefix].set(x[:1, : case.prefix]) for x in (k, v))
    length = np.asarray(case.lengths)[:, None]
    position = jnp.asarray(length - case.tokens + np.arange(case.tokens), jnp.int32)
    index = np.arange(longest)[None, :]
    held = jnp.asarray(np.where(index < length, index, NOWHERE), jnp.int32)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.attend(q, KeyValues(k, v), position, held)

    block = None if platform in ("gpu", "cuda") else paged.BLOCK  # as the sampler reads

    def by_pages(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        pages, page_table = _in_pages(case, k, v, held)
        return paged.attend(q, pages, position, page_table, kernel=kernel, block=block)

    exact = _exactly(plain, q, k, v)
    arrays = tuple(x.astype(dtype) for x in (q, k, v))
    off = _distance(_run(by_pages, arrays, dtype), exact)
    bound = FLOAT32
    if dtype != "float32":
        bound = AS_PLAIN * _distance(_run(plain, arrays, dtype), exact)
    return {"out": (off, bound)}, {}


def _in_pages(
    case: Cached, k: jax.Array, v: jax.Array, held: jax.Array
) -> tuple[paged.Pages, paged.PageTable]:
    """A cache with all tokens in it, in pages of random order; and who reaches which."""
    R, longest, kv_heads, d = k.shape
    common, width = case.prefix // PAGE, -(-(longest - case.prefix) // PAGE)
    order = np.random.default_rng(3).permutation(common + R * width).astype(np.int32)
    table = jnp.asarray(order[common:].reshape(R, width))
    empty = jnp.zeros((kv_heads, order.size, PAGE, d), k.dtype)
    start = jnp.full(R, case.prefix, jnp.int32)
    own = jnp.where(held < case.prefix, NOWHERE, held)
    pages = paged.write(
        paged.Pages(empty, empty), KeyValues(k, v), own, paged.PageTable(table, start)
    )
    if not common:
        return pages, paged.PageTable(table, start)
    first = jnp.asarray(order[None, :common])
    shared = paged.Prefixes(
        first,
        jnp.full(1, case.prefix, jnp.int32),
        jnp.arange(R, dtype=jnp.int32)[None, :],
    )
    one = KeyValues(k[:1, : case.prefix], v[:1, : case.prefix])
    place = paged.PageTable(first, jnp.zeros(1, jnp.int32))
    pages = paged.write(pages, one, jnp.arange(case.prefix, dtype=jnp.int32)[None, :], place)
    return pages, paged.PageTable(table, start, shared)


def _compare(
    fused: Attend, plain: Attend, arrays: Arrays, real_NL: jax.Array, dtype: str, *, timed: bool
) -> tuple[dict[str, tuple[float, float]], dict[str, Any]]:
    """Distances of outputs and gradients from the exact ones, with bounds; and seconds."""
    weight = arrays[3] * real_NL[:, :, None, None]
    exact = _exactly(functools.partial(_trained, plain, weight), *arrays[:3])
    own = tuple(x.astype(dtype) for x in arrays[:3])
    ours = _run(functools.partial(_trained, fused, weight), own, dtype)
    usual = exact
    if dtype != "float32":
        usual = _run(functools.partial(_trained, plain, weight), own, dtype)
    found = {}
    for name, x, y, z in zip(("out", "d_q", "d_k", "d_v"), ours, usual, exact, strict=True):
        x, y, z = (a * real_NL[:, :, None, None] if name == "out" else a for a in (x, y, z))
        bound = FLOAT32 if dtype == "float32" else AS_PLAIN * _distance(y, z)
        found[name] = (_distance(x, z), bound)
    if not timed:
        return found, {}
    return found, {
        "kernel_s": _seconds(functools.partial(_trained, fused, weight), own),
        "plain_s": _seconds(functools.partial(_trained, plain, weight), own),
    }


def _trained(attend: Attend, weight: jax.Array, *qkv: jax.Array) -> Arrays:
    """Outputs, and gradients of their weighted sum."""

    def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(*qkv)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*qkv)
    return out, *gradients


def _exactly(f: Callable[..., Any], *arrays: jax.Array) -> Any:
    return _run(f, tuple(x.astype(jnp.float32) for x in arrays), "float32")


def _run(f: Callable[..., Any], arrays: Arrays, dtype: str) -> Any:
    precision = "highest" if dtype == "float32" else "default"
    with jax.default_matmul_precision(precision):
        return jax.block_until_ready(jax.jit(f)(*arrays))


def _seconds(f: Callable[..., Any], arrays: Arrays) -> float:
    """Of one call, the median of nine."""
    jitted, each = jax.jit(f), []
    for _ in range(11):
        began = time.perf_counter()
        jax.block_until_ready(jitted(*arrays))
        each.append(time.perf_counter() - began)
    return statistics.median(each[2:])


def _random(N: int, L: int, C: int, heads: Heads) -> Arrays:
    """Queries, keys, values, and weights of the outputs; numbers that bfloat16 has."""
    keys = jax.random.split(jax.random.key(7), 4)
    shapes = ((L, heads.queries), (C, heads.keys), (C, heads.keys), (L, heads.queries))
    return tuple(
        jax.random.normal(key, (N, *shape, heads.channels), jnp.bfloat16).astype(jnp.float32)
        for key, shape in zip(keys, shapes, strict=True)
    )


def _distance(x: jax.Array, exact: jax.Array) -> float:
    """The greatest difference, against the largest number of the exact result."""
    x, y = (np.asarray(a, np.float64) for a in (x, exact))
    return float(np.abs(x - y).max() / np.abs(y).max())


def _require(kernel: str, length: int, heads: Heads, dtype: str, *, trees: bool) -> None:
    """Raises NotHere where the pass would fall back to plain attention."""
    taken, reason = select_kernel(
        kernel,
        length=length,
        head_dim=heads.channels,
        kv_heads=heads.keys,
        heads=heads.queries,
        dtype=dtype,
        trees=trees,
    )
    if taken != kernel:
        raise NotHere(reason)


def _try(
    record: Record,
    name: str,
    about: dict[str, Any],
    compare: Callable[[], tuple[dict[str, tuple[float, float]], dict[str, Any]]],
) -> None:
    """One comparison, whose failure does not end the others."""
    try:
        found, more = compare()
    except NotHere as reason:
        record.note(f"{name}, {about['shape']}, {about['dtype']}: not compared: {reason}.")
    except Exception as error:
        record.broken(name, error, **about)
        jnp.zeros(1).block_until_ready()  # a device that is lost ends the piece
    else:
        record.check(name, found, **about | more)
