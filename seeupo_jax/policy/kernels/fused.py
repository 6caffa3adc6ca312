"""Fused attention: Pallas splash on TPU, cuDNN flash on GPU; which of them a pass can use.

Both are for a pass whose keys are its own, and mask by index: to a query at index i of a row the
keys at i - window < j <= i are visible, of its own segment where there are segments. Where
positions grow by one along a segment, this is the mask of `attention.attend`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

from seeupo_jax.parallel.mesh import RULES, axis_parts, kv_copies, per_shard
from seeupo_jax.policy.kernels import tree_kernels
from seeupo_jax.policy.kernels.tree_kernels_gpu import BLOCKS, WIDEST

_LOGGER = logging.getLogger(__name__)
_LANES = 128  # a block of keys fills the lanes of a TPU register, or several

_PLAIN = ("xla", "all_pairs")  # without a kernel; the same but for rows of trees
_PLATFORMS = {"splash": ("tpu", "cpu"), "cudnn": ("gpu", "cuda")}  # the others run on all
_PREFERRED = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
_QUERIES = ("rows", "length", "heads", "head_dim")
_KEYS = ("rows", None, "kv_heads", "head_dim")  # all keys of a row
_SEGMENTS = (("rows", "length"), ("rows", None))  # of queries, of keys


def splash(
    q_NLHd: jax.Array,
    k_NLHd: jax.Array,
    v_NLHd: jax.Array,
    segment_NL: jax.Array | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Attention by Pallas's splash kernel, each device on its own rows, queries and heads.

    Which platform the program is lowered for decides: TPU compiles the kernel, CPU interprets it.

    Args:
      q_NLHd: [N, L, H, head_dim], as `select_kernel` says.
      k_NLHd, v_NLHd: [N, L, kv_heads, head_dim].
      segment_NL: int32, of every token; None is one segment per row.
      window: how many keys are visible, the query's own included; None: all before it.
      cap: of scores, as `scores.bound`.

    Returns: [N, L, H, head_dim] in the dtype of q.
    """
    L, H = q_NLHd.shape[1:3]
    mask = (
        mask_lib.CausalMask((L, L))
        if window is None
        else mask_lib.LocalMask((L, L), window_size=(window - 1, 0), offset=0)
    )
    kernel = splash_lib.make_splash_mha(
        mask_lib.MultiHeadMask([mask] * H),
        block_sizes=_blocks(L, axis_parts("length")),
        attn_logits_soft_cap=cap,
        head_shards=1,  # all heads have one mask
        q_seq_shards=axis_parts("length"),
    )
    # Which blocks are visible: arrays that are sharded as the queries are.
    mask_arrays, structure = jax.tree.flatten(kernel)
    cut = [("length",) if x.ndim == 1 else (None, "blocks", None) for x in mask_arrays]
    segments = () if segment_NL is None else (segment_NL, segment_NL)
    run = per_shard(
        functools.partial(_splash, structure),
        (_QUERIES, _KEYS, _KEYS, *cut, *_SEGMENTS[: len(segments)]),
        _QUERIES,
    )
    return run(q_NLHd, k_NLHd, v_NLHd, *mask_arrays, *segments)


def cudnn(
    q_NLHd: jax.Array,
    k_NLHd: jax.Array,
    v_NLHd: jax.Array,
    segment_NL: jax.Array | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
    _implementation: str = "cudnn",
) -> jax.Array:
    """Attention by cuDNN's flash kernel, each device on its own rows and heads.

    Segments are a mask of [N, 1, L, L]; without them the kernel needs none. Arguments and result
    are those of `splash`.

    Raises:
      ValueError: a cap, which the kernel does not have.
    """
    if cap is not None:
        raise ValueError(f"attend: kernel 'cudnn' got cap={cap}; allowed: none.")
    f = functools.partial(_dot_product, window=window, implementation=_implementation)
    segments = () if segment_NL is None else (segment_NL,)
    layouts = (_QUERIES, _KEYS, _KEYS, *_SEGMENTS[: len(segments)])
    return per_shard(f, layouts, _QUERIES)(q_NLHd, k_NLHd, v_NLHd, *segments)


