"""Attention by the platform's kernels against plain attention, outputs and gradients.

Shapes are those of training and sampling: token trees, rows, cached pages. Plain attention in
float32, with the highest precision of matrix products, is the reference of both: the kernel, and
plain attention in the kernel's own type, whose distance is the bound for bfloat16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.benchmarks.settings import BenchSettings
from seeupo_jax.instruments.bench.accelerator.kernel_comparison import (
    Found,
    Heads,
    compare,
    outputs_apart,
    random_arrays,
)
from seeupo_jax.instruments.bench.accelerator.runner import NotHere, Record
from seeupo_jax.policy.kernels import attention, paged
from seeupo_jax.policy.kernels.attention import (
    NOWHERE,
    KeyValues,
    Past,
    Tree,
    attend_trees,
    tree_mask_of,
)
from seeupo_jax.policy.kernels.fused import preferred_kernel, select_kernel
from seeupo_jax.policy.kernels.tree_mask import TreeMask

_PADDING = 5  # tokens at the end of the longest row
_PAGE = 16  # tokens, as `rollout.page_size` by default


@dataclass(frozen=True)
class GroupRows:
    """Rows of one group each: a prompt, and members after it of different lengths.

    continued: tokens of a second pass that continues after each row's last one; 0: first pass only.
    """

    heads: Heads
    prompt: int
    members: int
    member: int
    window: int | None = None
    rows: int = 2
    continued: int = 0

    def tree(self) -> Tree:
        """Padding included, whose tokens see themselves."""
        lengths = [
            [self.member - (3 * m + 7 * n) % (self.member // 2) for m in range(self.members)]
            for n in range(self.rows)
        ]
        L = self.prompt + max(map(sum, lengths)) + _PADDING
        depth = np.zeros((self.rows, L), np.int32)
        end = np.tile(np.arange(1, L + 1, dtype=np.int32), (self.rows, 1))
        for n, row in enumerate(lengths):
            depth[n, : self.prompt], at = np.arange(self.prompt), self.prompt
            for length in row:
                stop = at + length
                depth[n, at:stop], end[n, at:stop] = self.prompt + np.arange(length), stop
                at = stop
            end[n, : self.prompt] = at
        return Tree(jnp.asarray(depth), jnp.asarray(end))

    def tree_mask(self) -> TreeMask:
        """Which tokens are visible to which; of the second pass where there is one."""
        tree = self.tree()
        if not self.continued:
            return tree_mask_of(tree)
        last_N = tree.end_NL[:, 0] - 1  # of the last member
        past_depth_N = jnp.take_along_axis(tree.depth_NL, last_N[:, None], axis=1)
        index = jnp.arange(self.continued, dtype=jnp.int32)[None, :]
        new = Tree(past_depth_N + 1 + index, jnp.full_like(past_depth_N + index, self.continued))
        at_NL = jnp.broadcast_to(last_N[:, None], new.end_NL.shape)
        return tree_mask_of(new, Past((), tree, at_NL))

    def compare(self, dtype: str, kernel: str, *, timed: bool) -> Found:
        """Raises NotHere where the kernel does not take this shape."""
        mask, window = jax.jit(self.tree_mask)(), self.window
        (N, L), C = mask.order_NL.shape, mask.first_NC.shape[1]
        _require(kernel, L, self.heads, dtype, trees=True)
        real_NL = jnp.ones((N, L), bool)
        if not self.continued:
            real_NL = jnp.arange(L)[None, :] < self.tree().end_NL[:, :1]

        def fused(q: jax.Array, k: jax.Array, v: jax.Array, mask: TreeMask) -> jax.Array:
            return attend_trees(q, KeyValues(k, v), mask, window=window, kernel=kernel)

        def plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: TreeMask) -> jax.Array:
            return attention.all_pairs(q, k, v, *mask, window=window)[0]

        arrays = random_arrays(N, L, C, self.heads)
        return compare(fused, plain, arrays, mask, real_NL, dtype, timed)

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        more = f", continued by {self.continued}" if self.continued else ""
        return (
            f"{self.rows} rows of {self.tree().end_NL.shape[1]}: prompt {self.prompt},"
            f" {self.members} members{more}; {self.heads}{window}"
        )


@dataclass(frozen=True)
class KernelRows:
    """Rows of sequences: one each, or three packed in each."""

    heads: Heads
    length: int
    window: int | None = None
    packed: bool = False
    rows: int = 2

    def compare(self, dtype: str, kernel: str, *, timed: bool) -> Found:
        _require(kernel, self.length, self.heads, dtype, trees=False)
        index_L = jnp.arange(self.length, dtype=jnp.int32)
        position_NL, segment_NL = jnp.tile(index_L, (self.rows, 1)), None
        if self.packed:
            starts = jnp.array([0, self.length // 5 + 3, self.length // 2 + 1], jnp.int32)
            segment_NL = jnp.searchsorted(starts, position_NL, "right").astype(jnp.int32) - 1
            position_NL -= starts[segment_NL]

        def attend(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, places: Any) -> jax.Array:
            position_NL, segment_NL = places
            return attention.attend(
                q,
                KeyValues(k, v),
                position_NL,
                position_NL,
                window=self.window,
                segment_NL=segment_NL,
                key_segment_NC=segment_NL,
                kernel=kernel,
            )

        fused, plain = functools.partial(attend, kernel), functools.partial(attend, "xla")
        arrays = random_arrays(self.rows, self.length, self.length, self.heads)
        real_NL, places = jnp.ones(position_NL.shape, bool), (position_NL, segment_NL)
        return compare(fused, plain, arrays, places, real_NL, dtype, timed)

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        packed = ", three sequences each" if self.packed else ""
        return f"{self.rows} rows of {self.length}{packed}; {self.heads}{window}"


@dataclass(frozen=True)
class Cached:
    """Conversations in a paged cache, each with a prompt that all have in common, or none.

    tokens: of each pass: 1 decodes, more prefill. prefix: tokens, a multiple of the page's.
    """

    heads: Heads
    lengths: tuple[int, ...]
    tokens: int
    prefix: int = 0

    def kernel(self, dtype: str, platform: str) -> str:
        """The kernel with which the sampler reads the cache."""
        options = {"head_dim": self.heads.channels, "page_size": _PAGE, "dtype": dtype}
        only_decodes = self.tokens == 1 and not self.prefix
        return paged.decode_kernel(platform, **options)[0] if only_decodes else "xla"

    def compare(self, dtype: str, kernel: str, *, timed: bool) -> Found:
        """Outputs only, and not timed: nothing is trained through pages."""
        R, longest = len(self.lengths), max(self.lengths)
        q, k, v, _ = random_arrays(R, self.tokens, longest, self.heads)
        k, v = (x.at[:, : self.prefix].set(x[:1, : self.prefix]) for x in (k, v))
        length = np.asarray(self.lengths)[:, None]
        position = jnp.asarray(length - self.tokens + np.arange(self.tokens), jnp.int32)
        index = np.arange(longest)[None, :]
        held = jnp.asarray(np.where(index < length, index, NOWHERE), jnp.int32)
        block = None if jax.devices()[0].platform in ("gpu", "cuda") else paged.BLOCK

        def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention.attend(q, KeyValues(k, v), position, held)

        def by_pages(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            pages, page_table = self._in_pages(k, v, held)
            return paged.attend(q, pages, position, page_table, kernel=kernel, block=block)

        return outputs_apart(by_pages, plain, (q, k, v), dtype), {}

    def _in_pages(
        self, k: jax.Array, v: jax.Array, held: jax.Array
    ) -> tuple[paged.Pages, paged.PageTable]:
        """A cache with all tokens in it, in pages of random order; and each row's pages."""
        R, longest, kv_heads, d = k.shape
        common, width = self.prefix // _PAGE, -(-(longest - self.prefix) // _PAGE)
        order = np.random.default_rng(3).permutation(common + R * width).astype(np.int32)
        table = jnp.asarray(order[common:].reshape(R, width))
        start = jnp.full(R, self.prefix, jnp.int32)
        position = jnp.where(held < self.prefix, NOWHERE, held)
        empty = jnp.zeros((kv_heads, order.size, _PAGE, d), k.dtype)
        pages, place = paged.Pages(empty, empty), paged.PageTable(table, start)
        pages = paged.write(pages, KeyValues(k, v), position, place)
        if not common:
            return pages, place
        first = jnp.asarray(order[None, :common])
        one = KeyValues(k[:1, : self.prefix], v[:1, : self.prefix])
        at = jnp.arange(self.prefix, dtype=jnp.int32)[None, :]
        place = paged.PageTable(first, jnp.zeros(1, jnp.int32))
        shared = paged.Prefixes(
            first, jnp.full(1, self.prefix, jnp.int32), jnp.arange(R, dtype=jnp.int32)[None, :]
        )
        return paged.write(pages, one, at, place), paged.PageTable(table, start, shared)

    def __str__(self) -> str:
        shared = f", {self.prefix} shared" if self.prefix else ""
        return (
            f"{len(self.lengths)} conversations of {min(self.lengths)} to {max(self.lengths)}"
            f"{shared}, {self.tokens} tokens per pass; {self.heads}"
        )


