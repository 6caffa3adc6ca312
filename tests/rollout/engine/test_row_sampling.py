"""Rows with their own sampling: filters, penalties and draws are those of NumPy twins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from seeupo_jax.rollout.engine.protocol import TurnSampling
from seeupo_jax.rollout.engine.row_sampling import (
    begin_histories,
    count_tokens,
    draw_rows,
    filter_rows,
    penalize,
    row_sampling,
)
from seeupo_jax.rollout.engine.sampling import filter_logits

V = 40
EMPTY = np.zeros((1, V), np.int32)


def logits_of(rows, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (rows, V)).astype(np.float32)


def kept(logits_V, *, top_p=1.0, top_k=0, min_p=0.0):
    """The tokens that vLLM leaves: its documentation's definitions, one after the other."""
    p_V = np.exp(logits_V.astype(np.float64) - logits_V.max())
    tokens = {t for t in range(V) if p_V[t] / p_V.max() >= min_p}
    ranked = sorted(tokens, key=lambda t: -p_V[t])[: top_k or V]
    mass, nucleus = 0.0, []
    for token in ranked:
        if mass < top_p or not nucleus:
            nucleus.append(token)
        mass += p_V[token] / p_V[ranked].sum()
    return set(nucleus)


FILTERS = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_p": 0.5, "top_k": 5},
    {"top_p": 0.7, "min_p": 0.05},
    {"top_p": 0.99, "top_k": 9, "min_p": 0.02},
]


def test_each_row_keeps_what_its_own_filters_leave():
    logits_RV = logits_of(len(FILTERS))
    own = row_sampling([TurnSampling(**each) for each in FILTERS], len(FILTERS), 1)
    left_RV = np.asarray(filter_rows(jnp.asarray(logits_RV), own))
    for options, logits_V, left_V in zip(FILTERS, logits_RV, left_RV, strict=True):
        assert set(np.flatnonzero(np.isfinite(left_V))) == kept(logits_V, **options), options
        np.testing.assert_array_equal(left_V[np.isfinite(left_V)], logits_V[np.isfinite(left_V)])


@pytest.mark.parametrize("top_k, top_p", [(None, 0.8), (6, None), (4, 0.6)])
def test_equal_logits_are_treated_as_in_training(top_k, top_p):
    logits_RV = np.round(logits_of(8))
    turn = TurnSampling(top_p=top_p or 1.0, top_k=top_k or 0)
    left_RV = filter_rows(jnp.asarray(logits_RV), row_sampling([turn] * 8, 8, 1))
    wanted_RV = filter_logits(jnp.asarray(logits_RV), top_k=top_k, top_p=top_p)
    np.testing.assert_array_equal(left_RV, wanted_RV)


def test_penalties_are_those_of_the_published_definitions():
    context, action = [3, 5, 5, 8], [5, 9, 9, 9]
    turns = [
        TurnSampling(),
        TurnSampling(presence=0.5),
        TurnSampling(frequency=-0.25),
        TurnSampling(repetition=1.5),
        TurnSampling(presence=1.0, frequency=0.5, repetition=2.0),
    ]
    rows = len(turns)
    history_RV = begin_histories(
        jnp.ones((rows, V), jnp.int32),  # of what was in the slots before
        jnp.arange(rows),
        jnp.broadcast_to(jnp.asarray([*context, -1, -1]), (rows, 6)),
    )
    alive_R = jnp.ones(rows, bool)
    for token in action:
        history_RV = count_tokens(history_RV, jnp.full(rows, token), alive_R)
    history_RV = count_tokens(history_RV, jnp.full(rows, 1), ~alive_R)  # drawn after the end
    logits_RV = logits_of(rows)
    got_RV = penalize(jnp.asarray(logits_RV), history_RV, row_sampling(turns, rows, 1))
    for turn, logits_V, got_V in zip(turns, logits_RV, got_RV, strict=True):
        wanted_V = logits_V.copy()
        for token in {*context, *action}:
            positive = wanted_V[token] > 0
            wanted_V[token] *= 1 / turn.repetition if positive else turn.repetition
        for token in set(action):
            wanted_V[token] -= turn.presence + turn.frequency * action.count(token)
        np.testing.assert_allclose(got_V, wanted_V, rtol=1e-6)


