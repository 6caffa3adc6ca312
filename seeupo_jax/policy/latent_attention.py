"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 §2.1): its queries, keys and values.

A token's keys and values are products of one latent, beside a part of the key that has a rope and
is the same for all heads. There are two forms, equal but for rounding:
  - expanded: every head has keys and values of its own, as training wants it;
  - absorbed: a head's queries are multiplied by the transpose of its keys' matrix, and attend to
    the latents, the keys and values of a single head; the results are multiplied by the values'
    matrices. So the sampler's cache holds latents only.

Axes beyond the legend in `types.py`: n a head's dimensions without rope, v of its value, c of the
latent, r of an adapter's rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.parallel.mesh import repeat_kv_heads
from seeupo_jax.policy.architecture import Architecture, LoraAdapters
from seeupo_jax.policy.kernels.attention import KeyValues
from seeupo_jax.policy.norm import Norm
from seeupo_jax.policy.projection import Projection
from seeupo_jax.policy.rope import Rope, grow_queries, rotate

_EPS = 1e-6  # of the norms of latents, whatever the model's
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class LatentProjections(nnx.Module):
    """Projections of hidden states to queries, and by way of latents to keys and values."""

    def __init__(
        self,
        arch: Architecture,
        rope: Rope | None,
        rngs: nnx.Rngs,
        lora: Callable[[str], LoraAdapters | None],
    ):
        latent = self.latent = arch.latent
        self.heads, self.query_scale, self.rope = arch.heads, arch.query_scale, rope
        self.dtype = arch.dtype

        def project(name: str, inputs: int, outputs: int, out: str = "heads") -> Projection:
            bias = arch.qkv_bias and out == "rank"
            return Projection(
                (inputs, outputs),
                ("embed", out),
                rngs,
                bias=bias,
                lora=lora(name),
                int8=arch.int8,
            )

        D, queries = arch.width, arch.heads * latent.head_dim
        if latent.q_rank is None:
            self.q = project("q_proj", D, queries)
        else:
            self.q_a = project("q_a_proj", D, latent.q_rank, "rank")
            self.q_a_norm = Norm(arch, latent.q_rank, "rank", _EPS)
            self.q_b = project("q_b_proj", latent.q_rank, queries)
        self.kv_a = project("kv_a_proj_with_mqa", D, latent.cached_dim, "rank")
        self.kv_a_norm = Norm(arch, latent.kv_rank, "rank", _EPS)
        keys_values = arch.heads * (latent.nope_dim + latent.value_dim)
        self.kv_b = project("kv_b_proj", latent.kv_rank, keys_values)

    def expand(
        self, x: jax.Array, position_NL: jax.Array, adapter_NL: jax.Array | None = None
    ) -> tuple[jax.Array, KeyValues]:
        """Queries, keys and values of all heads; values are filled up with zeros to a key's width.

        The zeros cost as many FLOPs as values would: 1.2 times those of attention without them for
        DeepSeek-V3's 192 and 128. The kernels have one width for all three.
        """
        latent = self.latent
        q_NLHn, q_NLHd = self._queries(x, position_NL, adapter_NL)
        latent_NLc, key_NL1d = self._latents(x, position_NL, adapter_NL)
        keys_values = self._of_heads(self.kv_b(latent_NLc, adapter_NL))
        k_NLHn, v_NLHv = jnp.split(keys_values, [latent.nope_dim], axis=-1)
        shared = jnp.broadcast_to(key_NL1d, (*k_NLHn.shape[:3], latent.rope_dim))
        q = jnp.concatenate([q_NLHn, q_NLHd], axis=-1)
        if self.query_scale is not None:  # attention itself divides by the root of the width
            q = q * jnp.asarray(self.query_scale * latent.head_dim**0.5, q.dtype)
        zeros = ((0, 0), (0, 0), (0, 0), (0, latent.head_dim - latent.value_dim))
        return q, KeyValues(jnp.concatenate([k_NLHn, shared], axis=-1), jnp.pad(v_NLHv, zeros))

    def absorb(
        self, x: jax.Array, position_NL: jax.Array, adapter_NL: jax.Array | None = None
    ) -> tuple[jax.Array, KeyValues]:
        """Queries of latents, and of one head its keys, which are its values too."""
        latent, adapter_NL1 = self.latent, _of_each_head(adapter_NL)
        q_NLHn, q_NLHd = self._queries(x, position_NL, adapter_NL)
        latent_NLc, key_NL1d = self._latents(x, position_NL, adapter_NL)
        kernel, scale, factors = self._second(slice(latent.nope_dim))
        q_NLHc = _product("nlhd,chd->nlhc", _scaled(q_NLHn, scale), kernel)
        if factors is not None:
            low = _product("nlhd,rhd->nlhr", q_NLHn, factors[1]).astype(x.dtype)
            low = self.kv_b.own(low, adapter_NL1)
            q_NLHc += _product("nlhr,cr->nlhc", low, factors[0]) * self.kv_b.lora.scale
        query_scale = latent.head_dim**-0.5 if self.query_scale is None else self.query_scale
        q = jnp.concatenate([q_NLHc, q_NLHd.astype(jnp.float32)], axis=-1)
        q = (q * (query_scale * latent.cached_dim**0.5)).astype(x.dtype)
        keys = jnp.concatenate([latent_NLc[:, :, None], key_NL1d], axis=-1)
        keys = repeat_kv_heads(keys, self.heads)
        return q, KeyValues(keys, keys)

    def read(self, y: jax.Array, absorbed: bool, adapter_NL: jax.Array | None = None) -> jax.Array:
        """Each head's sum of values, from what attention gives in either form."""
        latent = self.latent
        if not absorbed:
            return y[..., : latent.value_dim]
        y_NLHc = y[..., : latent.kv_rank]
        kernel, scale, factors = self._second(slice(latent.nope_dim, None))
        out_NLHv = _scaled(_product("nlhc,chv->nlhv", y_NLHc, kernel), scale)
        if factors is not None:
            low = _product("nlhc,cr->nlhr", y_NLHc, factors[0]).astype(y.dtype)
            low = self.kv_b.own(low, _of_each_head(adapter_NL))
            out_NLHv += _product("nlhr,rhv->nlhv", low, factors[1]) * self.kv_b.lora.scale
        return out_NLHv.astype(y.dtype)

    def _queries(
        self, x: jax.Array, position_NL: jax.Array, adapter_NL: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Their parts without rope and with it."""
        if self.latent.q_rank is None:
            q = self._of_heads(self.q(x, adapter_NL))
        else:
            q = self._of_heads(self.q_b(self.q_a_norm(self.q_a(x, adapter_NL)), adapter_NL))
        if self.rope is not None:
            q = grow_queries(q, position_NL, self.rope)
        still, turning = jnp.split(q, [self.latent.nope_dim], axis=-1)
        return still, self._rotated(turning, position_NL)

    def _latents(
        self, x: jax.Array, position_NL: jax.Array, adapter_NL: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Latents, and the part of keys that has a rope."""
        latent, key = jnp.split(self.kv_a(x, adapter_NL), [self.latent.kv_rank], axis=-1)
        return self.kv_a_norm(latent), self._rotated(key[:, :, None], position_NL)

    def _rotated(self, x: jax.Array, position_NL: jax.Array) -> jax.Array:
        return x if self.rope is None else rotate(x, position_NL, self.rope)

    def _of_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.heads, -1)

    def _second(
        self, part: slice
    ) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, jax.Array] | None]:
        """The matrix from latents to keys or to values, its scales, and the factors of its adapter.

        Args:
          part: of a head's dimensions.

        Returns: [c, H, d], [H, d], and [c, r] and [r, H, d].
        """
        kv_b, dtype = self.kv_b, self.dtype
        kernel = self._of_heads(kv_b.kernel[...])[..., part].astype(dtype)
        scale = factors = None
        if kv_b.kernel_scale is not None:
            scale = self._of_heads(kv_b.kernel_scale[...])[..., part]
        if kv_b.lora is not None:
            a, b = kv_b.factors(dtype)
            factors = a, self._of_heads(b)[..., part]
        return kernel, scale, factors


def _of_each_head(adapter_NL: jax.Array | None) -> jax.Array | None:
    return None if adapter_NL is None else adapter_NL[:, :, None]


def _scaled(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """x times the scales of 8-bit columns, in its own type."""
    return x if scale is None else (x * scale[None, None]).astype(x.dtype)
