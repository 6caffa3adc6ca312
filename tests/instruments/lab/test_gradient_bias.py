"""The bias of stale trajectories, and runs on them, against the same in float64 loops."""

import dataclasses
import functools

import numpy as np
import pytest
from numpy_lab import Lab

from seeupo_jax.instruments.lab.gradient_bias import BiasSettings, corrections, measure_bias
from seeupo_jax.instruments.lab.laboratory import LabSettings, experiment
from seeupo_jax.instruments.lab.problems import Problem

MEAN = np.random.default_rng(8).uniform(0, 1, (2,) * 4)
PROBLEM = Problem("small", MEAN, np.ones_like(MEAN))
SETTINGS = LabSettings(seeds=1, iterations=6, turn_tokens=2, exact=True)
LAGS, WEIGHTS = (0, 1, 3), BiasSettings(1.3, 0.8)
NAMES = [*corrections(WEIGHTS)]
TWIN = Lab(MEAN, 2)


def of_twin(name):
    """A correction as the twin has it."""
    if name in ("none", "ratios to the sampler"):
        return "none" if name == "none" else None
    method, _, per = name.split()
    return method, per, WEIGHTS.importance_clip, WEIGHTS.importance_low


@functools.cache
def measured():
    return measure_bias(PROBLEM, "seeupo_noscale", SETTINGS, LAGS, WEIGHTS)


@functools.cache
def twin_run():
    return TWIN.run(SETTINGS.iterations - 1)


@pytest.mark.parametrize("name", NAMES)
def test_bias_noise_and_lost_tokens_are_those_of_float64(name):
    tables, sums = twin_run(), {lag: np.zeros(3) for lag in LAGS}
    fresh = np.zeros(2)
    for i in range(max(LAGS), SETTINGS.iterations):
        gradient, deviation, _ = TWIN.gradient(tables[i], tables[i], "none")
        fresh += np.linalg.norm(gradient), deviation
        for lag in LAGS:
            stale, noise, lost = TWIN.gradient(tables[i], tables[i - lag], of_twin(name))
            sums[lag] += np.linalg.norm(stale - gradient), noise, lost
    found = measured().by_correction[name]
    wanted = np.array([sums[lag] for lag in LAGS]).T
    np.testing.assert_allclose(found.bias, wanted[0] / fresh[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.noise, wanted[1] / fresh[1], rtol=1e-4)
    np.testing.assert_allclose(found.lost, wanted[2] / 3, atol=1e-6)


def test_the_corrections_differ_and_each_rejects_or_clips_something():
    results = measured().by_correction
    biases = [tuple(np.round(found.bias, 4)) for found in results.values()]
    assert len({*biases}) == len(biases) == 11
    for name, found in results.items():
        np.testing.assert_allclose(found.bias[0], 0, atol=1e-6)
        np.testing.assert_allclose(found.noise[0], 1, rtol=1e-5)
        some = name != "none" and not name.startswith("truncate")
        assert (found.lost[-1] > 0) == some, name
    kl = measured().kl
    assert abs(kl[0]) < 1e-6 and 0.001 < kl[1] < kl[2]


def test_weights_of_trajectories_have_no_bias_unless_they_are_truncated():
    weights = BiasSettings(1000.0, 1e-6)
    found = measure_bias(PROBLEM, "seeupo_noscale", SETTINGS, LAGS, weights).by_correction
    for method in ("truncate", "mask"):
        np.testing.assert_allclose(found[f"{method} per trajectory"].bias, 0, atol=1e-5)
    for name in ("none", "ratios to the sampler", "truncate per token", "reject per trajectory"):
        assert found[name].bias[-1] > 0.05, name


RUNS = {
    "on-policy": ("", 0, "none"),
    "ratios to the sampler": ("", 2, None),
    "masked tokens": (
        ":importance.method=mask:importance.per=token:importance.clip=1.3:importance.low=0.8",
        2,
        ("mask", "token", 1.3, 0.8),
    ),
    "rejected turns": (
        ":importance.method=reject:importance.per=turn:importance.clip=1.3",
        2,
        ("reject", "turn", 1.3, 0.0),
    ),
    "truncated trajectories": (
        ":importance.per=trajectory:importance.clip=1.2",
        2,
        ("truncate", "trajectory", 1.2, 0.0),
    ),
}


def curves(name):
    """The values after each iteration by the laboratory and by the twin."""
    changes, lag, correction = RUNS[name]
    settings = dataclasses.replace(SETTINGS, lag=lag)
    (value_I,) = experiment(PROBLEM, f"seeupo_noscale{changes}", settings).value_SI
    tables = TWIN.run(settings.iterations, lag, correction)
    return value_I, np.array([TWIN.value(table) for table in tables])


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_stale_trajectories_is_that_of_float64(name):
    value_I, wanted_I = curves(name)
    np.testing.assert_allclose(value_I, wanted_I, atol=2e-5)
    if name != "on-policy":
        on_policy = np.array([TWIN.value(table) for table in twin_run()])
        assert np.abs(wanted_I[:-1] - on_policy).max() > 5e-4


@pytest.mark.parametrize(
    ("recipe", "changes", "lags", "weights", "said"),
    [
        ("seeupo", {}, (0, 6), {}, "--bias: got 0,6; allowed: lags from 0 to 5, --iterations - 1."),
        ("seeupo", {}, (-1,), {}, "--bias: got -1; allowed: lags from 0 to 5, --iterations - 1."),
        (
            "seeupo",
            {},
            (1,),
            {"importance_low": 2.0},
            "--importance_low: got 2; allowed: a number below --importance_clip=2.",
        ),
        (
            "seeupo",
            {"lag": 1},
            (1,),
            {},
            "--lag: got 1 with --bias; allowed: 0, as it has its own.",
        ),
        ("ppo", {"turn_tokens": 1}, (1,), {}, "--exact: got 'ppo', with advantage=gae; allowed: "),
        ("rloo", {}, (1,), {}, "--bias: got 'rloo' with objective=logp and old_policy=iteration;"),
        ("seeupo:importance.clip=2", {}, (1,), {}, "'seeupo:importance.clip=2', which sets import"),
        ("seeupo", {"turn_tokens": 3}, (1,), {}, "--turn_tokens: got 3 on small, which has 4 act"),
    ],
)
def test_what_has_no_bias_is_told(recipe, changes, lags, weights, said):
    settings = dataclasses.replace(SETTINGS, **changes)
    with pytest.raises(ValueError) as caught:
        measure_bias(PROBLEM, recipe, settings, lags, BiasSettings(**weights))
    assert said in str(caught.value)
