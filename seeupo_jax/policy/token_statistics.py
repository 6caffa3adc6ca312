"""Statistics of the distributions of a chunk of tokens, from the logits that one device holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.algorithms.distillation import forward_kl
from seeupo_jax.policy.architecture import Architecture

UNLIKELY = -1e30  # a logit of probability 0, and finite: of two the difference is 0


class ChunkSoftmax(NamedTuple):
    """The softmax of some tokens X over the vocabulary, of which a device has the ids V.

    below_XV: float32, logits at the temperature, less the largest of all ids.
    total_X: the sum of their exponentials over all ids that a token has.
    unassigned_V: where no token has the id; None: nowhere.
    word_V: the ids, which rise by one. axis: of the mesh, if its devices have the other ids.
    """

    below_XV: jax.Array
    total_X: jax.Array
    unassigned_V: jax.Array | None
    word_V: jax.Array
    axis: str | None

    def over_parts(self, reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        """A reduction over the parts of the vocabulary."""
        return x if self.axis is None else reduce(x, self.axis)

    def with_unassigned(self, x_XV: jax.Array, value: float) -> jax.Array:
        """Numbers of every id, with a constant where no token has it, which has no gradient."""
        if self.unassigned_V is None:
            return x_XV
        return jnp.where(self.unassigned_V[None, :], value, x_XV)


class TopTokens(NamedTuple):
    """The likeliest tokens that are looked for.

    count: K. among: the architecture whose tokens they are; it has more than K.
    """

    count: int
    among: Architecture

    def excluded(self, ids: int) -> np.ndarray:
        """Of the first so many ids, whether none of those tokens has them."""
        excluded_V = np.ones(max(ids, self.among.vocab_size), bool)
        excluded_V[: self.among.vocab_size] = self.among.unassigned_V()
        return excluded_V[:ids]


def entropy(softmax: ChunkSoftmax) -> jax.Array:
    """Entropy of each distribution, nats: [X]."""
    below = softmax.with_unassigned(softmax.below_XV, 0.0)  # adds 0
    total = softmax.total_X
    mean_X = softmax.over_parts(jax.lax.psum, (jnp.exp(below) * below).sum(axis=1)) / total
    return jnp.log(total) - mean_X


def collision(softmax: ChunkSoftmax) -> jax.Array:
    """The sum of the squared probabilities of each distribution: [X]."""
    powers = jnp.exp(2.0 * softmax.with_unassigned(softmax.below_XV, 0.0))
    powers = softmax.with_unassigned(powers, 0.0)
    return softmax.over_parts(jax.lax.psum, powers.sum(axis=1)) / softmax.total_X**2


STATISTICS = {"entropy": entropy, "collision": collision}


def top_tokens(
    softmax: ChunkSoftmax, top: TopTokens, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens [X, K], the likeliest first, and log-probabilities [X, K + 1] of these
    and of all others together.

    Of equally likely ones the lower id is first, however the vocabulary is cut.
    """
    excluded_V = jnp.asarray(top.excluded(vocabulary))[softmax.word_V]
    likely = jnp.where(excluded_V[None, :], UNLIKELY, softmax.below_XV)
    value_XK, place_XK = jax.lax.top_k(likely, min(top.count, likely.shape[1]))
    token_XK = softmax.word_V[place_XK]
    if softmax.axis is not None:
        value_XK, token_XK = (
            jax.lax.all_gather(x, softmax.axis, axis=1, tiled=True) for x in (value_XK, token_XK)
        )
        place_XK = jax.lax.top_k(value_XK, top.count)[1]
        token_XK = jnp.take_along_axis(token_XK, place_XK, axis=1)
    return token_XK, logp_of(softmax, token_XK)


def logp_of(softmax: ChunkSoftmax, token_XK: jax.Array) -> jax.Array:
    """Log-probabilities [X, K + 1] of different tokens, and as the last that of all others.

    The last is a sum over these, not the logarithm of what is left to 1: that would have no digit
    where little is left.
    """
    below = softmax.with_unassigned(softmax.below_XV, UNLIKELY)
    V = below.shape[1]
    own_XK = token_XK - softmax.word_V[0]
    inside_XK = (own_XK >= 0) & (own_XK < V)
    picked_XK = jnp.take_along_axis(below, own_XK.clip(0, V - 1), axis=1)
    tokens_XK = softmax.over_parts(jax.lax.psum, jnp.where(inside_XK, picked_XK, 0.0))
    row_X1 = jnp.arange(below.shape[0])[:, None]
    others = below.at[row_X1, jnp.where(inside_XK, own_XK, V)].set(UNLIKELY, mode="drop")
    peak_X = softmax.over_parts(jax.lax.pmax, jax.lax.stop_gradient(others.max(axis=1)))
    exp_X = softmax.over_parts(jax.lax.psum, jnp.exp(others - peak_X[:, None]).sum(axis=1))
    rest_X1 = (peak_X + jnp.log(exp_X))[:, None]
    return jnp.concatenate([tokens_XK, rest_X1], axis=1) - jnp.log(softmax.total_X)[:, None]


def forward_kl_from(
    softmax: ChunkSoftmax, teacher_top_XK: jax.Array, teacher_top_logp_XJ: jax.Array
) -> jax.Array:
    """The KL divergence of each distribution from a teacher's, over its likeliest tokens: [X]."""
    return forward_kl(logp_of(softmax, teacher_top_XK), teacher_top_logp_XJ)
