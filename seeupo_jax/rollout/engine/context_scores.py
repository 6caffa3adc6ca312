"""Log-probabilities of a context's tokens, each given those before it.

Axes beyond the legend in `types.py`: L tokens of the context, B of a chunk of it, T likeliest ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.policy.network import Network

_SHORTEST = 64  # tokens of the shortest program; longer ones have twice, four times, ... as many
_AT_ONCE = 64  # tokens whose logits are in memory at once


class ContextScores(NamedTuple):
    """What the policy says of the tokens of a context but its first one.

    logp: of each, in nats, at temperature 1. top: of each, the likeliest tokens in its place with
      their log-probabilities.
    """

    logp: list[float]
    top: list[tuple[tuple[int, float], ...]]


def score_context(network: Network, params: Any, tokens: Sequence[int], top: int) -> ContextScores:
    """The scores of a context of at least one token, by a program for its length.

    Args:
      top: number of likeliest tokens.
    """
    length = _SHORTEST
    while length < len(tokens):
        length *= 2
    padded_L = np.zeros(length, np.int32)
    padded_L[: len(tokens)] = tokens
    top = min(top, network.arch.vocab_size)
    logp_L, top_LT, top_logp_LT = jax.device_get(_score(network, params, padded_L, top))
    count = len(tokens) - 1
    likeliest = [
        tuple(zip(top_T.tolist(), logp_T.tolist(), strict=True))
        for top_T, logp_T in zip(top_LT[:count], top_logp_LT[:count], strict=True)
    ]
    return ContextScores(logp_L[:count].tolist(), likeliest)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _score(
    network: Network, params: Any, tokens_L: jax.Array, top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the token behind each: its log-probability, and the likeliest ones with theirs."""
    model, arch = network.bind(params), network.arch
    hidden_1LD, _ = model.hidden(tokens_L[None])
    head_VD = model.head_VD(arch.dtype)
    unassigned_V = jnp.asarray(arch.unassigned_V())

    def score(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden_BD, target_B = chunk
        product_BV = jnp.einsum("bd,vd->bv", hidden_BD, head_VD, preferred_element_type=jnp.float32)
        logits_BV = jnp.where(unassigned_V, -jnp.inf, arch.logits(product_BV))
        logp_BV = jax.nn.log_softmax(logits_BV)
        top_logp_BT, top_BT = jax.lax.top_k(logp_BV, top)
        return jnp.take_along_axis(logp_BV, target_B[:, None], 1)[:, 0], top_BT, top_logp_BT

    chunks = (-1, min(_AT_ONCE, len(tokens_L)))
    hidden_CBD = hidden_1LD[0].reshape(*chunks, hidden_1LD.shape[-1])
    scored = jax.lax.map(score, (hidden_CBD, jnp.roll(tokens_L, -1).reshape(chunks)))
    logp_CB, top_CBT, top_logp_CBT = scored
    flat = (len(tokens_L), -1)
    return logp_CB.reshape(-1), top_CBT.reshape(flat), top_logp_CBT.reshape(flat)
