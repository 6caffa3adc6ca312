"""Shapes of attention as training and sampling have them: token trees, rows, cached pages."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.policy.kernels.attention import Past, Tree, tree_mask_of
from seeupo_jax.policy.kernels.tree_mask import TreeMask

PADDING = 5  # tokens at the end of the longest row
PAGE = 16  # tokens, as `rollout.page_size` by default


@dataclass(frozen=True)
class Heads:
    """Of queries, of keys and values, and the channels of each."""

    queries: int
    keys: int
    channels: int

    def __str__(self) -> str:
        return f"{self.queries} heads over {self.keys} of {self.channels}"


@dataclass(frozen=True)
class Forest:
    """Rows of one group each: a prompt, and members after it of different lengths.

    continued: tokens of a second pass that go on after each row's last one; 0: of the first pass.
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
        L = self.prompt + max(map(sum, lengths)) + PADDING
        depth = np.zeros((self.rows, L), np.int32)
        end = np.tile(np.arange(1, L + 1, dtype=np.int32), (self.rows, 1))
        for n, row in enumerate(lengths):
            depth[n, : self.prompt] = np.arange(self.prompt)
            end[n, : self.prompt] = at = self.prompt
            for length in row:
                depth[n, at : at + length] = self.prompt + np.arange(length)
                end[n, at : at + length] = at + length
                at += length
            end[n, : self.prompt] = at
        return Tree(jnp.asarray(depth), jnp.asarray(end))

    def tree_mask(self) -> TreeMask:
        """Who sees whom; of the second pass where there is one."""
        tree = self.tree()
        if not self.continued:
            return tree_mask_of(tree)
        last_N = tree.end_NL[:, 0] - 1  # of the last member
        past_depth_N = jnp.take_along_axis(tree.depth_NL, last_N[:, None], axis=1)
        index = jnp.arange(self.continued, dtype=jnp.int32)[None, :]
        new = Tree(past_depth_N + 1 + index, jnp.full_like(past_depth_N + index, self.continued))
        at_NL = jnp.broadcast_to(last_N[:, None], new.end_NL.shape)
        return tree_mask_of(new, Past((), tree, at_NL))

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        more = f", continued by {self.continued}" if self.continued else ""
        return (
            f"{self.rows} rows of {self.tree().end_NL.shape[1]}: prompt {self.prompt},"
            f" {self.members} members{more}; {self.heads}{window}"
        )


QWEN_05B, QWEN_15B, SMOLLM = Heads(14, 2, 64), Heads(12, 2, 128), Heads(9, 3, 64)
FORESTS = (
    Forest(QWEN_05B, 517, 8, 101),
    Forest(QWEN_15B, 1031, 8, 157),
    Forest(QWEN_15B, 1031, 8, 157, window=512),
    Forest(SMOLLM, 67, 8, 33),
    Forest(QWEN_05B, 517, 8, 101, continued=163),
    Forest(QWEN_05B, 4099, 8, 509, rows=1),
)
SMALLEST_FORESTS = {  # of a rehearsal, by type: one pass, and one that is continued
    "bfloat16": (Forest(Heads(2, 1, 16), 40, 2, 24),),
    "float32": (Forest(Heads(2, 1, 16), 40, 2, 24, rows=1, continued=64),),
}


@dataclass(frozen=True)
class Rows:
    """Rows of sequences: one each, or three packed in each."""

    heads: Heads
    length: int
    window: int | None = None
    packed: bool = False
    rows: int = 2

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        packed = ", three sequences each" if self.packed else ""
        return f"{self.rows} rows of {self.length}{packed}; {self.heads}{window}"

    def places(self) -> tuple[jax.Array, jax.Array | None]:
        """Positions and segments."""
        index = np.tile(np.arange(self.length, dtype=np.int32), (self.rows, 1))
        if not self.packed:
            return jnp.asarray(index), None
        starts = np.array([0, self.length // 5 + 3, self.length // 2 + 1])
        segment = np.searchsorted(starts, index, "right").astype(np.int32) - 1
        return jnp.asarray(index - starts[segment].astype(np.int32)), jnp.asarray(segment)


ROWS = (
    Rows(QWEN_05B, 1024),
    Rows(QWEN_15B, 1920),
    Rows(QWEN_15B, 1920, window=512),
    Rows(SMOLLM, 896, packed=True),
)
SMALLEST_ROWS = (Rows(Heads(2, 1, 16), 128),)


@dataclass(frozen=True)
class Cached:
    """Conversations in a paged cache, each with a prompt that all have in common, or none.

    tokens: of each pass: 1 decodes, more prefill. prefix: tokens, a multiple of the page's.
    """

    heads: Heads
    lengths: tuple[int, ...]
    tokens: int
    prefix: int = 0

    def __str__(self) -> str:
        shared = f", {self.prefix} in common" if self.prefix else ""
        return (
            f"{len(self.lengths)} conversations of {min(self.lengths)} to {max(self.lengths)}"
            f"{shared}, {self.tokens} tokens a pass; {self.heads}"
        )


_LENGTHS = (1201, 77, 640, 333, 1999, 512, 48, 1400)
_LONGER = tuple(640 + length for length in _LENGTHS)
CACHED = (
    Cached(QWEN_05B, _LENGTHS, 1),
    Cached(QWEN_15B, _LENGTHS, 1),
    Cached(QWEN_15B, _LONGER, 1, prefix=640),
    Cached(QWEN_05B, _LONGER, 37, prefix=640),
)
SMALLEST_CACHED = (Cached(Heads(2, 1, 16), (60, 41), 3, prefix=32),)