def test_draws_are_as_frequent_as_each_rows_distribution_says():
    draws, turns = (
        4000,
        [
            TurnSampling(temperature=0.7, top_k=6),
            TurnSampling(temperature=1.5, top_p=0.6),
            TurnSampling(temperature=2.0, min_p=0.2, bias=((3, 4.0), (7, -100.0))),
        ],
    )
    logits_V = logits_of(1)[0]
    logits_RV = jnp.broadcast_to(jnp.asarray(logits_V), (draws * len(turns), V))
    rows = len(logits_RV)
    own = row_sampling([turn for turn in turns for _ in range(draws)], rows, 1)
    history_RV, keys_R = jnp.zeros((rows, V), jnp.int32), jax.random.split(jax.random.key(5), rows)
    drawn = jax.jit(draw_rows)(logits_RV, history_RV, keys_R, own)
    for index, turn in enumerate(turns):
        changed_V = logits_V.copy()
        for token, bias in turn.bias:
            changed_V[token] += bias
        changed_V /= turn.temperature
        left = sorted(kept(changed_V, top_p=turn.top_p, top_k=turn.top_k, min_p=turn.min_p))
        p = np.exp(changed_V[left].astype(np.float64))
        p /= p.sum()
        count_V = np.bincount(drawn.token_R[index * draws :][:draws], minlength=V)
        assert count_V[left].sum() == draws
        assert chisquare(count_V[left], p * draws).pvalue > 1e-3
    # The log-probabilities are those at temperature 1, of all tokens.
    logp_V = logits_V - np.logaddexp.reduce(logits_V)
    np.testing.assert_allclose(drawn.logp_R, logp_V[np.asarray(drawn.token_R)], rtol=1e-4)


def test_greedy_takes_the_likeliest_as_low_temperatures_do_and_counts_penalties_and_biases():
    logits_RV = logits_of(1).repeat(4, axis=0)
    best, second = np.argsort(-logits_RV[0])[:2]
    turns = [
        TurnSampling(temperature=0.0, top_k=5, top_p=0.1),
        TurnSampling(temperature=0.001),
        TurnSampling(temperature=0.0, presence=2.0 + float(np.ptp(logits_RV[0, [best, second]]))),
        TurnSampling(temperature=0.0, bias=((int(best), -100.0),)),
    ]
    history_RV = count_tokens(jnp.zeros((4, V), jnp.int32), jnp.full(4, best), jnp.ones(4, bool))
    keys_R = jax.random.split(jax.random.key(0), 4)
    drawn = draw_rows(jnp.asarray(logits_RV), history_RV, keys_R, row_sampling(turns, 4, 1))
    assert drawn.token_R.tolist() == [best, best, second, second]


def test_the_likeliest_tokens_are_those_of_the_whole_distribution():
    logits_RV = logits_of(2)
    turns = [TurnSampling(temperature=0.5, top_k=1, top_logprobs=3), TurnSampling()]
    keys_R = jax.random.split(jax.random.key(0), 2)
    history_RV = jnp.zeros((2, V), jnp.int32)
    drawn = draw_rows(jnp.asarray(logits_RV), history_RV, keys_R, row_sampling(turns, 2, 1))
    logp_RV = logits_RV - np.logaddexp.reduce(logits_RV, axis=1, keepdims=True)
    order_RT = np.argsort(-logp_RV, axis=1)[:, :20]
    np.testing.assert_array_equal(drawn.top_RT, order_RT)
    wanted_RT = np.take_along_axis(logp_RV, order_RT, axis=1)
    np.testing.assert_allclose(drawn.top_logp_RT, wanted_RT, rtol=1e-5)
    drawn = draw_rows(jnp.asarray(logits_RV), history_RV, keys_R, row_sampling(turns[1:], 2, 1))
    assert not drawn.top_logp_RT.any()  # nobody asks
