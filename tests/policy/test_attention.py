"""Attention on hand-worked values, and against its NumPy twin."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy_model import Architecture, _rope

from seeupo_jax.policy.attention import NOWHERE, KeyValues, attend, join, rotate, write


def keys_of(k, v):
    return KeyValues(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32))


def test_attention_weighs_values_by_the_softmax_of_scaled_scores():
    # Scores of the last query: [2, 0] * 4**-0.5 = [1, 0]; of the first: itself alone.
    q = jnp.asarray([[[[9.0, 0.0, 0.0, 0.0]], [[2.0, 0.0, 0.0, 0.0]]]])
    k = [[[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 0.0]]]]
    v = [[[[1.0, 0.0, 0.0, 5.0]], [[0.0, 1.0, 0.0, 5.0]]]]
    position_NL = jnp.asarray([[0, 1]])
    out = attend(q, keys_of(k, v), position_NL, position_NL)
    first = np.e / (1 + np.e)
    wanted = [[[[1.0, 0.0, 0.0, 5.0]], [[first, 1 - first, 0.0, 5.0]]]]
    np.testing.assert_allclose(out, wanted, atol=1e-6)


def test_consecutive_heads_share_a_key_head():
    # Values tell the key head: 10 or 20. One key, so every query returns its head's value.
    q = jnp.ones((1, 1, 4, 2))
    keys = keys_of(np.ones((1, 1, 2, 2)), [[[[10.0, 10.0], [20.0, 20.0]]]])
    out = attend(q, keys, jnp.zeros((1, 1), int), jnp.zeros((1, 1), int))
    np.testing.assert_allclose(out[0, 0, :, 0], [10.0, 10.0, 20.0, 20.0])


def test_a_query_sees_its_own_position_and_before_wherever_the_keys_lie():
    keys = keys_of(np.zeros((1, 4, 1, 2)), np.arange(8.0).reshape(1, 4, 1, 2))
    key_position_NC = jnp.asarray([[5, NOWHERE, 2, 3]])
    out = attend(jnp.ones((1, 3, 1, 2)), keys, jnp.asarray([[2, 3, 5]]), key_position_NC)
    # Values' first entries are 0, 2, 4, 6; seen are {4}, {4, 6} and {0, 4, 6}.
    np.testing.assert_allclose(out[0, :, 0, 0], [4.0, 5.0, 10 / 3], rtol=1e-6)


def test_rotation_equals_the_twin_at_any_position():
    x = np.random.default_rng(0).normal(size=(9, 2, 6)).astype(np.float32)
    wanted, _ = _rope(x, Architecture(head_dim=6, rope_theta=50.0))
    got = rotate(jnp.asarray(x[None]), jnp.arange(9)[None], 50.0)
    np.testing.assert_allclose(got[0], wanted, atol=1e-5)
    late = rotate(jnp.asarray(x[None, :1]), jnp.asarray([[4]]), 50.0)
    alone, _ = _rope(np.repeat(x[:1], 5, axis=0), Architecture(head_dim=6, rope_theta=50.0))
    np.testing.assert_allclose(late[0, 0], alone[4], atol=1e-5)


def test_only_the_distance_of_two_positions_matters_to_their_score():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    scores = [
        float(
            jnp.sum(rotate(q, jnp.asarray([[p + 3]]), 10.0) * rotate(k, jnp.asarray([[p]]), 10.0))
        )
        for p in (0, 4, 11)
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)


@pytest.mark.parametrize("beyond", [3, 4, NOWHERE])
def test_a_write_beyond_the_cache_is_dropped(beyond):
    cache = keys_of(np.zeros((2, 3, 1, 1)), np.zeros((2, 3, 1, 1)))
    new = keys_of([[[[1.0]], [[2.0]]]] * 2, [[[[3.0]], [[4.0]]]] * 2)
    k, v = write(cache, new, jnp.asarray([[2, 0], [1, beyond]]))
    np.testing.assert_array_equal(k[..., 0, 0], [[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    np.testing.assert_array_equal(v[..., 0, 0], [[4.0, 0.0, 3.0], [0.0, 3.0, 0.0]])


def test_a_cache_keeps_its_own_dtype():
    cache = KeyValues(*(jnp.zeros((1, 2, 1, 1), jnp.bfloat16),) * 2)
    kept = write(cache, keys_of([[[[1.5]]]], [[[[2.5]]]]), jnp.asarray([[0]]))
    assert kept.k.dtype == kept.v.dtype == jnp.bfloat16


def test_the_past_stands_before_what_is_new():
    past = keys_of([[[[1.0]]]], [[[[2.0]]]])
    k, v = join(past, keys_of([[[[3.0]]]], [[[[4.0]]]]))
    assert (k.ravel().tolist(), v.ravel().tolist()) == ([1.0, 3.0], [2.0, 4.0])
