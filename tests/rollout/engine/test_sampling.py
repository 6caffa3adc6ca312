"""How tokens are drawn: which may be, how often, and from whose random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.rollout.engine.sampling import (
    Sampling,
    Streams,
    draw,
    filter_logits,
    pick,
    quantization_note,
    relative_entropy,
    stream_keys,
    task_number,
    truncation_note,
)


def key_data(who, *, turn=0, step=0, seed=1, iteration=2):
    """Keys of rows that are (task, member) pairs."""
    task, member = np.array(who, np.uint32).T
    numbers = (np.full(len(who), number, np.uint32) for number in (iteration, turn, step))
    iteration_R, turn_R, step_R = numbers
    streams = Streams(np.uint32(seed), iteration_R, task, member, turn_R)
    return jax.random.key_data(stream_keys(streams, step_R))


def test_keys_tell_seed_iteration_task_member_and_turn_apart():
    numbers = [
        {"who": [(2, 1)]},
        {"who": [(1, 2)]},
        {"who": [(2, 2)]},
        {"who": [(1, 1)]},
        {"who": [(2, 1)], "turn": 1},
        {"who": [(2, 1)], "turn": 2},
        {"who": [(2, 1)], "iteration": 1},
        {"who": [(2, 1)], "iteration": 3},
        {"who": [(2, 1)], "seed": 2},
        {"who": [(2, 1)], "seed": 2, "iteration": 1},
        {"who": [(2, 1)], "step": 1},
        {"who": [(2, 1)], "step": 2},
    ]
    keys = [key_data(**n).tobytes() for n in numbers]
    assert len(set(keys)) == len(numbers)
    both = key_data([(1, 2), (2, 1)])
    assert [both[1].tobytes(), both[0].tobytes()] == keys[:2]


def test_a_tasks_number_is_the_crc_of_its_name():
    assert task_number("123456789") == 0xCBF43926  # the check value of CRC-32
    assert task_number("train/1") != task_number("train/2")


P_V = [0.4, 0.3, 0.15, 0.1, 0.05]


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [
        (None, None, 5),
        (3, None, 3),
        (1, None, 1),
        (5, None, 5),
        (9, None, 5),
        (None, 1.0, 5),
        (None, 0.99, 5),
        (None, 0.75, 3),  # 0.4 + 0.3 does not reach it; the token that does is in
        (None, 0.65, 2),
        (None, 0.39, 1),
        (None, 0.0, 1),  # the likeliest is always kept
        (2, 0.5, 1),  # of two, the first has 4/7 of the mass
        (2, 0.6, 2),
        (4, 0.99, 4),
    ],
)
def test_the_filter_keeps_the_k_likeliest_and_the_nucleus(top_k, top_p, kept):
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        logits_V = np.log(np.array(P_V, np.float32))[order] + 3.0
        (got_V,) = filter_logits(jnp.asarray(logits_V[None]), top_k=top_k, top_p=top_p)
        wanted_V = np.where(np.array(order) < kept, logits_V, -np.inf)
        np.testing.assert_array_equal(got_V, wanted_V)


@pytest.mark.parametrize("top_p, kept", [(0.25, 1), (0.5, 2), (0.75, 3)])
def test_the_nucleus_ends_with_the_token_that_reaches_p_exactly(top_p, kept):
    (left_V,) = filter_logits(jnp.zeros((1, 4)), top_k=None, top_p=top_p)
    assert np.isfinite(left_V).sum() == kept


def test_a_draw_follows_the_renormalised_distribution_at_the_temperature():
    draws = 4000
    logits_NV = jnp.broadcast_to(jnp.log(jnp.asarray(P_V))[None], (draws, 5))
    keys = jax.random.split(jax.random.key(0), draws)
    sampling = Sampling(0.5, top_k=4, top_p=0.9, max_tokens=1, end_ids=(0,))
    token_N, logp_N = jax.jit(draw, static_argnums=2)(logits_NV, keys, sampling)
    # At temperature 1/2: P^2 over four, [16, 9, 2.25, 1] / 28.25 of mass; three reach 0.9.
    wanted = np.array([16, 9, 2.25]) / 27.25
    assert set(np.asarray(token_N)) == {0, 1, 2}
    np.testing.assert_allclose(np.exp(logp_N), wanted[np.asarray(token_N)], rtol=1e-5)
    frequency = np.bincount(token_N, minlength=3) / draws
    np.testing.assert_allclose(frequency, wanted, atol=0.03)  # 4 standard deviations


@pytest.mark.parametrize(
    "top_k, top_p, left_out, mass",
    [
        (None, None, [], [16, 9, 2.25, 1, 0.25]),
        (2, None, [], [16, 9]),
        (1, None, [], [16]),
        (None, 0.9, [], [16, 9, 2.25]),
        (None, None, [1], [16, 2.25, 1, 0.25]),
        (2, None, [0, 2, 3], [9, 0.25]),
        (None, 0.85, [0], [9, 2.25]),  # of 12.5
    ],
)
def test_the_relative_entropy_is_of_what_a_token_is_drawn_from(top_k, top_p, left_out, mass):
    """At temperature 1/2 masses are as the squares of `P_V`; those of masked tokens are 0."""
    logits_V = np.log(np.array(P_V, np.float32)) + 3.0
    logits_V[left_out] = -np.inf
    sampling = Sampling(0.5, top_k, top_p, max_tokens=1, end_ids=(0,))
    got_N = relative_entropy(jnp.asarray([logits_V, logits_V[::-1]]), sampling, len(logits_V))
    p_K = np.array(mass) / np.sum(mass)
    wanted = -(p_K * np.log(p_K)).sum() / np.log(5)
    np.testing.assert_allclose(got_N, [wanted] * 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size, tensor", [(5, 1), (300, 1), (300, 4), (1024, 4)])
def test_a_token_is_picked_where_the_cumulative_sum_passes(size, tensor):
    rng = np.random.default_rng(size)
    logits_NV = 3 * rng.normal(size=(40, size)).astype(np.float32)
    logits_NV[:, rng.permutation(size)[: size // 3]] = -np.inf
    u_N = np.linspace(0, 1, 40, endpoint=False, dtype=np.float32)
    mesh = make_mesh(schema.Mesh(data=2, tensor=tensor), jax.devices()[: 2 * tensor])
    with jax.set_mesh(mesh):
        token_N = np.asarray(jax.jit(pick)(jnp.asarray(logits_NV), jnp.asarray(u_N)))
    p_NV = np.exp(logits_NV.astype(np.float64))
    sum_NV = np.cumsum(p_NV / p_NV.sum(axis=1, keepdims=True), axis=1)
    before_N, after_N = (
        np.take_along_axis(x, token_N[:, None], 1)[:, 0]
        for x in (np.pad(sum_NV, ((0, 0), (1, 0))), sum_NV)
    )
    assert (before_N - 1e-6 <= u_N).all() and (u_N < after_N + 1e-6).all()
    assert np.isfinite(logits_NV[np.arange(40), token_N]).all()


def test_no_rounding_picks_what_may_not_be():
    """Of a sum that ends before u, the last candidate; never one of the tokens behind it.

    Float32 sums of so many weights in two orders differ in the last bit, in several rows of 64.
    """
    logits_NV = np.full((64, 30_000), -np.inf, np.float32)
    logits_NV[:, 3:20_000] = np.random.default_rng(0).normal(size=(64, 19_997))
    logits_NV[:, 19_999] = 0  # far more than what rounding moves
    u_N = np.full(64, np.nextafter(np.float32(1), np.float32(0)))
    u_N[0] = 0
    token_N = np.asarray(pick(jnp.asarray(logits_NV), jnp.asarray(u_N)))
    np.testing.assert_array_equal(token_N, [3, *[19_999] * 63])


@pytest.mark.parametrize("top_k, top_p", [(None, None), (1, None), (None, 0.39), (None, 0.65)])
def test_the_only_candidate_has_probability_one_to_the_bit(top_k, top_p):
    """Without truncation nothing is done to the numbers; a mask's -inf are no candidates."""
    rng = np.random.default_rng(0)
    logits_NV = np.log(np.array(P_V, np.float32))[None] + 30 * rng.random((50, 1), np.float32)
    masked_NV = np.where(np.arange(5) == np.arange(50)[:, None] % 5, logits_NV, -np.inf)
    sampling = Sampling(0.7, top_k, top_p, max_tokens=1, end_ids=(0,))
    keys = jax.random.split(jax.random.key(0), 50)
    token_N, logp_N = draw(jnp.asarray(masked_NV), keys, sampling, masked=True)
    np.testing.assert_array_equal(token_N, np.arange(50) % 5)
    np.testing.assert_array_equal(logp_N, np.zeros(50, np.float32))
    _, logp_N = draw(jnp.asarray(logits_NV), keys, sampling)
    single = top_k == 1 or top_p == 0.39  # at this temperature the likeliest has 0.46 of the mass
    assert (np.asarray(logp_N) == 0).all() == single


def test_draws_by_rounded_matrices_are_said_where_nothing_corrects_for_them():
    assert quantization_note("none", None, ahead=False) is None
    assert quantization_note("int8", 2.0, ahead=False) is None
    assert quantization_note("int8", None, ahead=True) is None  # which refuses importance weights
    said = quantization_note("int8", None, ahead=False)
    assert said.startswith("config.rollout.quantize=int8: ")


def test_draws_from_a_part_of_the_softmax_are_said():
    assert truncation_note(top_k=None, top_p=1.0, grammar=None) is None
    said = truncation_note(top_k=20, top_p=0.9, grammar="tool_calls")
    assert said.startswith("config.rollout.top_k=20, top_p=0.9, grammar=tool_calls: ")
    said = truncation_note(top_k=None, top_p=1.0, grammar=None, constraints=True)
    assert said.startswith("config.agent.constraints=True: tokens are drawn")
