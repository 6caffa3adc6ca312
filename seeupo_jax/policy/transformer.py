"""A decoder-only transformer in Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.parallel.mesh import constrain
from seeupo_jax.policy import attention
from seeupo_jax.policy.attention import NOWHERE, KeyValues

_REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "dots": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
}


@dataclass(frozen=True)
class Architecture:
    """The shape of a policy network; names as in `config.Model`."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = True
    dtype: str = "float32"
    scan_layers: bool = False
    remat: str = "none"


class Norm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, size: int, eps: float, logical: str):
        self.scale = nnx.Param(jnp.ones((size,)), logical=(logical,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (y * scale).astype(x.dtype)


class Projection(nnx.Module):
    """A dense layer; normal initialisation scaled by 1/sqrt(fan-in) times `gain`."""

    def __init__(
        self,
        shape: tuple[int, int],
        logical: tuple[str, str],
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        gain: float = 1.0,
    ):
        init = jax.random.normal(rngs.params(), shape) * (gain * shape[0] ** -0.5)
        self.kernel = nnx.Param(init, logical=logical)
        self.bias = nnx.Param(jnp.zeros(shape[1]), logical=logical[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)[None, None, :]


class Layer(nnx.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, arch: Architecture, rngs: nnx.Rngs):
        self.arch = arch
        D, q, kv = arch.width, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        bias = arch.qkv_bias
        residual = (2 * arch.layers) ** -0.5  # keeps the residual stream's size through the depth
        self.attention_norm = Norm(D, arch.norm_eps, "embed")
        self.q = Projection((D, q), ("embed", "heads"), rngs, bias=bias)
        self.k = Projection((D, kv), ("embed", "kv_heads"), rngs, bias=bias)
        self.v = Projection((D, kv), ("embed", "kv_heads"), rngs, bias=bias)
        self.out = Projection((q, D), ("heads", "embed"), rngs, gain=residual)
        self.q_norm = Norm(arch.head_dim, arch.norm_eps, "head_dim") if arch.qk_norm else None
        self.k_norm = Norm(arch.head_dim, arch.norm_eps, "head_dim") if arch.qk_norm else None
        self.mlp_norm = Norm(D, arch.norm_eps, "embed")
        self.gate = Projection((D, arch.mlp_width), ("embed", "mlp"), rngs)
        self.up = Projection((D, arch.mlp_width), ("embed", "mlp"), rngs)
        self.down = Projection((arch.mlp_width, D), ("mlp", "embed"), rngs, gain=residual)

    def __call__(
        self, x: jax.Array, position_NL: jax.Array, see: Callable[[KeyValues], Any]
    ) -> tuple[jax.Array, KeyValues]:
        """Returns the residual stream and the keys and values that later queries may need.

        see: maps this pass's keys and values to (all that are seen, their positions, what to keep).
        """
        y = self.attention_norm(x)
        q, new = self._project(y, position_NL)
        keys, key_position_NC, kept = see(new)
        y = attention.attend(q, keys, position_NL, key_position_NC)
        x = x + self.out(y.reshape(*y.shape[:2], -1))
        y = self.mlp_norm(x)
        x = x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))
        return constrain(x, "rows", "length", "embed"), kept

    def _project(self, x: jax.Array, position_NL: jax.Array) -> tuple[jax.Array, KeyValues]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.arch.head_dim)  # noqa: E731
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        theta = self.arch.rope_theta
        q, k = (attention.rotate(y, position_NL, theta) for y in (q, k))
        return q, KeyValues(k, v)


