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
    scaling: str = "none"  # none | linear | llama3 | yarn | dynamic
    factor: float = 1.0  # how much longer the context became (all but none)
    original_positions: int = 0  # the context before it (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """How fast each pair of dimensions turns, and what cosines and sines are multiplied by.

    Args:
      head_dim: width of a head, even.

    Returns: float32 [head_dim / 2], radians a position; the attention scale, 1 except for yarn.

    Raises:
      ValueError: a scaling of another name.
    """
    if rope.scaling not in _SCALINGS:
        raise ValueError(f"rope scaling: got {rope.scaling!r}; allowed: {', '.join(_SCALINGS)}.")
    # float32 throughout, as models were trained: at position 30,000 one unit in the last place
    # of a frequency already moves an angle by a thousandth.
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return _SCALINGS[rope.scaling](rope, np.float32(1) / np.float32(rope.theta) ** exponent)


def _none(rope: Rope, frequency: np.ndarray) -> tuple[np.ndarray, float]:
    return frequency, 1.0


def _dynamic(rope: Rope, frequency: np.ndarray) -> tuple[np.ndarray, float]:
    """None, up to the model's own context. Beyond it they would depend on each text's length.

    Then keys that a sampler has cached would need another rotation with every token.
    """
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


def _blend(zero: np.ndarray, one: np.ndarray, weight: np.ndarray) -> np.ndarray:
    weight = np.clip(weight, 0, 1).astype(np.float32)
    return zero * (1 - weight) + one * weight


_SCALINGS = {
    "none": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _dynamic,
}


def rotate(x_NLHd: jax.Array, position_NL: jax.Array, rope: Rope) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv:2104.09864), halves rotated as in Llama.

    Args:
      x_NLHd: queries or keys [N, L, H, head_dim].
      position_NL: int, of every token in its sequence.

    Returns: as x_NLHd, multiplied by the attention scale.
    """
    frequency, scale = frequencies(rope, x_NLHd.shape[-1])
    angle = position_NL[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    cos, sin = ((f(angle) * scale).astype(x_NLHd.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x_NLHd, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
