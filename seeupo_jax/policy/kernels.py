"""Fused attention: Pallas splash on TPU, cuDNN flash on GPU; which of them a pass can use.

Both are for a pass whose keys are its own, and see by index: a query at index i of a row sees the
keys at i - window < j <= i, of its own segment where there are segments. Where positions grow by
one along a segment, this is what `attention.attend` shows by position.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

from seeupo_jax.parallel.mesh import RULES, per_shard

_LOGGER = logging.getLogger(__name__)
_LANES = 128  # a block of keys fills the lanes of a TPU register, or several

_PLATFORMS = {"splash": ("tpu", "cpu"), "cudnn": ("gpu", "cuda")}  # xla runs on all
_PREFERRED = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
_QUERIES = ("rows", "length", "heads", "head_dim")
_KEYS = ("rows", "length", "kv_heads", "head_dim")
_ROWS = ("rows", "length")


def splash(
    q_NLHd: jax.Array,
    k_NLHd: jax.Array,
    v_NLHd: jax.Array,
    segment_NL: jax.Array | None = None,
    *,
    window: int | None = None,
) -> jax.Array:
    """Attention by Pallas's splash kernel, each device on its own rows and heads.

    Which platform the program is lowered for decides: TPU compiles the kernel, CPU interprets it.

    Args:
      q_NLHd: [N, L, H, head_dim], `select_kernel` tells which.
      k_NLHd, v_NLHd: [N, L, kv_heads, head_dim].
      segment_NL: int32, of every token; None is one segment a row.
      window: how many keys a query sees, its own included; None is all before it.

    Returns: [N, L, H, head_dim] in the dtype of q.
    """
    return _per_shard(functools.partial(_splash, window=window), q_NLHd, k_NLHd, v_NLHd, segment_NL)


def cudnn(
    q_NLHd: jax.Array,
    k_NLHd: jax.Array,
    v_NLHd: jax.Array,
    segment_NL: jax.Array | None = None,
    *,
    window: int | None = None,
    _implementation: str = "cudnn",
) -> jax.Array:
    """Attention by cuDNN's flash kernel, each device on its own rows and heads.

    Segments are a mask of [N, 1, L, L]; without them the kernel needs none. Arguments and result
    are those of `splash`.
    """
    f = functools.partial(_dot_product, window=window, implementation=_implementation)
    return _per_shard(f, q_NLHd, k_NLHd, v_NLHd, segment_NL)


def _per_shard(f: Callable[..., jax.Array], *arrays: jax.Array | None) -> jax.Array:
    """`f` of the arrays that are there, on every device's rows and heads."""
    given = [x for x in arrays if x is not None]
    layouts = (_QUERIES, _KEYS, _KEYS, _ROWS)[: len(given)]
    return per_shard(f, layouts, _QUERIES)(*given)


def _splash(
    q_NLHd: jax.Array,
    k_NLHd: jax.Array,
    v_NLHd: jax.Array,
    segment_NL: jax.Array | None = None,
    *,
    window: int | None,
) -> jax.Array:
    L, H, d = q_NLHd.shape[1:]
    seen = (
        mask_lib.CausalMask((L, L))
        if window is None
        else mask_lib.LocalMask((L, L), window_size=(window - 1, 0), offset=0)
    )
    segment = () if segment_NL is None else (segment_NL,)
    scaled = q_NLHd * d**-0.5  # the kernel does not scale
    heads_first = [x.transpose(0, 2, 1, 3) for x in (scaled, k_NLHd, v_NLHd)]

    def run(*arrays: jax.Array, interpret: bool) -> jax.Array:
        kernel = splash_lib.make_splash_mha_single_device(
            mask_lib.MultiHeadMask([seen] * H), block_sizes=_blocks(L), interpret=interpret
        )

        def row(q: jax.Array, k: jax.Array, v: jax.Array, *segment: jax.Array) -> jax.Array:
            return kernel(q, k, v, *(splash_lib.SegmentIds(s, s) for s in segment))

        return jax.vmap(row)(*arrays)

    out = jax.lax.platform_dependent(
        *heads_first,
        *segment,
        tpu=functools.partial(run, interpret=False),
        cpu=functools.partial(run, interpret=True),
    )
    return out.transpose(0, 2, 1, 3)


def _blocks(length: int) -> splash_lib.BlockSizes:
    """Blocks of queries and keys, in all passes: the largest that divide the length, up to 512."""
    size = max(n for n in range(_LANES, 512 + 1, _LANES) if length % n == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return splash_lib.BlockSizes(**{f"block_{name}": size for name in names})


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
    if length % _LANES:
        return f"splash needs a length that {_LANES} divides: got {length}"
    if head_dim % 8:
        return f"splash needs a head_dim that 8 divides: got {head_dim}"
    return None


def _cudnn_refuses(length: int, head_dim: int, dtype: str) -> str | None:
    if dtype not in ("bfloat16", "float16"):
        return f"cudnn needs bfloat16 or float16: got {dtype}"
    if head_dim % 8 or head_dim > 128:
        return f"cudnn needs a head_dim up to 128 that 8 divides: got {head_dim}"
    if length % 2:
        return f"cudnn needs an even length: got {length}"
    return None


# Why a kernel cannot take a shape; None where it can.
_REFUSES: dict[str, Callable[[int, int, str], str | None]] = {
    "splash": _splash_refuses,
    "cudnn": _cudnn_refuses,
}


def select_kernel(
    wanted: str, *, length: int, head_dim: int, kv_heads: int, heads: int, dtype: str
) -> tuple[str, str]:
    """The kernel that a whole-row pass of this shape uses on the mesh in force, and why.

    Args:
      wanted: xla | splash | cudnn.
      dtype: of queries, keys and values, by name.

    Returns: `wanted` or xla; the reason, words without a full stop.

    Raises:
      ValueError: a kernel of another name.
    """
    _check_name(wanted)
    if wanted == "xla":
        return wanted, "as wanted"
    reason = _REFUSES[wanted](length, head_dim, dtype)
    if reason is None:
        reason = _shards_refuse(wanted, heads=heads, kv_heads=kv_heads)
    return (wanted, "as wanted") if reason is None else ("xla", reason)


def _shards_refuse(wanted: str, **heads: int) -> str | None:
    """Why the mesh in force cannot give every device whole heads."""
    mesh = jax.sharding.get_abstract_mesh()
    for name, count in heads.items():
        parts = 1 if mesh.empty else mesh.shape[RULES[name]]
        if count % parts:
            return (
                f"{wanted} needs {name} that mesh axis {RULES[name]}={parts} divides: got {count}"
            )
    return None


def kernel_for(
    wanted: str, *, length: int, head_dim: int, kv_heads: int, heads: int, dtype: str
) -> str:
    """The kernel that `select_kernel` gives; a fallback is logged, once for each reason."""
    kernel, reason = select_kernel(
        wanted, length=length, head_dim=head_dim, kv_heads=kv_heads, heads=heads, dtype=dtype
    )
    if kernel != wanted:
        _log_fallback(wanted, kernel, reason)
    return kernel


@functools.cache
def _log_fallback(wanted: str, kernel: str, reason: str) -> None:
    _LOGGER.warning("Attention by %s instead of %s: %s.", kernel, wanted, reason)


def preferred_kernel(platform: str) -> str:
    """What `model.attention=auto` means on a platform, as `jax.Device.platform` names it."""
    return _PREFERRED.get(platform, "xla")


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
    names = ("xla", *_REFUSES)
    if wanted not in names:
        raise ValueError(f"attention: got {wanted!r}; allowed: {', '.join(names)}.")
