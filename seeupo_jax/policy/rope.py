"""Rotary position embedding, and the ways in which models stretch it to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Rope:
    """Frequencies of the rotation; fields as `rope_parameters` of a config.json names them."""

    theta: float = 10_000.0
    scaling: str = "none"  # none | linear | llama3 | yarn | longrope | dynamic
    factor: float = 1.0  # how much longer the context became (all but none)
    original_positions: int = 0  # the context before it (llama3, yarn, longrope)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope: of each pair, up to the original context
    long_factor: tuple[float, ...] = ()  # longrope: beyond it; kept for files, never computed
    partial: float = 1.0  # the part of a head's dimensions that rotates: its first ones
    interleaved: bool = False  # pairs are neighbours (GLM), not one of each half
    query_growth: float = 0.0  # queries grow with the logarithm of their original contexts

    def dimensions(self, head_dim: int) -> int:
        """How many of a head's dimensions rotate."""
        return int(head_dim * self.partial)


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """How fast each pair of dimensions turns, and what cosines and sines are multiplied by.

    Args:
      head_dim: width of a head, even.

    Returns: float32 [rotating dimensions / 2], radians a position; the attention scale, 1 except
      for yarn and longrope.

    Raises:
      ValueError: a scaling of another name.
    """
    if rope.scaling not in _SCALINGS:
        raise ValueError(f"rope scaling: got {rope.scaling!r}; allowed: {', '.join(_SCALINGS)}.")
    # float32 throughout, as models were trained: at position 30,000 one unit in the last place
    # of a frequency already moves an angle by a thousandth.
    dimensions = rope.dimensions(head_dim)
    exponent = np.arange(0, dimensions, 2, dtype=np.float32) / np.float32(dimensions)
    return _SCALINGS[rope.scaling](rope, np.float32(1) / np.float32(rope.theta) ** exponent)


def _none(rope: Rope, frequency: np.ndarray) -> tuple[np.ndarray, float]:
    return frequency, 1.0


def _dynamic(rope: Rope, frequency: np.ndarray) -> tuple[np.ndarray, float]:
    """None, up to the model's own context (see `BY_LENGTH`)."""
    return frequency, 1.0


def _linear(rope: Rope, frequency: np.ndarray) -> tuple[np.ndarray, float]:
    """Every position divided by the factor (arXiv:2306.15595)."""
    return frequency / np.float32(rope.factor), 1.0


def _llama3(rope: Rope, frequency: np.ndarray) -> tuple[np.ndarray, float]:
    """Slow pairs are slowed by the factor, fast ones kept, a ramp between (Llama 3.1).

    Slow and fast: by the number of turns that a pair makes within the original context.
    """
    turns = np.float32(rope.original_positions) / (np.float32(2 * math.pi) / frequency)
    weight = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(frequency / np.float32(rope.factor), frequency, weight), 1.0


def _yarn(rope: Rope, frequency: np.ndarray) -> tuple[np.ndarray, float]:
    """As llama3, with a ramp that is linear in the dimension, and sharper attention (YaRN).

    arXiv:2309.00071, Eqs. 17 to 22; `beta_fast` and `beta_slow` are its turns in the old context.
    """
    head_dim = 2 * len(frequency)

    def dimension(turns: float) -> float:
        """The dimension of the pair that makes so many turns within the original context."""
        wavelength = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = 0.001 if first == last else last - first  # a step instead of a division by zero
    slowed = (np.arange(len(frequency), dtype=np.float32) - first) / width
    return _blend(frequency, frequency / np.float32(rope.factor), slowed), _yarn_scale(rope)


def _yarn_scale(rope: Rope) -> float:
    """Grows with the logarithm of the factor, unless the model says otherwise."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def growth(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(max(rope.factor, 1))

    if rope.mscale and rope.mscale_all_dim:  # zero is how a config.json says that there is none
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1)


def _longrope(rope: Rope, frequency: np.ndarray) -> tuple[np.ndarray, float]:
    """Every pair slowed by a factor of its own, and sharper attention (arXiv:2402.13753).

    Of a model's two lists of factors, the one for contexts up to the original (see `BY_LENGTH`).
    """
    scale = rope.attention_factor
    if scale is None:
        growth = math.log(rope.factor) / math.log(rope.original_positions)
        scale = math.sqrt(1 + growth) if rope.factor > 1 else 1.0
    return frequency / np.float32(rope.short_factor), scale


def _blend(zero: np.ndarray, one: np.ndarray, weight: np.ndarray) -> np.ndarray:
    weight = np.clip(weight, 0, 1).astype(np.float32)
    return zero * (1 - weight) + one * weight


# Kinds that rotate a text by its length once it is longer than the original context; such texts are
# refused. Keys that a sampler has cached would need another rotation with every token.
BY_LENGTH = ("dynamic", "longrope")
_SCALINGS = {
    "none": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
}


def rotate(x_NLHd: jax.Array, position_NL: jax.Array, rope: Rope) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv:2104.09864), halves rotated as in Llama.

    Args:
      x_NLHd: queries or keys [N, L, H, head_dim].
      position_NL: int, of every token in its sequence.

    Returns: as x_NLHd, multiplied by the attention scale where it rotates.
    """
    frequency, scale = frequencies(rope, x_NLHd.shape[-1])
    angle = position_NL[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    cos, sin = ((f(angle) * scale).astype(x_NLHd.dtype) for f in (jnp.cos, jnp.sin))
    turning, still = jnp.split(x_NLHd, [2 * len(frequency)], axis=-1)
    if rope.interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
        pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([pairs.reshape(turning.shape), still], axis=-1)
    first, second = jnp.split(turning, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, still], axis=-1)


def grow_queries(q_NLHd: jax.Array, position_NL: jax.Array, rope: Rope) -> jax.Array:
    """Queries times 1 + beta · log(1 + ⌊position / original context⌋), as Llama 4 and Ministral 3.

    The factor sharpens attention over long contexts (arXiv:2501.19399); 1 in the first of them.
    """
    if not rope.query_growth:
        return q_NLHd
    contexts = (position_NL // rope.original_positions).astype(jnp.float32)
    growth = 1 + rope.query_growth * jnp.log1p(contexts)
    return q_NLHd * growth[:, :, None, None].astype(q_NLHd.dtype)