class Transformer(nnx.Module):
    """The policy network. Parameters are float32 and name their logical axes."""

    def __init__(self, arch: Architecture, rngs: nnx.Rngs):
        self.arch = arch
        self.embedding = _table(arch, rngs)
        layers = [Layer(arch, rngs) for _ in range(arch.layers)]
        self.layers = _stack(layers) if arch.scan_layers else nnx.List(layers)
        self.norm = Norm(arch.width, arch.norm_eps, "embed")
        self.head = None if arch.tied else _table(arch, rngs)

    def __call__(self, tokens_NL: jax.Array) -> jax.Array:
        """Float32 logits [N, L, V] of every next token, for rows without left padding."""
        hidden, _ = self.hidden(tokens_NL)
        return jnp.einsum(
            "nld,vd->nlv", hidden, self.head_VD(hidden.dtype), preferred_element_type=jnp.float32
        )

    def head_VD(self, dtype: Any) -> jax.Array:
        """The output projection: the head, or the embedding where both are one."""
        head = self.embedding if self.head is None else self.head
        return head[...].astype(dtype)

    def hidden(
        self, tokens_NL: jax.Array, *, past: Sequence[KeyValues] = (), past_length_N: Any = None
    ) -> tuple[jax.Array, Sequence[KeyValues]]:
        """Final hidden states [N, L, D] of whole sequences, or of what follows `past`.

        Args:
          past: keys and values per layer of an earlier pass over each row's first tokens.
          past_length_N: how many tokens of `past` are real; the new ones continue right after them.

        Returns: the hidden states, and this pass's keys and values per layer.
        """
        N, L = tokens_NL.shape
        position_NL = jnp.broadcast_to(jnp.arange(L)[None, :], (N, L))
        if not past:
            return self._run(tokens_NL, position_NL, past, lambda _, new: (new, position_NL, new))
        position_NL = position_NL + past_length_N[:, None]
        slot_C = jnp.arange(past[0].k.shape[1])
        real_NC = slot_C[None, :] < past_length_N[:, None]
        seen_NC = jnp.where(real_NC, slot_C[None, :], NOWHERE)
        key_position = jnp.concatenate([seen_NC, position_NL], axis=1)
        see = lambda old, new: (attention.join(old, new), key_position, new)  # noqa: E731
        return self._run(tokens_NL, position_NL, past, see)

    def extend(
        self, tokens_NL: jax.Array, position_NL: jax.Array, cache: Sequence[KeyValues]
    ) -> tuple[jax.Array, Sequence[KeyValues]]:
        """Final hidden states [N, L, D] of tokens appended to a cache whose slot is the position.

        A token at a position beyond the cache is padding: it is written nowhere.
        Returns: the hidden states, and the cache with the tokens in it.
        """
        N, C = cache[0].k.shape[:2]
        slot_NC = jnp.broadcast_to(jnp.arange(C)[None, :], (N, C))

        def see(old: KeyValues, new: KeyValues) -> tuple[KeyValues, jax.Array, KeyValues]:
            kept = attention.write(old, new, position_NL)
            return kept, slot_NC, kept

        return self._run(tokens_NL, position_NL, cache, see)

    def _run(
        self,
        tokens_NL: jax.Array,
        position_NL: jax.Array,
        past: Sequence[KeyValues],
        see: Callable[[KeyValues | None, KeyValues], Any],
    ) -> tuple[jax.Array, Sequence[KeyValues]]:
        # Whole in width before the look-up: XLA could only replicate its result to spread the rows.
        table_VD = constrain(self.embedding[...].astype(self.arch.dtype), "vocab", "embed")
        x = constrain(table_VD[tokens_NL], "rows", "length", "embed")
        remat = _REMAT[self.arch.remat]

        def run(layer: Layer, x: jax.Array, old: KeyValues | None) -> tuple[jax.Array, KeyValues]:
            return layer(x, position_NL, lambda new: see(old, new))

        if self.arch.scan_layers and not past:
            graph, stacked = nnx.split(self.layers)
            body = remat(lambda x, state: run(nnx.merge(graph, state), x, None))
            x, kept = jax.lax.scan(body, x, stacked)
            kept = [jax.tree.map(lambda y, i=i: y[i], kept) for i in range(self.arch.layers)]
        else:
            kept = []
            for layer, old in zip(
                self.each_layer(), past or [None] * self.arch.layers, strict=True
            ):
                graph, state = nnx.split(layer)
                body = remat(
                    lambda state, x, old, graph=graph: run(nnx.merge(graph, state), x, old)
                )
                x, keys = body(state, x, old)
                kept.append(keys)
        return self.norm(x), kept

    def each_layer(self) -> list[Layer]:
        """The layers one by one, also where they are stored stacked."""
        if not self.arch.scan_layers:
            return list(self.layers)
        graph, stacked = nnx.split(self.layers)
        slices = (jax.tree.map(lambda y, i=i: y[i], stacked) for i in range(self.arch.layers))
        return [nnx.merge(graph, state) for state in slices]


def _table(arch: Architecture, rngs: nnx.Rngs) -> nnx.Param:
    """Token vectors [V, D], of unit expected norm."""
    init = jax.random.normal(rngs.params(), (arch.vocab_size, arch.width)) * arch.width**-0.5
    return nnx.Param(init, logical=("vocab", "embed"))


def _stack(layers: Sequence[Layer]) -> Layer:
    """One layer whose parameters carry a leading axis `layers`."""
    graph, first = nnx.split(layers[0])
    states = [nnx.split(layer)[1] for layer in layers]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    logical = nnx.to_flat_state(first)
    for (_, stacked_param), (_, param) in zip(nnx.to_flat_state(stacked), logical, strict=True):
        stacked_param.set_metadata(logical=("layers", *param.get_metadata("logical")))
    return nnx.merge(graph, stacked)


def new_cache(arch: Architecture, rows: int, slots: int) -> list[KeyValues]:
    """An empty cache: [rows, slots, kv_heads, head_dim] per layer, keys and values."""
    shape = (rows, slots, arch.kv_heads, arch.head_dim)
    make = lambda: jnp.zeros(shape, arch.dtype)  # noqa: E731
    return [KeyValues(make(), make()) for _ in range(arch.layers)]