def _splash(
    structure: jax.tree_util.PyTreeDef,
    q_NQHd: jax.Array,
    k_NLHd: jax.Array,
    v_NLHd: jax.Array,
    *rest: jax.Array,
) -> jax.Array:
    """Some of the queries over all keys; `rest`: the kernel's arrays, then segments of both."""
    mask_arrays, segments = rest[: structure.num_leaves], rest[structure.num_leaves :]
    scaled = q_NQHd * q_NQHd.shape[-1] ** -0.5  # the kernel does not scale
    heads_first = [x.transpose(0, 2, 1, 3) for x in (scaled, k_NLHd, v_NLHd)]

    def run(mask_arrays: Sequence[jax.Array], *arrays: jax.Array, interpret: bool) -> jax.Array:
        made = jax.tree.unflatten(structure, mask_arrays)
        kernel = splash_lib.SplashAttentionKernel(
            made.fwd_mask_info,
            made.dq_mask_info,
            made.dkv_mask_info,
            **made.kwargs | {"interpret": interpret},
        )

        def row(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
            return kernel(q, k, v, splash_lib.SegmentIds(*segments) if segments else None)

        return jax.vmap(row)(*arrays)

    out = jax.lax.platform_dependent(
        mask_arrays,
        *heads_first,
        *segments,
        tpu=functools.partial(run, interpret=False),
        cpu=functools.partial(run, interpret=True),
    )
    return out.transpose(0, 2, 1, 3)


def _blocks(length: int, parts: int = 1) -> splash_lib.BlockSizes:
    """Blocks of keys, and of queries that are cut into parts, in all passes.

    Each is the largest that divides its length, up to 512.
    """

    def largest(length: int) -> int:
        return max(n for n in range(_LANES, 512 + 1, _LANES) if length % n == 0)

    keys = dict.fromkeys(("kv", "kv_compute", "kv_dkv", "kv_dkv_compute", "kv_dq"), largest(length))
    queries = dict.fromkeys(("q", "q_dkv", "q_dq"), largest(length // parts))
    return splash_lib.BlockSizes(**{f"block_{k}": v for k, v in (keys | queries).items()})


def _dot_product(
    q_NLHd: jax.Array,
    k_NLHd: jax.Array,
    v_NLHd: jax.Array,
    segment_NL: jax.Array | None = None,
    *,
    window: int | None,
    implementation: str,
) -> jax.Array:
    mask = None
    if segment_NL is not None:
        mask = (segment_NL[:, :, None] == segment_NL[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_NLHd,
        k_NLHd,
        v_NLHd,
        mask=mask,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def _splash_refuses(length: int, head_dim: int, _dtype: str) -> str | None:
    shards = axis_parts("length")
    if length % (_LANES * shards):
        each = f", on each of context={shards} devices" if shards > 1 else ""
        return f"splash needs a length divisible by {_LANES}{each}: got {length}"
    if head_dim % 8:
        return f"splash needs a head_dim divisible by 8: got {head_dim}"
    return None


def _cudnn_refuses(length: int, head_dim: int, dtype: str) -> str | None:
    if dtype not in ("bfloat16", "float16"):
        return f"cudnn needs bfloat16 or float16: got {dtype}"
    if head_dim % 8 or head_dim > 128:
        return f"cudnn needs a head_dim up to 128, divisible by 8: got {head_dim}"
    if length % 2:
        return f"cudnn needs an even length: got {length}"
    if axis_parts("length") > 1:  # its causal mask begins at the first key
        return f"cudnn needs whole rows: got mesh axis context={axis_parts('length')}"
    return None


def _triton_refuses(_length: int, head_dim: int, dtype: str) -> str | None:
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"token trees on GPU need bfloat16, float16 or float32: got {dtype}"
    if head_dim > WIDEST:
        return f"token trees on GPU need a head_dim up to {WIDEST}: got {head_dim}"
    return None


# Why a kernel cannot take a shape; None where it can. Of rows, and of rows that hold token trees.
_REFUSES: dict[str, Callable[[int, int, str], str | None]] = {
    "splash": _splash_refuses,
    "cudnn": _cudnn_refuses,
}
_REFUSES_TREES = _REFUSES | {"cudnn": _triton_refuses}


def select_kernel(
    wanted: str,
    *,
    length: int,
    head_dim: int,
    kv_heads: int,
    heads: int,
    dtype: str,
    trees: bool = False,
    cap: bool = False,
    sinks: bool = False,
) -> tuple[str, str]:
    """The kernel that a whole-row pass of this shape uses on the mesh in force, and why.

    Args:
      wanted: xla | all_pairs | splash | cudnn.
      dtype: of queries, keys and values, by name.
      trees: whether rows hold token trees, for which a platform has a kernel of its own.
      cap, sinks: whether scores are bounded, and whether the softmax has sinks.

    Returns: `wanted` or xla; the reason, words without a full stop.

    Raises:
      ValueError: a kernel of another name.
    """
    _check_name(wanted)
    if wanted in _PLAIN:
        return wanted, "as wanted"
    reason = (_REFUSES_TREES if trees else _REFUSES)[wanted](length, head_dim, dtype)
    if not trees and reason is None:
        reason = _scores_refuse(wanted, cap, sinks)
    if reason is None:
        reason = _shards_refuse(wanted, heads=heads, kv_heads=kv_heads)
    return (wanted, "as wanted") if reason is None else ("xla", reason)


def _scores_refuse(wanted: str, cap: bool, sinks: bool) -> str | None:
    """Why a kernel for rows without trees does not compute a model's scores."""
    if cap and wanted == "cudnn":
        return "cudnn does not bound attention scores"
    return f"{wanted} has no attention sinks" if sinks else None


def _shards_refuse(wanted: str, *, heads: int, kv_heads: int) -> str | None:
    """Why the mesh in force does not divide the heads."""
    copies = kv_copies(heads, kv_heads, axis_parts("kv_heads"))
    for name, count in (("heads", heads), ("kv_heads", kv_heads * copies)):
        if count % axis_parts(name):
            axis = f"{RULES[name]}={axis_parts(name)}"
            return f"{wanted} needs {name} divisible by mesh axis {axis}: got {count}"
    return None


def kernel_for(wanted: str, **shape: Any) -> str:
    """The kernel that `select_kernel` gives; a fallback is logged, once for each reason.

    Args:
      shape: the further arguments of `select_kernel`.
    """
    kernel, reason = select_kernel(wanted, **shape)
    if kernel != wanted:
        _log_fallback(wanted, kernel, reason)
    return kernel


@functools.cache
def _log_fallback(wanted: str, kernel: str, reason: str) -> None:
    _LOGGER.warning("Attention by %s instead of %s: %s.", kernel, wanted, reason)


def preferred_kernel(platform: str) -> str:
    """The kernel of `model.attention=auto` on a platform, as `jax.Device.platform` names it."""
    return _PREFERRED.get(platform, "xla")


def row_block(platform: str) -> int:
    """The divisor of row lengths that makes attention compute no padding."""
    return tree_kernels.BLOCK if platform == "tpu" else 64


def tree_blocks(platform: str, dtype: str) -> tuple[int, int] | None:
    """Rows that a program of the platform's tree kernel accumulates, and visits at a time.

    None where a platform has no such kernel.
    """
    if platform == "tpu":
        return tree_kernels.BLOCK, tree_kernels.BLOCK
    return BLOCKS[jnp.dtype(dtype).itemsize] if platform in ("gpu", "cuda") else None


def check_kernel(wanted: str, platform: str) -> None:
    """Refuses a kernel that does not run on a platform; splash runs on cpu interpreted, slowly.

    Raises:
      ValueError: an unknown kernel, or one for other platforms.
    """
    _check_name(wanted)
    if wanted in _PLATFORMS and platform not in _PLATFORMS[wanted]:
        raise ValueError(
            f"attention: got {wanted!r} on {platform}; allowed: {preferred_kernel(platform)!r}"
            f" here, or {wanted!r} on {' or '.join(_PLATFORMS[wanted])}."
        )


def _check_name(wanted: str) -> None:
    names = (*_PLAIN, *_REFUSES)
    if wanted not in names:
        raise ValueError(f"attention: got {wanted!r}; allowed: {', '.join(names)}.")
