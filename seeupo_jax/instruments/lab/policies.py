"""Policies of a tabular problem, and their exact values.

A context is the actions taken so far. Contexts are numbered through: first the empty one, then the
A contexts of turn 1, the A^2 of turn 2, ..., within a turn as the digits of a number to base A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WIDTH = 32  # of the shared network's two hidden layers


@dataclass(frozen=True)
class TabularPolicy:
    """A distribution over A actions in every context, from parameters."""

    init: Callable[[jax.Array], Any]  # random key -> parameters
    logits: Callable[[Any, jax.Array], jax.Array]  # parameters, contexts [...] -> [..., A]


def first_context(turn: int, actions: int) -> int:
    """Number of contexts of the turns before `turn`: where its own begin."""
    return sum(actions**earlier for earlier in range(turn))


def tables(turns: int, actions: int) -> TabularPolicy:
    """Separate logits for each context, initially 0: turns share no parameters."""
    contexts = first_context(turns, actions)
    return TabularPolicy(
        init=lambda key: jnp.zeros((contexts, actions)),
        logits=lambda table_CA, context: table_CA[context],
    )


def shared(turns: int, actions: int) -> TabularPolicy:
    """One small network for all turns; its input is the turn and each action so far, one-hot.

    Its last layer starts at 0, so that every run starts from the uniform policy.
    """
    features_CF = jnp.asarray(_one_hot_contexts(turns, actions))
    shapes = [(features_CF.shape[1], _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, actions)]
    starts = [jax.nn.initializers.lecun_normal()] * 2 + [jax.nn.initializers.zeros]

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(shapes))
        return [
            {"kernel": start(layer_key, shape), "bias": jnp.zeros(shape[1])}
            for layer_key, shape, start in zip(keys, shapes, starts, strict=True)
        ]

    def logits(layers: Any, context: jax.Array) -> jax.Array:
        x_XF = features_CF[context.reshape(-1)]
        for layer in layers[:-1]:
            x_XF = jnp.tanh(x_XF @ layer["kernel"] + layer["bias"][None])
        x_XA = x_XF @ layers[-1]["kernel"] + layers[-1]["bias"][None]
        return x_XA.reshape(*context.shape, actions)

    return TabularPolicy(init, logits)


def _one_hot_contexts(turns: int, actions: int) -> np.ndarray:
    """float32 [C, turns + turns x actions], scaled to a mean square near 1."""
    rows = []
    for turn in range(turns):
        number = np.arange(actions**turn)
        own_CK = np.zeros((number.size, turns), np.float32)
        own_CK[:, turn] = 1
        taken_CKA = np.zeros((number.size, turns, actions), np.float32)
        for earlier in range(turn):
            digit = number // actions ** (turn - 1 - earlier) % actions
            taken_CKA[number, earlier, digit] = 1
        rows.append(np.concatenate([own_CK, taken_CKA.reshape(number.size, -1)], axis=1))
    features_CF = np.concatenate(rows)
    return features_CF / np.sqrt(np.mean(features_CF**2))


POLICIES: dict[str, Callable[[int, int], TabularPolicy]] = {"tables": tables, "shared": shared}


def log_probability(
    policy: TabularPolicy, params: Any, context: jax.Array, action: jax.Array
) -> jax.Array:
    """Log-probability (nats) of actions in their contexts, in the shape of both."""
    logp = jax.nn.log_softmax(policy.logits(params, context))
    # Not a gather: its gradient would be a scatter, and A is small.
    return jnp.sum(jnp.where(jax.nn.one_hot(action, logp.shape[-1]) > 0, logp, 0.0), axis=-1)


def entropy(policy: TabularPolicy, params: Any, context: jax.Array) -> jax.Array:
    """Entropy (nats) of the policy in contexts, in their shape."""
    logp = jax.nn.log_softmax(policy.logits(params, context))
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def collision(policy: TabularPolicy, params: Any, context: jax.Array) -> jax.Array:
    """Sum of the policy's squared probabilities in contexts, in their shape."""
    return jnp.sum(jax.nn.softmax(policy.logits(params, context)) ** 2, axis=-1)


def all_probabilities(policy: TabularPolicy, params: Any, turns: int, actions: int) -> jax.Array:
    """Probability of each action in each context, [C, A]."""
    contexts = jnp.arange(first_context(turns, actions))
    return jax.nn.softmax(policy.logits(params, contexts))


def exact_value(probability_CA: jax.Array, mean: jax.Array) -> jax.Array:
    """The policy's expected reward over all action sequences, by backward induction; [].

    Args:
      probability_CA: of the actions in every context.
      mean: shape (A,) x K, expected reward of each action sequence.
    """
    actions = mean.shape[0]
    value = mean
    for turn in reversed(range(mean.ndim)):
        start = first_context(turn, actions)
        own_CA = probability_CA[start : start + actions**turn]
        value = jnp.sum(value.reshape(-1, actions) * own_CA, axis=1)
    return value[0]


def sequence_probability(probability_CA: jax.Array, turns: int) -> jax.Array:
    """Probability of every action sequence, [A^K] in the order of a flattened `mean`."""
    actions = probability_CA.shape[1]
    reach = jnp.ones(1)
    for turn in range(turns):
        start = first_context(turn, actions)
        reach = (reach[:, None] * probability_CA[start : start + actions**turn]).reshape(-1)
    return reach
