"""Which tokens Clip-Cov and KL-Cov limit, against the formulas written out."""

import numpy as np
import pytest

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.credit.covariance import (
    drawn,
    largest,
    limit_tokens,
    ratio_is_clipped,
    token_covariance,
)
from seeupo_jax.types import TurnBatch

SPANS, LENGTH = 5, 9
TOKEN = {"ratio": "token"}


def limits(kind, **options):
    return TOKEN | {"covariance": {"kind": kind} | options}


def arrays(seed=0):
    """Log-probabilities, old ones, advantages and a ragged mask; rubbish outside the mask."""
    rng = np.random.default_rng(seed)
    mask_PA = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (SPANS, 1))
    logp_PA = -rng.exponential(1.0, (SPANS, LENGTH))
    old_PA = logp_PA + rng.normal(0, 0.3, (SPANS, LENGTH))
    advantage_PA = rng.normal(size=(SPANS, LENGTH))
    rounded = (x.astype(np.float32).astype(float) for x in (logp_PA, old_PA, advantage_PA))
    return [np.where(mask_PA, x, 1e30) for x in rounded] + [mask_PA]


def batch(old_PA, advantage_PA, mask_PA):
    rows = (np.zeros(0),) * 5
    mask_PA = mask_PA.astype(np.float32)
    given = rows + (np.zeros(0), mask_PA, np.zeros(SPANS), np.int32(1))
    fields = {"old_logp_PA": old_PA, "advantage_PA": advantage_PA}
    return TurnBatch(*given, **{k: x.astype(np.float32) for k, x in fields.items()})


def limit(options, seed=0, rng=3):
    logp_PA, *rest = arrays(seed)
    made = batch(*rest)
    return limit_tokens(Algorithm(**options), made, logp_PA, np.random.default_rng(rng))


def wanted_covariance():
    logp_PA, _, advantage_PA, mask_PA = arrays()
    pairs = [(logp_PA[at], advantage_PA[at]) for at in zip(*np.nonzero(mask_PA), strict=True)]
    means = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    return np.array([(logp - means[0]) * (own - means[1]) for logp, own in pairs])


def test_the_covariance_is_over_all_tokens_of_the_step_and_no_padding():
    logp_PA, _, advantage_PA, mask_PA = arrays()
    covariance_PA = token_covariance(logp_PA, advantage_PA, mask_PA)
    np.testing.assert_allclose(covariance_PA[mask_PA], wanted_covariance(), rtol=1e-12)
    assert (covariance_PA[~mask_PA] == -np.inf).all()


def test_a_microbatch_has_no_quota_of_its_own():
    """The authors' code picks at least one token of each microbatch, by its own means."""
    covariance_PA = np.array([[9.0, 8.0, 7.0], [1.0, 0.5, 0.1]])
    np.testing.assert_array_equal(largest(covariance_PA, 2), [[1, 1, 0], [0, 0, 0]])


def test_of_equal_covariances_the_first_is_picked_and_padding_never():
    covariance_PA = np.array([[2.0, 3.0, -np.inf], [3.0, 3.0, -np.inf]])
    np.testing.assert_array_equal(largest(covariance_PA, 2), [[0, 1, 0], [1, 0, 0]])
    assert largest(covariance_PA, 6).sum() == 4


@pytest.mark.parametrize("share", [1e-9, 0.2, 1.0])
def test_kl_cov_penalises_the_change_of_the_largest_share(share):
    logp_PA, old_PA, _, mask_PA = arrays()
    result, counted = limit(limits("kl", share=share))
    count = max(1, int(share * mask_PA.sum()))
    places = np.argsort(-wanted_covariance())[:count]
    sign = np.zeros(int(mask_PA.sum()))
    sign[places] = np.sign((logp_PA - old_PA)[mask_PA][places])
    np.testing.assert_array_equal(result.drift_sign_PA[mask_PA], sign)
    assert (result.drift_sign_PA[~mask_PA] == 0).all()
    assert counted["covariance_tokens"] == count == np.abs(sign).sum()
    np.testing.assert_allclose(counted["covariance"], wanted_covariance().mean(), rtol=1e-12)


def test_kl_cov_penalises_nothing_before_a_step_has_changed_the_policy():
    logp_PA, _, advantage_PA, mask_PA = arrays()
    made = batch(logp_PA, advantage_PA, mask_PA)
    given = np.asarray(made.old_logp_PA), np.random.default_rng(0)
    result, counted = limit_tokens(Algorithm(**limits("kl", share=1.0)), made, *given)
    assert not result.drift_sign_PA.any() and counted["covariance_tokens"] == mask_PA.sum()


def test_clip_cov_draws_from_within_its_bounds_what_no_ratio_clips():
    logp_PA, old_PA, advantage_PA, mask_PA = arrays()
    low, high = np.quantile(wanted_covariance(), [0.3, 0.9])
    bounds = {"low": float(low), "high": float(high)}
    result, counted = limit(limits("clip", share=1.0, **bounds))
    ratio = np.exp(logp_PA - old_PA)[mask_PA]
    own = advantage_PA[mask_PA]
    clipped = np.where(own > 0, ratio > 1.2, ratio < 0.8)
    inside = (wanted_covariance() > low) & (wanted_covariance() < high)
    assert (inside & clipped).any() and (inside & ~clipped).any()
    zeroed = (result.advantage_PA == 0)[mask_PA]
    np.testing.assert_array_equal(zeroed, inside & ~clipped)
    np.testing.assert_array_equal(result.advantage_PA[mask_PA][~zeroed], own.astype("f4")[~zeroed])
    assert counted["covariance_tokens"] == zeroed.sum() and result.drift_sign_PA is None


def test_a_share_of_those_within_the_bounds_is_drawn_at_random():
    covariance_PA = np.arange(40.0).reshape(4, 10)
    within = {"low": 9.0, "high": 30.0}
    draws = [drawn(covariance_PA, 5, **within, rng=np.random.default_rng(i)) for i in (0, 0, 1)]
    assert all(draw.sum() == 5 for draw in draws)
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()
    for draw in draws:
        assert (9 < covariance_PA[draw]).all() and (covariance_PA[draw] < 30).all()
    none = drawn(covariance_PA, 5, low=50.0, high=60.0, rng=np.random.default_rng(0))
    assert not none.any()


def test_a_step_without_tokens_limits_nothing():
    _, old_PA, advantage_PA, mask_PA = arrays()
    made = batch(old_PA, advantage_PA, np.zeros_like(mask_PA))
    for options in (limits("kl"), limits("clip")):
        rng = np.random.default_rng(0)
        result, counted = limit_tokens(Algorithm(**options), made, old_PA, rng)
        assert counted == {"covariance": 0.0, "covariance_tokens": 0.0}
        assert result.drift_sign_PA is None or not result.drift_sign_PA.any()


def test_a_turns_clip_range_says_which_of_its_tokens_are_clipped():
    difference_PA, advantage_PA = np.log([[1.15, 1.15], [0.85, 0.85]]), np.array([[1.0], [-1.0]])
    options, scale_PA = Algorithm(clip_low=0.2, clip_high=0.2), np.array([[1.0, 0.5]])
    clipped = ratio_is_clipped(difference_PA, advantage_PA, options, scale_PA)
    np.testing.assert_array_equal(clipped, [[False, True], [False, True]])
    assert not ratio_is_clipped(difference_PA, advantage_PA, options).any()
