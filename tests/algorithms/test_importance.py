"""Importance weights: what the papers' formulas say, in float64, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.algorithms.importance import importance_weights

UNITS = 5
BOUNDS = {"clip": 1.3, "low": 0.6}
NARROW = {"clip": 1.05, "low": 0.95}  # of geometric means


def sampled(seed):
    """Log-probabilities of 40 tokens by trainer and sampler, and the unit of each; 5 are padding.

    Of UNITS units the last has no token.
    """
    rng = np.random.default_rng(seed)
    logp_X, sampler_logp_X = (np.log(rng.uniform(0.1, 0.9, 40)) for _ in range(2))
    sampler_logp_X = 0.8 * logp_X + 0.2 * sampler_logp_X
    unit_X = rng.integers(0, UNITS - 1, 40)
    unit_X[rng.permutation(40)[:5]] = UNITS
    return logp_X, sampler_logp_X, unit_X


def twin(logp_X, sampler_logp_X, unit_X, method, level, clip, low):
    """TIS, Eq. of Yao et al. 2025: min(pi / mu, C). IcePop (arXiv:2510.18855): k if within
    [alpha, beta], else 0. Rejection (verl's rollout_rs): 1 if within, else masked."""
    weights, kept, quotients = np.ones(len(unit_X)), np.ones(len(unit_X), bool), np.ones(UNITS)
    for unit in range(UNITS):
        own = [x for x in range(len(unit_X)) if unit_X[x] == unit]
        p, q = (np.prod([np.exp(of_X[x]) for x in own]) for of_X in (logp_X, sampler_logp_X))
        k = p / q if level == "sequence" else (p / q) ** (1 / max(len(own), 1))
        quotients[unit] = k
        inside = low <= k <= clip
        weight = {
            "truncate": min(k, clip),
            "mask": k if inside else 0.0,
            "reject": float(inside),
        }[method]
        for x in own:
            weights[x], kept[x] = weight, inside or method == "truncate"
    return weights, kept, quotients


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("method", ["truncate", "mask", "reject"])
def test_weights_are_the_papers_in_float64(method, level):
    choices = {"method": method, "level": level} | (BOUNDS if level == "sequence" else NARROW)
    outcomes = set()
    for seed in range(4):
        arrays = sampled(seed)
        weight_X, kept_X, quotient_U = importance_weights(*arrays, units=UNITS, **choices)
        wanted = twin(*arrays, **choices)
        np.testing.assert_allclose(weight_X, wanted[0], rtol=2e-6)
        np.testing.assert_array_equal(kept_X, wanted[1])
        np.testing.assert_allclose(quotient_U, wanted[2], rtol=2e-6)
        outcomes |= {*np.asarray(kept_X).tolist()}
    assert weight_X.dtype == jnp.float32
    assert outcomes == ({True} if method == "truncate" else {True, False})


def test_a_hand_worked_sequence_of_two_tokens():
    # Quotients 2 and 1/2, of both 1; then 2 and 2, of both 4 and their mean 2.
    logp_X, sampler_logp_X = np.log([0.8, 0.2, 0.8, 0.6]), np.log([0.4, 0.4, 0.4, 0.3])

    def of(unit_X, **options):
        arrays = logp_X, sampler_logp_X, np.array(unit_X)
        return importance_weights(*arrays, units=4, **options)[:2]

    tokens, pairs = [0, 1, 2, 3], [0, 0, 1, 1]
    tis, _ = of(tokens, method="truncate", level="sequence", clip=1.5)
    np.testing.assert_allclose(tis, [1.5, 0.5, 1.5, 1.5], rtol=1e-6)
    icepop, kept_X = of(tokens, method="mask", level="sequence", clip=5.0, low=0.6)
    np.testing.assert_allclose(icepop, [2, 0, 2, 2], rtol=1e-6)
    assert kept_X.tolist() == [True, False, True, True]
    mis, kept_X = of(pairs, method="mask", level="sequence", clip=3.0)
    np.testing.assert_allclose(mis, [1, 1, 0, 0], rtol=1e-6)
    assert kept_X.tolist() == [True, True, False, False]
    geometric, _ = of(pairs, method="reject", level="geometric", clip=3.0)
    np.testing.assert_array_equal(geometric, [1, 1, 1, 1])


@pytest.mark.parametrize("method", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_weights_are_constants_that_no_padding_reaches(method, garbage):
    logp_X, sampler_logp_X, unit_X = sampled(0)
    options = {"units": UNITS, "method": method, "level": "sequence", **BOUNDS}
    clean = importance_weights(logp_X, sampler_logp_X, unit_X, **options)
    logp_X, sampler_logp_X = (
        np.where(unit_X == UNITS, garbage, x_X) for x_X in (logp_X, sampler_logp_X)
    )
    for got, wanted in zip(
        importance_weights(logp_X, sampler_logp_X, unit_X, **options), clean, strict=True
    ):
        np.testing.assert_array_equal(got, wanted)

    def total(logp_X):
        return jnp.sum(importance_weights(logp_X, sampler_logp_X, unit_X, **options)[0])

    assert not jax.grad(total)(jnp.asarray(logp_X)).any()


def test_a_quotient_too_large_for_float32_is_truncated_or_rejected():
    arrays = np.zeros(2), np.full(2, -500.0), np.zeros(2, int)
    options = {"units": 1, "level": "sequence", "clip": 2.0}
    weight_X, _, _ = importance_weights(*arrays, method="truncate", **options)
    np.testing.assert_array_equal(weight_X, [2.0, 2.0])
    weight_X, kept_X, _ = importance_weights(*arrays, method="mask", **options)
    assert not weight_X.any() and not kept_X.any()


@pytest.mark.parametrize("method", ["truncate", "mask", "reject"])
def test_a_log_probability_of_nan_is_not_rejected_but_skips_the_step(method):
    arrays = np.array([np.nan, 0.0]), np.zeros(2), np.arange(2)
    options = {"units": 2, "level": "sequence", **BOUNDS}
    weight_X, kept_X, quotient_U = importance_weights(*arrays, method=method, **options)
    assert kept_X.all() and np.isnan(quotient_U[0])
    # `reject` has no other weight: the token's own log-probability is NaN in the loss.
    np.testing.assert_array_equal(weight_X, [1.0 if method == "reject" else np.nan, 1.0])


def test_a_sampler_of_the_top_k_weighs_its_actions_by_the_mass_that_it_kept():
    p = np.array([0.5, 0.3, 0.2])
    weight_X, _, _ = importance_weights(
        np.log(p[:2]),
        np.log(p[:2] / 0.8),  # what a sampler with top_k=2 records
        np.zeros(2, int),
        units=1,
        method="truncate",
        level="sequence",
        clip=2.0,
    )
    np.testing.assert_allclose(weight_X, [0.8**2] * 2, rtol=1e-6)


@pytest.mark.parametrize("name, value", [("method", "clip"), ("level", "token")])
def test_an_unknown_choice_is_refused(name, value):
    options = {"method": "mask", "level": "sequence", name: value}
    with pytest.raises(ValueError, match=f"^{name}: got '{value}'; allowed: "):
        importance_weights(*sampled(0), units=UNITS, clip=2.0, **options)
