"""The losses of Tinker's API: of one token's log-probability each, summed over all tokens.

https://tinker-docs.thinkingmachines.ai/losses. Axes: R rows, L tokens of a row. Sums, not means:
a client that wants a mean divides its weights or advantages itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

Arrays = Mapping[str, jax.Array]
CLIP = MappingProxyType({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})


class Loss(NamedTuple):
    """A loss that requests name.

    of_token: from log-probabilities, inputs and options, float32 [R, L], to be minimised.
    inputs: float arrays of a datum that it needs beside `target_tokens`.
    optional: of these, those that may be missing, with their value everywhere.
    options: of the request, with their defaults.
    """

    of_token: Callable[[jax.Array, Arrays, Arrays], jax.Array]
    inputs: tuple[str, ...]
    optional: Mapping[str, float] = MappingProxyType({})
    options: Mapping[str, float] = MappingProxyType({})


def cross_entropy(logp_RL: jax.Array, inputs: Arrays, options: Arrays) -> jax.Array:
    """-weight · log p. Returns float32 [R, L]."""
    del options
    return -logp_RL * inputs["weights"]


def importance_sampling(logp_RL: jax.Array, inputs: Arrays, options: Arrays) -> jax.Array:
    """-p / q · advantage, where q sampled the token. Returns float32 [R, L]."""
    del options
    return -_ratio(logp_RL, inputs) * inputs["advantages"]


def ppo(logp_RL: jax.Array, inputs: Arrays, options: Arrays) -> jax.Array:
    """-min(ratio · A, clip(ratio, low, high) · A) (Eq. 7, arXiv:1707.06347), a token a ratio.

    The thresholds are of the ratio itself: 0.8 and 1.2 where a request names none. Returns float32
    [R, L].
    """
    ratio_RL, advantage_RL = _ratio(logp_RL, inputs), inputs["advantages"]
    return -jnp.minimum(ratio_RL * advantage_RL, _clip(ratio_RL, options) * advantage_RL)


def cispo(logp_RL: jax.Array, inputs: Arrays, options: Arrays) -> jax.Array:
    """-clip(ratio, low, high) · A · log p, the clipped ratio a constant (Eq. 4, arXiv:2506.13585).

    Returns float32 [R, L].
    """
    clipped_RL = jax.lax.stop_gradient(_clip(_ratio(logp_RL, inputs), options))
    return -clipped_RL * inputs["advantages"] * logp_RL


def _ratio(logp_RL: jax.Array, inputs: Arrays) -> jax.Array:
    return jnp.exp(logp_RL - inputs["logprobs"])


def _clip(ratio_RL: jax.Array, options: Arrays) -> jax.Array:
    return jnp.clip(ratio_RL, options["clip_low_threshold"], options["clip_high_threshold"])


_SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross_entropy": Loss(cross_entropy, ("weights",), MappingProxyType({"weights": 1.0})),
        "importance_sampling": Loss(importance_sampling, _SAMPLED),
        "ppo": Loss(ppo, _SAMPLED, options=CLIP),
        "cispo": Loss(cispo, _SAMPLED, options=CLIP),
    }
)
