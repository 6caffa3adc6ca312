"""Generalized advantages, rewards to go and value loss against plain twins."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from seeupo_jax.algorithms.estimators.gae import generalized_advantage
from seeupo_jax.algorithms.estimators.returns import reward_to_go
from seeupo_jax.algorithms.value import clipped_value_loss

GARBAGE = (-np.inf, np.nan, 1e30)


def ragged(seed):
    """Rows of action tokens between observation tokens; the first has none, the second only."""
    rng = np.random.default_rng(seed)
    mask_NL = rng.random((6, 9)) < 0.5
    mask_NL[0], mask_NL[1] = False, True
    return rng.normal(size=(6, 9)), rng.normal(size=(6, 9)), mask_NL


def gae_twin(value_A, reward_A, discount, lam):
    """The definition: a sum over all later tokens of discounted errors of the value function."""
    count = len(value_A)
    later_A = [*value_A[1:], 0.0]
    error_A = [reward_A[a] + discount * later_A[a] - value_A[a] for a in range(count)]
    return [
        sum((discount * lam) ** (b - a) * error_A[b] for b in range(a, count)) for a in range(count)
    ]


def test_advantages_by_hand():
    # Last: 1 - 0.5. Second: 0 + 0.5 x 0.5 - 0.25 + 0.5 x 0.5 x 0.5. First: 0.5 x 0.25 - 1 + ...
    value_NL, reward_NL = np.array([[1.0, 0.25, 0.5]]), np.array([[0.0, 0.0, 1.0]])
    advantage_NL, return_NL = generalized_advantage(
        value_NL, reward_NL, np.ones((1, 3)), discount=0.5, lam=0.5
    )
    np.testing.assert_allclose(advantage_NL, [[-0.84375, 0.125, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(return_NL, [[0.15625, 0.375, 1.0]], rtol=1e-6)
    assert advantage_NL.dtype == return_NL.dtype == jnp.float32


@pytest.mark.parametrize("discount, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0)])
def test_observation_tokens_are_skipped(discount, lam):
    value_NL, reward_NL, mask_NL = ragged(0)
    results = generalized_advantage(value_NL, reward_NL, mask_NL, discount=discount, lam=lam)
    for n, mask_L in enumerate(mask_NL):
        value_A, reward_A = value_NL[n, mask_L], reward_NL[n, mask_L]
        expected_A = gae_twin(value_A, reward_A, discount, lam)
        np.testing.assert_allclose(results[0][n, mask_L], expected_A, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            results[1][n, mask_L], expected_A + value_A, rtol=1e-4, atol=1e-5
        )
        assert not results[0][n, ~mask_L].any() and not results[1][n, ~mask_L].any()


def test_a_cut_episode_goes_on_with_its_last_value():
    value_NL, reward_NL, mask_NL = ragged(0)
    truncated_N = np.array([True, True, False, True, False, True])
    choices = {"discount": 0.9, "lam": 0.5}
    results = generalized_advantage(value_NL, reward_NL, mask_NL, truncated_N, **choices)
    for n, mask_L in enumerate(mask_NL):
        value_A, reward_A = value_NL[n, mask_L], reward_NL[n, mask_L].copy()
        if truncated_N[n] and mask_L.any():
            reward_A[-1] += 0.9 * value_A[-1]  # as if the rest had been paid with the last token
        expected_A = gae_twin(value_A, reward_A, 0.9, 0.5)
        np.testing.assert_allclose(results[0][n, mask_L], expected_A, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            results[1][n, mask_L], expected_A + value_A, rtol=1e-4, atol=1e-5
        )
    plain = generalized_advantage(value_NL, reward_NL, mask_NL, **choices)
    empty = generalized_advantage(value_NL, reward_NL, mask_NL, np.zeros(6, bool), **choices)
    np.testing.assert_array_equal(empty, plain)
    assert not np.allclose(results[0][1], plain[0][1])


def test_with_lambda_one_the_value_is_a_baseline_of_the_reward_to_go():
    value_NL, reward_NL, mask_NL = ragged(1)
    _, return_NL = generalized_advantage(value_NL, reward_NL, mask_NL, discount=0.9, lam=1.0)
    expected_NL = reward_to_go(reward_NL, mask_NL, discount=0.9)
    np.testing.assert_allclose(return_NL, expected_NL, rtol=1e-4, atol=1e-5)


def test_a_reward_to_go_is_discounted_once_an_action_token():
    reward_NL, mask_NL = np.array([[0.0, 9.0, 2.0, 9.0, 1.0, 9.0]]), np.array([[1, 0, 1, 0, 1, 0]])
    result = reward_to_go(reward_NL, mask_NL, discount=0.5)
    np.testing.assert_allclose(result, [[1.25, 0.0, 2.5, 0.0, 1.0, 0.0]], rtol=1e-6)
    undiscounted = reward_to_go(reward_NL, mask_NL)
    np.testing.assert_allclose(undiscounted, [[3.0, 0.0, 3.0, 0.0, 1.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_nothing_outside_the_mask_is_read(garbage):
    value_NL, reward_NL, mask_NL = ragged(2)
    dirty = [np.where(mask_NL, x_NL, garbage) for x_NL in (value_NL, reward_NL)]
    clean = generalized_advantage(value_NL, reward_NL, mask_NL)
    np.testing.assert_array_equal(generalized_advantage(*dirty, mask_NL), clean)
    np.testing.assert_array_equal(reward_to_go(dirty[0], mask_NL), reward_to_go(value_NL, mask_NL))


@pytest.mark.parametrize(
    "value, target, loss, slope",
    [
        (0.1, 1.0, 0.405, -0.9),  # within the range of the old value, 0
        (0.5, 1.0, 0.32, 0.0),  # further towards the target than allowed: no gain
        (0.5, -1.0, 1.125, 1.5),  # away from the target: the plain error is larger
        (-0.5, -1.0, 0.32, 0.0),
        (-0.5, 1.0, 1.125, -1.5),
    ],
)
def test_a_value_gains_nothing_from_leaving_the_old_one(value, target, loss, slope):
    loss_of = partial(clipped_value_loss, old_value_NL=0.0, return_NL=target, clip=0.2)
    np.testing.assert_allclose(loss_of(value), loss, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss_of)(value), slope, rtol=1e-6)


@pytest.mark.parametrize("target", [1.0, -1.0])
def test_the_gradient_at_the_old_value_is_whole_even_for_a_range_of_zero(target):
    slope = jax.grad(lambda value: clipped_value_loss(value, 0.5, target, clip=0.0))(0.5)
    np.testing.assert_allclose(slope, 0.5 - target, rtol=1e-6)


@pytest.mark.parametrize("clip", [0.2, 1.0, None])
def test_value_losses_and_gradients_agree_with_torch(clip):
    for seed in range(3):
        value_NL, old_value_NL, mask_NL = ragged(seed)
        return_NL = np.random.default_rng(seed + 9).normal(size=value_NL.shape)
        value, old, target, mask = map(
            torch.tensor, (value_NL, old_value_NL, return_NL, mask_NL.astype(float))
        )
        value.requires_grad_()
        loss = (value - target) ** 2
        if clip is not None:
            near = old + torch.clamp(value - old, -clip, clip)
            loss = torch.maximum(loss, (near - target) ** 2)
        (0.5 * loss * mask).sum().backward()

        def total(value_NL, old_value_NL=old_value_NL, return_NL=return_NL, mask_NL=mask_NL):
            arrays = (value_NL, old_value_NL, return_NL)
            return clipped_value_loss(*arrays, clip=clip, mask=mask_NL).sum()

        result, slope_NL = jax.value_and_grad(total)(jnp.asarray(value_NL, jnp.float32))
        np.testing.assert_allclose(result, (0.5 * loss * mask).sum().item(), rtol=1e-5)
        np.testing.assert_allclose(slope_NL, value.grad.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_padding_never_reaches_a_value_loss_or_its_gradient(garbage):
    value_NL, old_value_NL, mask_NL = ragged(4)
    arrays = (value_NL, old_value_NL, value_NL[::-1])

    def loss_and_slopes(fill):
        filled = [jnp.where(mask_NL, x_NL, fill) for x_NL in arrays]
        loss_of = partial(clipped_value_loss, clip=0.2, mask=mask_NL)
        slopes = jax.grad(lambda *a: loss_of(*a).sum(), argnums=(0, 1, 2))(*filled)
        return loss_of(*filled), *slopes

    clean, dirty = loss_and_slopes(0.0), loss_and_slopes(garbage)
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, other)
    assert clean[1].any() and not clean[2].any() and not clean[3].any()
