"""Attention on hand-worked values, and against a softmax in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.planning.program_flops import count
from seeupo_jax.policy.kernels import attention
from seeupo_jax.policy.kernels.attention import NOWHERE, KeyValues, attend, concatenate

run = jax.jit(attend, static_argnames="window")


def keys_of(k, v):
    return KeyValues(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32))


def softmax_attention(q, k, v, position_NL, key_position_NC, window=None, segments=None):
    """One query at a time, in float64; every query must see a key."""
    N, L, H, d = q.shape
    group = H // k.shape[2]
    out = np.zeros(q.shape)
    for n, i, h in np.ndindex(N, L, H):
        distance = int(position_NL[n, i]) - np.asarray(key_position_NC[n], np.int64)
        visible = (distance >= 0) & (distance < (np.inf if window is None else window))
        if segments is not None:
            visible &= segments[0][n, i] == segments[1][n]
        score = k[n, visible, h // group].astype(np.float64) @ q[n, i, h] / np.sqrt(d)
        weight = np.exp(score - score.max())
        out[n, i, h] = weight @ v[n, visible, h // group] / weight.sum()
    return out


def random_pass(seed, N, L, C, H, kv_heads, d):
    rng = np.random.default_rng(seed)
    shapes = ((N, L, H, d), (N, C, kv_heads, d), (N, C, kv_heads, d))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def test_attention_weighs_values_by_the_softmax_of_scaled_scores():
    # Scores of the last query: [2, 0] * 4**-0.5 = [1, 0]; of the first: itself alone.
    q = jnp.asarray([[[[9.0, 0.0, 0.0, 0.0]], [[2.0, 0.0, 0.0, 0.0]]]])
    k = [[[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 0.0]]]]
    v = [[[[1.0, 0.0, 0.0, 5.0]], [[0.0, 1.0, 0.0, 5.0]]]]
    position_NL = jnp.asarray([[0, 1]])
    out = run(q, keys_of(k, v), position_NL, position_NL)
    first = np.e / (1 + np.e)
    wanted = [[[[1.0, 0.0, 0.0, 5.0]], [[first, 1 - first, 0.0, 5.0]]]]
    np.testing.assert_allclose(out, wanted, atol=1e-6)


def test_consecutive_heads_share_a_key_head():
    # Values tell the key head: 10 or 20. One key, so every query returns its head's value.
    q = jnp.ones((1, 1, 4, 2))
    keys = keys_of(np.ones((1, 1, 2, 2)), [[[[10.0, 10.0], [20.0, 20.0]]]])
    out = run(q, keys, jnp.zeros((1, 1), int), jnp.zeros((1, 1), int))
    np.testing.assert_allclose(out[0, 0, :, 0], [10.0, 10.0, 20.0, 20.0])


def test_its_own_position_and_those_before_are_visible_to_a_query_in_any_order():
    keys = keys_of(np.zeros((1, 4, 1, 2)), np.arange(8.0).reshape(1, 4, 1, 2))
    key_position_NC = jnp.asarray([[5, NOWHERE, 2, 3]])
    out = run(jnp.ones((1, 3, 1, 2)), keys, jnp.asarray([[2, 3, 5]]), key_position_NC)
    # Values' first entries are 0, 2, 4, 6; visible are {4}, {4, 6} and {0, 4, 6}.
    np.testing.assert_allclose(out[0, :, 0, 0], [4.0, 5.0, 10 / 3], rtol=1e-6)


def test_a_window_counts_the_positions_up_to_the_query_itself():
    keys = keys_of(np.zeros((1, 4, 1, 2)), np.arange(8.0).reshape(1, 4, 1, 2))
    key_position_NC = jnp.asarray([[5, NOWHERE, 2, 4]])
    out = run(jnp.ones((1, 2, 1, 2)), keys, jnp.asarray([[4, 5]]), key_position_NC, window=2)
    # At 4 only 4 is visible (2 is two back), at 5 both 4 and 5.
    np.testing.assert_allclose(out[0, :, 0, 0], [6.0, 3.0], rtol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("H, kv_heads", [(7, 1), (6, 2), (3, 3)])
def test_a_pass_over_its_own_keys_equals_the_softmax_in_numpy(H, kv_heads, window):
    q, k, v = random_pass(0, 2, 9, 9, H, kv_heads, 6)
    position_NL = np.broadcast_to(np.arange(9), (2, 9))
    wanted = softmax_attention(q, k, v, position_NL, position_NL, window)
    out = run(q, keys_of(k, v), position_NL, position_NL, window=window)
    np.testing.assert_allclose(out, wanted, atol=1e-6)


@pytest.mark.parametrize("window", [None, 2, 5])
def test_keys_of_a_cache_and_of_the_pass_equal_the_softmax_in_numpy(window):
    # Row 0 has five tokens behind it, row 1 two; unwritten slots are nowhere.
    q, k, v = random_pass(1, 2, 3, 9, 7, 1, 6)
    past_N = np.asarray([5, 2])
    position_NL = past_N[:, None] + np.arange(3)
    slot_NC = np.broadcast_to(np.arange(6), (2, 6))
    past_NC = np.where(slot_NC < past_N[:, None], slot_NC, NOWHERE)
    key_position_NC = np.concatenate([past_NC, position_NL], axis=1)
    wanted = softmax_attention(q, k, v, position_NL, key_position_NC, window)
    out = run(
        q, keys_of(k, v), jnp.asarray(position_NL), jnp.asarray(key_position_NC), window=window
    )
    np.testing.assert_allclose(out, wanted, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_segments_of_a_row_attend_as_if_each_were_alone(window):
    q, k, v = random_pass(2, 1, 9, 9, 4, 2, 6)
    parts = [slice(0, 4), slice(4, 5), slice(5, 9)]
    position_NL = jnp.asarray([[0, 1, 2, 3, 0, 0, 1, 2, 3]])
    segment_NL = jnp.asarray([[3, 3, 3, 3, 1, 2, 2, 2, 2]])
    options = {"window": window, "segment_NL": segment_NL, "key_segment_NC": segment_NL}
    packed = run(q, keys_of(k, v), position_NL, position_NL, **options)
    wanted = softmax_attention(
        q, k, v, position_NL, position_NL, window, (segment_NL, np.asarray(segment_NL))
    )
    np.testing.assert_allclose(packed, wanted, atol=1e-6)
    for part in parts:
        position = position_NL[:, part]
        alone = run(q[:, part], keys_of(k[:, part], v[:, part]), position, position, window=window)
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-6)


@pytest.mark.parametrize("window, packed", [(None, False), (4, False), (None, True)])
def test_queries_in_chunks_give_the_same_values_and_gradients(monkeypatch, window, packed):
    q, k, v = random_pass(11, 2, 23, 23, 4, 2, 6)
    position_NL = jnp.broadcast_to(jnp.arange(23)[None, :], (2, 23))
    segment_NL = jnp.asarray(np.arange(23)[None, :] // 9 + np.zeros((2, 1), int))
    segments = {"segment_NL": segment_NL, "key_segment_NC": segment_NL} if packed else {}

    def loss(q, k, v):
        out = attend(q, KeyValues(k, v), position_NL, position_NL, window=window, **segments)
        return jnp.sum(jnp.sin(out)), out

    results = []
    for at_once, at_least in ((2**24, 256), (2 * 4 * 23 * 5, 1)):
        monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)
        monkeypatch.setattr(attention, "QUERIES_AT_LEAST", at_least)
        program = jax.jit(lambda *args: jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*args))
        assert ("while" in program.lower(q, k, v).as_text()) == (at_least == 1)
        results.append(program(q, k, v))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), *results)


def test_gradients_of_a_value_from_many_chunks_are_summed_in_float32(monkeypatch):
    # Equal weights: query i gives 1 / (i + 1) to each value up to its own. Summed in bfloat16, the
    # worst of 512 was 1.8% off, of 4,096 28%.
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 1)
    monkeypatch.setattr(attention, "QUERIES_AT_LEAST", 4)
    L = 512
    q = jnp.zeros((1, L, 1, 2), jnp.bfloat16)
    position_NL = jnp.arange(L)[None]

    def total(v):
        return attend(q, KeyValues(q, v), position_NL, position_NL).astype(jnp.float32).sum()

    expected_L = np.cumsum(1 / np.arange(L, 0, -1))[::-1]
    got_L = jax.jit(jax.grad(total))(q)[0, :, 0, 0].astype(np.float32)
    np.testing.assert_allclose(got_L, expected_L, rtol=2**-7)


@pytest.mark.usefixtures("optimized")
def test_memory_grows_with_the_length_and_not_with_its_square():
    def temporaries(length):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (4, 2, 2)]
        position_NL = jnp.arange(length)[None, :]

        def total(q, k, v):
            return attend(q, KeyValues(k, v), position_NL, position_NL).sum()

        program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(16384) < 1.2 * temporaries(8192) + 64 * 2**20
    assert temporaries(16384) < 16384**2 * 4 * 4 / 8  # an eighth of the scores alone


def test_the_result_has_the_dtype_of_the_queries_and_a_float32_softmax():
    # Twice 128 equal weights of bfloat16 values: a bfloat16 sum would stop at 256 times the first.
    N, L = 1, 256
    q = jnp.zeros((N, L, 1, 8), jnp.bfloat16)
    keys = KeyValues(q, jnp.ones_like(q))
    position_NL = jnp.arange(L)[None]
    out = run(q, keys, position_NL, position_NL)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), 1.0, atol=2**-8)


def test_a_fused_kernel_refuses_keys_of_another_pass():
    q = jnp.zeros((1, 128, 1, 8))
    keys = KeyValues(q, q)
    position_NL = jnp.arange(128)[None]
    with pytest.raises(ValueError, match="'splash' got keys of another pass"):
        attend(q, keys, position_NL, position_NL + 1, kernel="splash")
    segments = {"segment_NL": position_NL, "key_segment_NC": position_NL + 1}
    with pytest.raises(ValueError, match="'splash' got keys of another pass"):
        attend(q, keys, position_NL, position_NL, kernel="splash", **segments)


def test_an_unknown_kernel_lists_those_that_are_known():
    q = jnp.zeros((1, 2, 1, 8))
    with pytest.raises(ValueError, match="got kernel 'flash'; allowed: xla, all_pairs, splash"):
        attend(q, KeyValues(q, q), q[..., 0, 0], q[..., 0, 0], kernel="flash")


@pytest.mark.parametrize("side", ["segment_NL", "key_segment_NC"])
def test_segments_of_one_side_only_are_refused(side):
    q = jnp.zeros((1, 2, 1, 8))
    with pytest.raises(ValueError, match="both or neither"):
        attend(q, KeyValues(q, q), q[..., 0, 0], q[..., 0, 0], **{side: jnp.zeros((1, 2), int)})


def test_the_past_stands_before_what_is_new():
    past = keys_of([[[[1.0]]]], [[[[2.0]]]])
    k, v = concatenate(past, keys_of([[[[3.0]]]], [[[[4.0]]]]))
    assert (k.ravel().tolist(), v.ravel().tolist()) == ([1.0, 3.0], [2.0, 4.0])


def plain_attention(q, k, v, position_NL, window, segment_NL):
    """Scores, softmax and weighted values as one writes them, for JAX to differentiate."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    distance = position_NL[:, :, None] - position_NL[:, None, :]
    visible = (distance >= 0) & (distance < (10**6 if window is None else window))
    visible &= segment_NL[:, :, None] == segment_NL[:, None, :]
    scores = jnp.einsum("nlhd,nchd->nhlc", q, k) / np.sqrt(q.shape[3])
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("nhlc,nchd->nlhd", weights, v)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("at_once", [2**24, 1])
def test_gradients_are_those_of_the_plain_formula(window, at_once, monkeypatch):
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)
    monkeypatch.setattr(attention, "QUERIES_AT_LEAST", 4)
    N, L, H, kv_heads, d = 2, 11, 4, 2, 8
    q, k, v = random_pass(5, N, L, L, H, kv_heads, d)
    segment_NL = jnp.asarray([[0] * 11, [0] * 5 + [1] * 6])
    index_NL = jnp.broadcast_to(jnp.arange(L)[None, :], (N, L))
    position_NL = index_NL - jnp.asarray([[0] * 11, [0] * 5 + [5] * 6])

    def ours(q, k, v):
        segments = {"segment_NL": segment_NL, "key_segment_NC": segment_NL}
        keys = KeyValues(k, v)
        return attend(q, keys, position_NL, position_NL, window=window, **segments)

    def plain(q, k, v):
        return plain_attention(q, k, v, position_NL, window, segment_NL)

    d_out = np.random.default_rng(6).normal(size=q.shape).astype(np.float32)

    def pull(f):
        return jax.jit(lambda *x: jax.vjp(f, *x)[1](d_out))(q, k, v)

    for actual, expected in zip(pull(ours), pull(plain), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_chunks_compute_their_scores_twice_and_nothing_else(monkeypatch):
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 1)
    monkeypatch.setattr(attention, "QUERIES_AT_LEAST", 4)
    q, k, v = random_pass(0, 1, 8, 8, 2, 1, 16)
    position_NL = jnp.arange(8)[None, :]

    def loss(q, k, v):
        return jnp.sum(attend(q, KeyValues(k, v), position_NL, position_NL) ** 2)

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    product = 2.0 * 8 * 8 * 2 * 16
    assert count(traced).total == 7 * product  # 2 forward, 4 backward, the scores again
