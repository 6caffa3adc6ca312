"""Ratio, clipped surrogate, running weight and KL estimate: values, gradients and padding."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy_twin as twin
import pytest

from seeupo_jax.algorithms.surrogate import (
    clipped_surrogate,
    kl_estimate,
    turn_ratio,
    update_weight,
)

LEVELS = ("geometric", "product", "token")
GARBAGE = (-np.inf, np.nan, 1e30)


def gradient(function, x):
    """Elementwise: the derivative of each output by its own input."""
    return np.asarray(jax.grad(lambda v: jnp.sum(function(v)))(jnp.asarray(x, jnp.float32)))


def ragged(seed):
    rng = np.random.default_rng(seed)
    logp_NL, old_logp_NL = -rng.exponential(1.0, (2, 5, 7))
    mask_NL = rng.random((5, 7)) < 0.5
    mask_NL[0], mask_NL[1] = False, True
    return logp_NL, old_logp_NL, mask_NL


def test_the_three_levels_of_a_hand_worked_action():
    old_logp_NL = np.array([[-1.0, -2.0, -1.0, -9.0]])
    logp_NL = old_logp_NL + np.array([[0.5, -0.2, 0.3, 5.0]])
    mask_NL = np.array([[1, 1, 0, 0]])
    expected = {
        "geometric": [np.exp(0.15)],
        "product": [np.exp(0.3)],
        "token": [[np.exp(0.5), np.exp(-0.2), 1.0, 1.0]],
    }
    for level, value in expected.items():
        ratio = turn_ratio(logp_NL, old_logp_NL, mask_NL, level=level)
        np.testing.assert_allclose(ratio, value, rtol=1e-6)
        assert ratio.dtype == jnp.float32


@pytest.mark.parametrize("level", LEVELS)
def test_ragged_ratios_agree_with_a_loop_over_rows(level):
    logp_NL, old_logp_NL, mask_NL = ragged(0)
    ratio = np.asarray(turn_ratio(logp_NL, old_logp_NL, mask_NL, level=level))
    for n, mask_L in enumerate(mask_NL):
        difference_A = (logp_NL[n] - old_logp_NL[n])[mask_L]
        if level == "token":
            np.testing.assert_allclose(ratio[n, mask_L], np.exp(difference_A), rtol=1e-5)
            assert (ratio[n, ~mask_L] == 1.0).all()
            continue
        count = max(len(difference_A), 1) if level == "geometric" else 1
        np.testing.assert_allclose(ratio[n], np.exp(difference_A.sum() / count), rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_an_empty_mask_gives_a_ratio_of_one(level):
    ratio = turn_ratio(np.full((2, 3), -4.0), np.zeros((2, 3)), np.zeros((2, 3)), level=level)
    assert (ratio == 1.0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_padding_never_reaches_a_ratio_or_its_gradient(level, garbage):
    logp_NL, old_logp_NL, mask_NL = ragged(1)

    def total(*logps):
        return jnp.sum(turn_ratio(*logps, mask_NL, level=level))

    def values_and_gradients(outside):
        arrays = [jnp.where(mask_NL, x, outside) for x in (logp_NL, old_logp_NL)]
        return turn_ratio(*arrays, mask_NL, level=level), *jax.grad(total, argnums=(0, 1))(*arrays)

    for clean, dirty in zip(values_and_gradients(0.0), values_and_gradients(garbage), strict=True):
        np.testing.assert_array_equal(clean, dirty)
        assert np.isfinite(dirty).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_ratio_too_large_for_float32_stays_finite_with_its_gradient(level):
    def objective(logp_NL, weight):
        ratio = turn_ratio(logp_NL, np.full((1, 4), -200.0), np.ones((1, 4)), level=level)
        return clipped_surrogate(ratio, jnp.full(ratio.shape, weight), clip_low=0.2, clip_high=0.2)

    for weight, value in ((0.0, 0.0), (2.0, 2.4)):
        np.testing.assert_allclose(objective(np.zeros((1, 4)), weight), value, rtol=1e-6)
        slope_NL = gradient(partial(objective, weight=weight), np.zeros((1, 4)))
        np.testing.assert_array_equal(slope_NL, 0.0)
    for weight in (0.0, 2.0, -2.0):
        assert np.isfinite(objective(np.zeros((1, 4)), weight)).all()


def test_ratios_are_float32_for_half_precision_input():
    logp_NL, old_logp_NL = (jnp.full((1, 2), x, jnp.bfloat16) for x in (-3.0, -3.015625))
    ratio = turn_ratio(logp_NL, old_logp_NL, np.ones((1, 2)))
    np.testing.assert_allclose(ratio, [np.exp(0.015625)], rtol=1e-6)
    assert ratio.dtype == jnp.float32


@pytest.mark.parametrize(
    "ratio, weight, value, slope",
    [
        (1.1, 2.0, 2.2, 2.0),  # inside
        (1.5, 2.0, 2.6, 0.0),  # above, rewarded: clipped at 1.3
        (1.5, -2.0, -3.0, -2.0),  # above, punished: pushed back
        (0.5, 2.0, 1.0, 2.0),  # below, rewarded: pushed back
        (0.5, -2.0, -1.6, 0.0),  # below, punished: clipped at 0.8
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_the_surrogate_takes_the_lesser_side(ratio, weight, value, slope):
    surrogate = partial(clipped_surrogate, weight_N=np.array([weight]), clip_low=0.2, clip_high=0.3)
    np.testing.assert_allclose(surrogate(np.array([ratio])), [value], rtol=1e-6)
    np.testing.assert_allclose(gradient(surrogate, [ratio]), [slope], rtol=1e-6)


@pytest.mark.parametrize(
    "ratio, weight, value, slope",
    [
        (1.5, -2.0, -3.0, -2.0),  # above the clip range, punished, within the bound
        (2.5, -2.0, -5.0, -2.0),  # on the bound: of ratio x weight
        (4.0, -2.0, -5.0, 0.0),  # beyond it
        (1e30, -2.0, -5.0, 0.0),
        (0.5, -2.0, -1.6, 0.0),  # below the clip range, as ever
        (4.0, 2.0, 2.6, 0.0),  # rewarded: no matter of the second bound
        (4.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_second_bound_of_dual_clip_is_of_negative_weights(ratio, weight, value, slope):
    clips = {"clip_low": 0.2, "clip_high": 0.3, "clip_dual": 2.5}
    surrogate = partial(clipped_surrogate, weight_N=np.array([weight]), **clips)
    np.testing.assert_allclose(surrogate(np.array([ratio])), [value], rtol=1e-6)
    np.testing.assert_allclose(gradient(surrogate, [ratio]), [slope], rtol=1e-6)


@pytest.mark.parametrize("weight", [2.0, -2.0])
def test_the_gradient_at_the_end_of_the_clip_range_is_whole(weight):
    surrogate = partial(clipped_surrogate, weight_N=np.array([weight]), clip_low=0, clip_high=0)
    np.testing.assert_array_equal(gradient(surrogate, [1.0]), [weight])


def test_none_leaves_a_side_of_the_surrogate_open():
    surrogate = partial(clipped_surrogate, np.array([5.0, 0.1]), np.array([2.0, -2.0]))
    for low, high, expected in (
        (0.2, None, [10.0, -1.6]),
        (None, 0.2, [2.4, -0.2]),
        (None, None, [10.0, -0.2]),
    ):
        np.testing.assert_allclose(surrogate(clip_low=low, clip_high=high), expected, rtol=1e-6)


def test_token_ratios_take_one_weight_a_row():
    ratio_NL, weight_N = np.array([[1.5, 1.1], [1.5, 1.1]]), np.array([1.0, -1.0])
    result = clipped_surrogate(ratio_NL, weight_N[:, None], clip_low=0.2, clip_high=0.2)
    np.testing.assert_allclose(result, [[1.2, 1.1], [-1.5, -1.1]], rtol=1e-6)


def test_the_weight_is_a_constant_of_the_surrogate():
    surrogate = partial(clipped_surrogate, np.ones(2), clip_low=0.2, clip_high=0.2)
    assert not gradient(surrogate, [3.0, -1.0]).any()


def test_both_the_ratio_and_the_product_are_clipped():
    factor_N = np.array([1.0, 1.0, 1.15, 0.9, 0.8, 1.2])
    ratio_N = np.array([1.1, 3.0, 1.1, 0.5, 5.0, 0.5])
    # 0.9 x clip(0.5) = 0.72 -> 0.8; 0.8 x clip(5) = 0.96, not 4 -> 1.2; 1.2 x clip(0.5) = 0.96
    expected = [1.1, 1.2, 1.2, 0.8, 0.96, 0.96]
    result = update_weight(factor_N, ratio_N, clip=0.2)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert result.dtype == jnp.float32


def test_without_a_weight_clip_the_factor_is_the_plain_product():
    result = update_weight(np.array([1.15, 0.8]), np.array([3.0, 0.1]), clip=None)
    np.testing.assert_allclose(result, [3.45, 0.08], rtol=1e-6)


def test_without_a_weight_clip_the_product_stays_finite():
    log_ratios = np.array([[20.0, 80.0, 0.1, -80.0], [25.0, 80.0, 0.2, -80.0], [-3.0, 1.0, 0.3, 1]])
    factor_N, wanted = np.ones(4), [1.0] * 4
    for row in np.float32(np.exp(log_ratios)):
        factor_N = update_weight(factor_N, row, clip=None)
        wanted = [min(w * float(r), math.exp(30)) for w, r in zip(wanted, row, strict=True)]
    np.testing.assert_allclose(factor_N, np.float32(wanted), rtol=1e-6)


def test_a_null_turn_leaves_its_factor():
    factor_N = np.array([0.8, 1.0, 1.2, 1.13], np.float32)
    ratio_N = turn_ratio(np.full((4, 2), np.nan), np.zeros((4, 2)), np.zeros((4, 2)))
    for clip in (0.2, None):
        np.testing.assert_array_equal(update_weight(factor_N, ratio_N, clip=clip), factor_N)


@pytest.mark.parametrize(
    "kind, value, slope",
    [
        ("k1", [-0.5, 1.0], [1.0, 1.0]),
        ("k2", [0.125, 0.5], [-0.5, 1.0]),
        ("k3", [np.exp(0.5) - 1.5, np.exp(-1.0)], [1 - np.exp(0.5), 1 - np.exp(-1.0)]),
    ],
)
def test_hand_worked_kl_estimates_and_their_slopes(kind, value, slope):
    logp, ref_logp = np.array([-2.0, -1.0]), np.array([-1.5, -2.0])
    estimate = partial(kl_estimate, ref_logp=ref_logp, kind=kind)
    np.testing.assert_allclose(estimate(logp), value, rtol=1e-6)
    np.testing.assert_allclose(gradient(estimate, logp), slope, rtol=1e-5)


def test_k3_keeps_its_digits_near_the_reference():
    d = np.float32(1.3 * 2**-12)  # here exp(d) - d - 1 in float32 is even negative
    expected = np.expm1(np.float64(d)) - d
    np.testing.assert_allclose(kl_estimate(np.zeros(1), np.full(1, d)), expected, rtol=1e-3)


# By verl's `kl_penalty_forward` ("low_var_kl"), in torch: a far token is worth 10 nats at the most,
# and its gradient is 0; up to that bound it is exp(d) - d - 1.
@pytest.mark.parametrize(
    "difference, value, slope",
    [
        (2.5, np.exp(2.5) - 3.5, 1 - np.exp(2.5)),
        (-10.5, np.exp(-10.5) + 9.5, 1 - np.exp(-10.5)),
        (3.0, 10.0, 0.0),
        (-12.0, 10.0, 0.0),
        (25.0, 10.0, 0.0),
        (95.0, 10.0, 0.0),
        (-95.0, 10.0, 0.0),
        (np.inf, 10.0, 0.0),
        (-np.inf, 10.0, 0.0),
    ],
)
def test_k3_of_a_far_token_is_bounded_and_sends_no_gradient(difference, value, slope):
    logp, ref_logp = np.array([-1.0]), np.array([-1.0 + difference])
    estimate = partial(kl_estimate, ref_logp=ref_logp)
    np.testing.assert_allclose(estimate(logp), [value], rtol=1e-5)
    np.testing.assert_allclose(gradient(estimate, logp), [slope], rtol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_estimate_is_unbiased(kind):
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.4, 0.25, 0.35])
    mean = np.sum(p * np.asarray(kl_estimate(np.log(p), np.log(q), kind=kind)))
    np.testing.assert_allclose(mean, np.sum(p * np.log(p / q)), rtol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_padding_never_reaches_a_kl_estimate_or_its_gradient(kind, garbage):
    logp, ref_logp, mask = ragged(2)
    padded, ref_padded = np.where(mask, logp, garbage), np.where(mask, ref_logp, garbage)
    value = np.asarray(kl_estimate(padded, ref_padded, kind=kind, mask=mask))
    np.testing.assert_array_equal(value, np.where(mask, kl_estimate(logp, ref_logp, kind=kind), 0))
    slope = gradient(partial(kl_estimate, ref_logp=ref_padded, kind=kind, mask=mask), padded)
    assert np.isfinite(slope).all() and not slope[~mask].any() and slope[mask].all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip_low, clip_high", [(0.2, 0.3), (0.2, None), (None, 0.2)])
def test_ragged_objectives_and_gradients_agree_with_the_numpy_twin(level, clip_low, clip_high):
    logp_NL, old_logp_NL, mask_NL = ragged(4)
    old_logp_NL = logp_NL + 0.3 * (old_logp_NL - logp_NL)
    ref_logp_NL, weight_N = logp_NL[::-1].copy(), np.array([1.0, -2.0, 0.5, 3.0, -1.0])
    ref_logp_NL[1, :4] = logp_NL[1, :4] + np.array(
        [95.0, -95.0, 3.0, -10.5]
    )  # three beyond k3's bound
    clips = {"clip_low": clip_low, "clip_high": clip_high}

    def mean(x_NL):
        return jnp.sum(x_NL * mask_NL, 1) / np.maximum(mask_NL.sum(1), 1)

    def objective(logp_NL):
        ratio = turn_ratio(logp_NL, old_logp_NL, mask_NL, level=level)
        per_token = level == "token"
        term = clipped_surrogate(ratio, weight_N[:, None] if per_token else weight_N, **clips)
        kl_NL = kl_estimate(logp_NL, ref_logp_NL, mask=mask_NL)
        return (mean(term) if per_token else term) - 0.1 * mean(kl_NL)

    value_N, slope_NL = objective(logp_NL), gradient(objective, logp_NL)
    options = twin.Options(order=[], ratio=level, kl_coef=0.1, **clips)
    for n in range(1, 5):
        rows = (x_NL[n, mask_NL[n]] for x_NL in (logp_NL, old_logp_NL, ref_logp_NL))
        value, slope_A = twin.piece_objective(*rows, weight_N[n], options)
        np.testing.assert_allclose(value_N[n], value, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(slope_NL[n, mask_NL[n]], slope_A, rtol=1e-4, atol=1e-5)
        assert not slope_NL[n, ~mask_NL[n]].any()


def test_unknown_names_list_the_known_ones():
    zeros = np.zeros((1, 1))
    with pytest.raises(ValueError, match="level: got 'mean'; allowed: geometric, product, token"):
        turn_ratio(zeros, zeros, zeros, level="mean")
    with pytest.raises(ValueError, match="kind: got 'k4'; allowed: k1, k2, k3"):
        kl_estimate(zeros, zeros, kind="k4")
