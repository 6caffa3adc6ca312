"""Bytes of the activations that the backward pass of a microbatch needs, by formula."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from seeupo_jax.parallel.mesh import kv_heads_of_device
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.delta_net import GatedDeltaNet
from seeupo_jax.policy.kernels.attention import (
    FEW_KEYS,
    QUERIES_AT_LEAST,
    SCORES_AT_ONCE,
    KeyValues,
)
from seeupo_jax.policy.kernels.derivatives import FUSED
from seeupo_jax.policy.network import LOGITS_AT_ONCE, TOKENS_AT_ONCE, Network
from seeupo_jax.policy.transformer import REMAT, Layer

REMATS = ("none", "dots", "attention", "full")  # the least that is computed again first
_FLOAT32 = 4
_SCORES = 3  # copies of a chunk's scores while it is differentiated: themselves, weights, gradient
_LOGITS = 3  # and of a chunk's logits
# Copies of the residual stream outside the layers: embedded, normed, picked, gradients.
_STREAMS = 6
# With experts, XLA for TPU laid out 1.0 to 1.31 times what is counted here (docs/hardware.md).
_SPARSE = 1.3


def remats(arch: Architecture, platform: str) -> tuple[str, ...]:
    """The levels of `REMATS` that are different programs on a platform."""
    if platform == "cpu" and not arch.scan_layers:  # XLA for CPU undoes recomputation there
        return REMATS[:1]
    return tuple(name for name in REMATS if name != "attention" or _fused(arch))


def microbatch_bytes(
    arch: Architecture, remat: str, *, rows: int, length: int, platform: str, expert: int = 1
) -> int:
    """Bytes of activations while a microbatch is differentiated, at the most.

    All layers' kept ones, and while one layer goes backwards, those of this layer that are computed
    again, or their gradients.

    Args:
      arch: as one device has it: of heads and widths that are cut, its share (`share_of`).
      remat: one of `REMATS`. rows, length: of the microbatch on one device.
      expert: devices that share a layer's experts.
    """
    item, tokens = jnp.dtype(arch.dtype).itemsize, rows * length
    of_layer = functools.partial(
        _layer_bytes, arch, rows=rows, length=length, platform=platform, expert=expert
    )
    saved = sum(of_layer(i, remat) for i in range(arch.layers))
    largest_layer = max(of_layer(i, "none") for i in range(arch.layers))
    # Keys and values are kept for the refresh of the weights, at any level of recomputation.
    layers = sum(not arch.is_recurrent(i) for i in range(arch.layers))
    keys = 2 * tokens * layers * arch.kv_heads * arch.head_dim * item
    chunk = min(tokens, TOKENS_AT_ONCE, max(1, LOGITS_AT_ONCE // arch.vocab_size))
    copies = 2 if arch.lora is None else 1  # in float32, and its gradient where it trains
    head = copies * arch.vocab_size * arch.width * _FLOAT32
    outside = chunk * _LOGITS * arch.vocab_size * _FLOAT32 + head
    outside += _STREAMS * tokens * arch.width * item
    counted = saved + largest_layer + keys + outside
    counted += _scores_at_once(arch, remat, rows, length, platform)
    return counted if arch.routing is None else round(_SPARSE * counted)


def share_of(arch: Architecture, tensor: int) -> Architecture:
    """A network's part on one of so many devices that share each row's heads and widths."""
    if tensor == 1:
        return arch

    def divide(size: int) -> int:
        return size // tensor if size % tensor == 0 else size

    moe, delta = arch.moe, arch.delta
    if delta is not None:
        heads = {"key_heads": divide(delta.key_heads), "value_heads": divide(delta.value_heads)}
        delta = dataclasses.replace(delta, **heads)
    if moe is not None:
        moe = dataclasses.replace(moe, mlp_width=divide(moe.mlp_width))
    return dataclasses.replace(
        arch,
        vocab_size=divide(arch.vocab_size),
        heads=divide(arch.heads),
        kv_heads=kv_heads_of_device(arch.heads, arch.kv_heads, tensor),
        mlp_width=divide(arch.mlp_width),
        moe=moe,
        delta=delta,
    )


def _layer_bytes(
    arch: Architecture,
    index: int,
    remat: str,
    *,
    rows: int,
    length: int,
    platform: str,
    expert: int,
) -> int:
    """Bytes kept of one layer, without its parameters, which stay in any case."""
    recurrent = arch.is_recurrent(index)
    delta = dataclasses.replace(arch.delta, layers=(0,)) if recurrent else None
    alike = dataclasses.replace(
        arch,
        layers=1,
        windows=(),
        ropes=(),
        scan_layers=False,
        remat="none",
        moe=None,
        lora=arch.layer_adapters(index),
        delta=delta,
    )
    if arch.moe is None or not arch.is_sparse(index):
        of_row, cast = _saved_bytes(alike, remat, length)
    else:
        moe = dataclasses.replace(arch.moe, dense_layers=())
        lora = None if arch.lora is None else arch.lora.of_layer(index)
        sparse = dataclasses.replace(alike, moe=moe, lora=lora)
        all_experts = _saved_bytes(sparse, remat, length)
        width = max(1, moe.shared_width)  # of what is not shared out: the expert of all tokens
        rest = _saved_bytes(dataclasses.replace(alike, mlp_width=width), remat, length)
        # A device has the tokens of all that share the experts, and its part of the experts.
        of_row = rest[0] + expert * (all_experts[0] - rest[0])
        cast = rest[1] + (all_experts[1] - rest[1]) // expert
    scores = 0
    if not recurrent and _in_whole(arch, rows, length, platform):
        item = {"none": jnp.dtype(arch.dtype).itemsize, "dots": _FLOAT32}.get(remat, 0)
        scores = rows * arch.heads * length**2 * item
    return of_row * rows + cast + scores


def _saved_bytes(arch: Architecture, remat: str, length: int) -> tuple[int, int]:
    """Bytes of a layer for each row, and of its parameters in the compute dtype."""
    one, two = (_traced(arch, remat, count, length) for count in (1, 2))
    # What does not grow with the rows is parameters.
    return two - one, 0 if arch.dtype == "float32" else max(0, 2 * one - two)


@functools.cache
def _traced(arch: Architecture, remat: str, rows: int, length: int) -> int:
    """Bytes of all that the backward pass of one layer takes from the forward pass.

    But for parameters themselves, and positions, which all layers share. Attention is a stand-in
    that keeps what its kernels keep: its arguments, its result, and a number a query and head.
    """
    layer = nnx.eval_shape(lambda: Layer(arch, 0, nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    params, frozen = policy.split_trainable(Network(arch, graph), nnx.to_pure_dict(state))
    # A shape too: planning takes no device, which may be another process's.
    position_NL = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    attend = functools.partial(_attend, _fused(arch))

    def recur(delta: GatedDeltaNet, x: jax.Array) -> tuple[jax.Array, None]:
        return delta(x), None

    def run(params: Any, frozen: Any, x: jax.Array, position_NL: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, nnx.State(policy.join_params(params, frozen)))
        adapter_NL = position_NL if arch.turn_adapters else None  # any numbers, of every token
        return layer(x, position_NL, attend, recur, adapter_NL=adapter_NL)[0]

    def backward(params: Any, frozen: Any, x: jax.Array, position_NL: jax.Array) -> Any:
        body = REMAT[remat](run)
        return jax.vjp(lambda params, x: body(params, frozen, x, position_NL), params, x)[1]

    x = jax.ShapeDtypeStruct((rows, length, arch.width), jnp.dtype(arch.dtype))
    residuals = jax.tree.leaves(jax.eval_shape(backward, params, frozen, x, position_NL))
    parameters = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((params, frozen))]
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in residuals
        if (leaf.shape, leaf.dtype) not in parameters and leaf.dtype != position_NL.dtype
    )


def _fused(arch: Architecture) -> bool:
    """Whether a kernel attends token trees; it names what it gives, so that a layer can keep it."""
    return arch.attention in ("splash", "cudnn")


def _attend(
    fused: bool, q: jax.Array, new: KeyValues, _: dict[str, Any]
) -> tuple[jax.Array, KeyValues]:
    return _attended(fused, q, *new), new


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(fused: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.zeros_like(q)


def _forward(
    fused: bool, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out = jnp.zeros_like(q)
    # Turned: kernels keep all four in an order of axes of their own.
    q, k, v, turned = (x.swapaxes(1, 2) for x in (q, k, v, out))
    output_residuals = turned, jnp.zeros(q.shape[:3])
    return out, (q, k, v, *(checkpoint_name(x, FUSED) if fused else x for x in output_residuals))


def _backward(fused: bool, residuals: tuple[jax.Array, ...], _: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x.swapaxes(1, 2) for x in residuals[:3])


_attended.defvjp(_forward, _backward)


def _in_whole(arch: Architecture, rows: int, length: int, platform: str) -> bool:
    """Whether attention keeps its weights: all queries in one chunk, and no kernel for trees."""
    return _dense(arch, length, platform) and _chunk(arch, rows, length) >= length


def _dense(arch: Architecture, length: int, platform: str) -> bool:
    few = platform != "cpu" or length <= FEW_KEYS
    return arch.attention == "all_pairs" or (arch.attention == "xla" and few)


def _chunk(arch: Architecture, rows: int, length: int) -> int:
    """Queries whose scores are computed at once, as `attention` cuts them."""
    return max(QUERIES_AT_LEAST, SCORES_AT_ONCE // (rows * arch.heads * length))


def _scores_at_once(arch: Architecture, remat: str, rows: int, length: int, platform: str) -> int:
    if not _dense(arch, length, platform):
        return 0
    queries = min(length, _chunk(arch, rows, length))
    copies = _SCORES
    if _in_whole(arch, rows, length, platform):
        # A layer's own hold one already; computed again, its weights take the place of its scores.
        copies -= 1 if remat == "none" else 2
    return copies * rows * arch.heads * queries * length * _FLOAT32
