"""What keeps a mixture of experts fit to train: two losses of its routers, and a bias.

Axes beyond the legend in `types.py`: X tokens, Y layers that have experts, E experts.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def balance_loss(
    probability_XYE: jax.Array, counted_X: jax.Array, load_YE: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Some tokens' part of the load-balancing loss (Switch, arXiv:2101.03961 Eq. 4-6): float32 [].

    A layer's is E · sum_e f_e P_e, with f_e the tokens that expert e has over all tokens (a
    constant; these sum to the experts of a token, as in Mixtral) and P_e the mean probability of
    expert e; the loss is the mean over layers. With an even load it is the experts of a token. The
    parts of a batch's tokens sum to the loss of the batch.

    Args:
      probability_XYE: of the routers. counted_X: which tokens count.
      load_YE: tokens of each expert, of the whole batch. tokens: that count in the whole batch.
    """
    chex.assert_shape(probability_XYE, (counted_X.size, *load_YE.shape))
    layers, experts = load_YE.shape
    share_YE = jax.lax.stop_gradient(load_YE / tokens)
    mean_YE = jnp.sum(probability_XYE, axis=0, where=counted_X[:, None, None]) / tokens
    return experts / layers * jnp.sum(share_YE * mean_YE)


def router_z_loss(logits_XYE: jax.Array, counted_X: jax.Array, tokens: jax.Array) -> jax.Array:
    """Some tokens' part of the router z-loss (ST-MoE, arXiv:2202.08906 Eq. 5): float32 [].

    The mean over tokens and layers of the squared log of the sum of a router's exponentials.

    Args:
      counted_X: which tokens count. tokens: that count in the whole batch.
    """
    squared_XY = jax.nn.logsumexp(logits_XYE, axis=-1) ** 2
    return jnp.sum(squared_XY.mean(axis=1), where=counted_X) / tokens


def updated_bias(bias_YE: jax.Array, load_YE: jax.Array, *, rate: float) -> jax.Array:
    """Selection biases after a step (Wang et al., arXiv:2408.15664 Algorithm 1): [Y, E].

    The bias of an expert with more tokens than the mean falls by `rate`, with fewer it rises.
    """
    mean_Y1 = load_YE.mean(axis=1, keepdims=True)
    return bias_YE + rate * jnp.sign(mean_Y1 - load_YE)
