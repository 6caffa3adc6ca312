"""How the tokens of a dispatch are drawn where each of its rows has its own sampling.

As vLLM does it, in this order: the grammar's mask, `logit_bias`, penalties, temperature, min-p,
top-k, top-p. Axes beyond those of `sampler`: B biased tokens, T likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.parallel.mesh import axis_parts, per_shard
from seeupo_jax.policy.network import VOCAB
from seeupo_jax.rollout.engine.protocol import TurnSampling
from seeupo_jax.rollout.engine.sampling import logp_of, pick

MOST_BIASES, MOST_TOP = 300, 20  # as many as OpenAI's API takes
GREEDY = 1e-5  # a temperature below it
_OF_CONTEXT = 1 << 30  # in a history, beside the number of times that an action has a token


class RowSampling(NamedTuple):
    """The sampling of a dispatch's rows: fields of `TurnSampling`; see there.

    bias_token_RB: -1: none. most_R: steps of the dispatch, which are the same for all rows.
    """

    temperature_R: np.ndarray
    top_p_R: np.ndarray
    top_k_R: np.ndarray
    min_p_R: np.ndarray
    presence_R: np.ndarray
    frequency_R: np.ndarray
    repetition_R: np.ndarray
    top_R: np.ndarray
    bias_token_RB: np.ndarray
    bias_RB: np.ndarray
    most_R: np.ndarray


class Drawn(NamedTuple):
    """Tokens and their log-probabilities; top_RT: the likeliest tokens there, and theirs."""

    token_R: jax.Array
    logp_R: jax.Array
    top_RT: jax.Array
    top_logp_RT: jax.Array


def row_sampling(samplings: Sequence[TurnSampling], rows: int, most: int) -> RowSampling:
    """The sampling of so many rows, of which the last may be padding."""
    padded = [*samplings, *[TurnSampling()] * (rows - len(samplings))]

    def of(name: str, dtype: type = np.float32) -> np.ndarray:
        return np.array([getattr(each, name) for each in padded], dtype)

    bias_token_RB = np.full((rows, MOST_BIASES), -1, np.int32)
    bias_RB = np.zeros((rows, MOST_BIASES), np.float32)
    for row, each in enumerate(samplings):
        for place, (token, bias) in enumerate(each.bias):
            bias_token_RB[row, place], bias_RB[row, place] = token, bias
    return RowSampling(
        of("temperature"),
        of("top_p"),
        of("top_k", np.int32),
        of("min_p"),
        of("presence"),
        of("frequency"),
        of("repetition"),
        of("top_logprobs", np.int32),
        bias_token_RB,
        bias_RB,
        np.full(rows, most, np.int32),
    )


def draw_rows(
    logits_RV: jax.Array, history_RV: jax.Array, keys_R: jax.Array, own: RowSampling
) -> Drawn:
    """A token per row, as the row's sampling says.

    Args:
      logits_RV: float32, -inf where a grammar allows no token.
      history_RV: as of `count_tokens`.
    """
    changed_RV = penalize(add_bias(logits_RV, own), history_RV, own)
    greedy_R = own.temperature_R < GREEDY
    scaled_RV = changed_RV / jnp.where(greedy_R, 1.0, own.temperature_R)[:, None]
    truncates = (own.top_p_R < 1) | (own.top_k_R > 0) | (own.min_p_R > 0)
    kept_RV = jax.lax.cond(
        (truncates & ~greedy_R).any(), filter_rows, lambda x_RV, _: x_RV, scaled_RV, own
    )
    drawn_R = pick(kept_RV, jax.vmap(jax.random.uniform)(keys_R))
    token_R = jnp.where(greedy_R, changed_RV.argmax(axis=1).astype(jnp.int32), drawn_R)
    top_logp_RT, top_RT = jax.lax.cond((own.top_R > 0).any(), _likeliest, _none, logits_RV)
    return Drawn(token_R, logp_of(logits_RV, token_R), top_RT, top_logp_RT)


def top_size(vocab_size: int) -> int:
    """How many of the likeliest tokens a program returns."""
    return min(MOST_TOP, vocab_size)


def _likeliest(logits_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
    top_RT, token_RT = jax.lax.top_k(logits_RV, top_size(logits_RV.shape[1]))
    return top_RT - jax.nn.logsumexp(logits_RV, axis=1)[:, None], token_RT


def _none(logits_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = logits_RV.shape[0], top_size(logits_RV.shape[1])
    return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)


def add_bias(logits_RV: jax.Array, own: RowSampling) -> jax.Array:
    """Logits with the rows' biases."""

    def add(logits_RV: jax.Array) -> jax.Array:
        R, V = logits_RV.shape
        token_RB = jnp.where(own.bias_token_RB < 0, V, own.bias_token_RB)
        return logits_RV.at[jnp.arange(R)[:, None], token_RB].add(own.bias_RB, mode="drop")

    return jax.lax.cond((own.bias_token_RB >= 0).any(), add, lambda x_RV: x_RV, logits_RV)