QWEN_05B, QWEN_15B, SMOLLM = Heads(14, 2, 64), Heads(12, 2, 128), Heads(9, 3, 64)
_SMALL = Heads(2, 1, 16)  # of a rehearsal
FORESTS = (
    GroupRows(QWEN_05B, 517, 8, 101),
    GroupRows(QWEN_15B, 1031, 8, 157),
    GroupRows(QWEN_15B, 1031, 8, 157, window=512),
    GroupRows(SMOLLM, 67, 8, 33),
    GroupRows(QWEN_05B, 517, 8, 101, continued=163),
    GroupRows(QWEN_05B, 4099, 8, 509, rows=1),
)
SMALLEST_FORESTS = {  # by type: one pass, and one that is continued
    "bfloat16": (GroupRows(_SMALL, 40, 2, 24),),
    "float32": (GroupRows(_SMALL, 40, 2, 24, rows=1, continued=64),),
}
ROWS = (
    KernelRows(QWEN_05B, 1024),
    KernelRows(QWEN_15B, 1920),
    KernelRows(QWEN_15B, 1920, window=512),
    KernelRows(SMOLLM, 896, packed=True),
)
SMALLEST_ROWS = (KernelRows(_SMALL, 128),)
_LENGTHS = (1201, 77, 640, 333, 1999, 512, 48, 1400)
_LONGER = tuple(640 + length for length in _LENGTHS)
CACHED = (
    Cached(QWEN_05B, _LENGTHS, 1),
    Cached(QWEN_15B, _LENGTHS, 1),
    Cached(QWEN_15B, _LONGER, 1, prefix=640),
    Cached(QWEN_05B, _LONGER, 37, prefix=640),
)
SMALLEST_CACHED = (Cached(_SMALL, (60, 41), 3, prefix=32),)