def penalize(logits_RV: jax.Array, history_RV: jax.Array, own: RowSampling) -> jax.Array:
    """Logits less the penalties of tokens that have come before.

    A repetition penalty divides a logit above 0 and multiplies one below (Keskar et al.,
    arXiv:1909.05858); the other two are OpenAI's.
    """
    count_RV = history_RV % _OF_CONTEXT
    factor_R1 = own.repetition_R[:, None]
    repeated_RV = jnp.where(logits_RV > 0, logits_RV / factor_R1, logits_RV * factor_R1)
    logits_RV = jnp.where(history_RV > 0, repeated_RV, logits_RV)
    return (
        logits_RV - own.frequency_R[:, None] * count_RV - own.presence_R[:, None] * (count_RV > 0)
    )


def filter_rows(logits_RV: jax.Array, own: RowSampling) -> jax.Array:
    """Logits with -inf outside each row's min-p, top-k and nucleus; as `filter_logits`."""
    R, V = logits_RV.shape
    top_R1 = logits_RV.max(axis=1, keepdims=True)
    logits_RV = jnp.where(logits_RV >= top_R1 + jnp.log(own.min_p_R)[:, None], logits_RV, -jnp.inf)
    order_RV = jnp.argsort(-logits_RV, axis=1)
    sorted_RV = jnp.take_along_axis(logits_RV, order_RV, axis=1)
    top_k_R = jnp.where(own.top_k_R < 1, V, jnp.minimum(own.top_k_R, V))
    kth_R1 = jnp.take_along_axis(sorted_RV, top_k_R[:, None] - 1, axis=1)
    p_RV = jax.nn.softmax(jnp.where(sorted_RV >= kth_R1, sorted_RV, -jnp.inf), axis=1)
    mass_before_RV = jnp.cumsum(p_RV, axis=1) - p_RV
    top_p_R1 = own.top_p_R[:, None]
    in_top_p_RV = ((mass_before_RV < top_p_R1) | (top_p_R1 >= 1)).at[:, 0].set(True)
    keep_RV = jnp.zeros((R, V), bool).at[jnp.arange(R)[:, None], order_RV].set(in_top_p_RV)
    return jnp.where(keep_RV & (logits_RV >= kth_R1), logits_RV, -jnp.inf)


def begin_histories(history_SV: jax.Array, slot_R: jax.Array, context_RC: jax.Array) -> jax.Array:
    """Histories of which some begin with contexts.

    Args:
      slot_R: one past the last: none begins. context_RC: int32, -1 is padding.
    """
    axes = (("rows", "vocab"), ("rows",), ("rows", None))
    return per_shard(_begin_histories, axes, ("rows", "vocab"))(history_SV, slot_R, context_RC)


def _begin_histories(history_SV: jax.Array, slot_R: jax.Array, context_RC: jax.Array) -> jax.Array:
    R, V = len(slot_R), history_SV.shape[1]
    first = jax.lax.axis_index(VOCAB) * V if axis_parts("vocab") > 1 else 0
    token_RC = context_RC - first
    token_RC = jnp.where((context_RC >= 0) & (token_RC >= 0), token_RC, V)
    empty_RV = jnp.zeros((R, V), history_SV.dtype)
    begun_RV = empty_RV.at[jnp.arange(R)[:, None], token_RC].set(_OF_CONTEXT, mode="drop")
    return history_SV.at[slot_R].set(begun_RV, mode="drop")


def count_tokens(history_RV: jax.Array, token_R: jax.Array, alive_R: jax.Array) -> jax.Array:
    """Histories with one more token in the rows that are alive."""
    rows_R = jnp.arange(len(token_R))
    return history_RV.at[rows_R, token_R].add(alive_R.astype(history_RV.dtype))