def trees(record: Record, _: BenchSettings, rehearse: bool, *, dtype: str) -> None:
    """Every forest: outputs and gradients."""
    kernel = _kernel("cudnn")  # a CPU interprets the kernel for GPU
    for case in SMALLEST_FORESTS[dtype] if rehearse else FORESTS:
        _try(record, "attention over token trees", case, dtype, kernel, timed=not rehearse)


def rows(record: Record, _: BenchSettings, rehearse: bool) -> None:
    """The fused kernel over rows, then attention over pages, in both types."""
    kernel, platform = _kernel("splash"), jax.devices()[0].platform
    for dtype in ("float32",) if rehearse else ("bfloat16", "float32"):
        for case in SMALLEST_ROWS if rehearse else ROWS:
            _try(record, "fused attention over rows", case, dtype, kernel, timed=not rehearse)
        for case in SMALLEST_CACHED if rehearse else CACHED:
            reads = case.kernel(dtype, platform)
            _try(record, "attention over pages", case, dtype, reads, timed=False)


def _kernel(on_cpu: str) -> str:
    platform = jax.devices()[0].platform
    return on_cpu if platform == "cpu" else preferred_kernel(platform)


def _try(
    record: Record,
    name: str,
    case: GroupRows | KernelRows | Cached,
    dtype: str,
    kernel: str,
    *,
    timed: bool,
) -> None:
    """One comparison, whose failure does not end the others."""
    about = {"shape": str(case), "dtype": dtype, "kernel": kernel}
    try:
        differences, more = case.compare(dtype, kernel, timed=timed)
    except NotHere as reason:
        record.note(f"{name}, {case}, {dtype}: not compared: {reason}.")
    except Exception as error:
        record.check(name, {}, error=error, **about)
        jnp.zeros(1).block_until_ready()  # a device that is lost ends the piece
    else:
        record.check(name, differences, **about | more)


def _require(kernel: str, length: int, heads: Heads, dtype: str, *, trees: bool) -> None:
    """Raises NotHere where the pass would fall back to plain attention."""
    options = {"head_dim": heads.channels, "kv_heads": heads.keys, "heads": heads.queries}
    taken, reason = select_kernel(kernel, length=length, dtype=dtype, trees=trees, **options)
    if taken != kernel:
        raise NotHere(reason)
