"""A user's estimator or objective that cannot work is refused before anything is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import CONFIGS

from seeupo_jax import envs
from seeupo_jax.algorithms.estimators import Credit, Estimator
from seeupo_jax.algorithms.objectives import Objective
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.training.algorithm_trial import try_estimator, try_objective
from seeupo_jax.training.checks import check_config

ALGORITHM = Algorithm(scale="none")


def centred(reward_N, valid_N):
    return reward_N - reward_N.mean(where=valid_N)


def on_the_host(reward_N):
    return np.asarray(reward_N)


def one_number(reward_N):
    return reward_N.sum()


def whole(reward_N):
    return reward_N.astype(jnp.int32)


def over_zero(reward_N):
    return reward_N / 0.0


def short(value_NL):
    return value_NL


def no_returns(value_NL):
    return value_NL, value_NL / 0.0


def raises(reward_N):
    raise LookupError("no such\nreward")


def exits(reward_N):
    raise SystemExit("enough")


@pytest.mark.parametrize(
    "function, level, needs, said",
    [
        (on_the_host, "trajectory", ("reward_N",), "fails on reward_N float32[4]: TracerArrayConv"),
        (raises, "trajectory", ("reward_N",), "fails on reward_N float32[4]: LookupError: no such"),
        (exits, "trajectory", ("reward_N",), "fails on reward_N float32[4]: SystemExit: enough."),
        (centred, "trajectory", ("reward_N",), "fails on reward_N float32[4]: TypeError: "),
        (
            one_number,
            "trajectory",
            ("reward_N",),
            "returned float32[] for reward_N float32[4]; all",
        ),
        (whole, "trajectory", ("reward_N",), "returned int32[4] for reward_N float32[4]; allowed:"),
        (over_zero, "trajectory", ("reward_N",), "makes advantages of finite rewards that are not"),
        (centred, "turn", ("reward_N", "valid_N"), "allowed: advantages float32[4, 3]."),
        (short, "token", ("value_NL",), "allowed: advantages float32[4, 6] and returns float32[4,"),
        (no_returns, "token", ("value_NL",), "makes returns of finite rewards that are not finite"),
    ],
)
def test_an_estimator_that_cannot_work_is_one_sentence(function, level, needs, said):
    with pytest.raises(ValueError) as error:
        try_estimator("own:X", Estimator(function, level, needs), ALGORITHM)
    assert str(error.value).startswith("own:X ") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_adapts_clip_ranges_gives_a_finite_scale_of_each_turn():
    def tried(scale):
        def scaled(reward_N, mask_NK):
            return Credit(jnp.where(mask_NK, reward_N[:, None], 0.0), clip_scale=scale(mask_NK))

        estimator = Estimator(scaled, "turn", ("reward_N", "mask_NK"), adapts_clip=True)
        try_estimator("own:X", estimator, ALGORITHM)

    tried(lambda mask_NK: jnp.where(mask_NK, 1.5, 1.0))
    for scale, said in (
        (
            lambda mask_NK: None,
            r"allowed: advantages float32\[4, 3\] and clip scales float32\[4, 3",
        ),
        (lambda mask_NK: jnp.ones(4), r"allowed: .* and clip scales float32\[4, 3\]\.$"),
        (lambda mask_NK: mask_NK / 0.0, "makes clip scales of finite rewards that are not finite"),
    ):
        with pytest.raises(ValueError, match=said):
            tried(scale)


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_an_estimator_is_tried_abstractly_and_then_on_numbers(scale):
    abstract, numbers = [], []

    def centred(reward_N, valid_N):
        abstract.append(isinstance(reward_N, jax.core.Tracer))
        jax.debug.callback(lambda x_N: numbers.append(x_N.tolist()), reward_N)
        return reward_N - reward_N.mean(where=valid_N)

    estimator = Estimator(centred, "trajectory", ("reward_N", "valid_N"))
    try_estimator("own:X", estimator, Algorithm(scale=scale))
    jax.effects_barrier()
    assert abstract == [True] and numbers == [[1.0, 0.5, 2.0, 0.0]]


def alone(ratio, weight):
    return ratio * weight


def summed(ratio, weight):
    return (ratio * weight).sum(), 0 * weight


def constant(ratio, weight):
    return weight, 0 * weight


def steep(ratio, weight):
    return weight * jnp.sqrt(ratio - ratio), 0 * weight


@pytest.mark.parametrize("ratio", ["geometric", "token"])
@pytest.mark.parametrize(
    "function, said",
    [
        (alone, "; allowed: terms float32[3"),
        (summed, "returned float32[], float32[3"),
        (constant, "has no gradient: its term depends on neither ratio nor logp."),
        (steep, "has a gradient that is not finite."),
        (lambda ratio: ratio, "fails on ratio float32[3"),
    ],
)
def test_an_objective_that_cannot_work_is_one_sentence(function, said, ratio):
    objective = Objective(function, ("ratio", "weight"))
    with pytest.raises(ValueError) as error:
        try_objective("own:X", objective, Algorithm(ratio=ratio))
    assert str(error.value).startswith("own:X ") and said in str(error.value)


def branching(ratio, weight, clip_low):
    return (ratio if clip_low > 0.1 else 1 / ratio) * weight, 0 * weight


def test_an_objective_that_asks_for_the_size_of_a_bound_cannot_be_compiled():
    objective = Objective(branching, ("ratio", "weight"), ("clip_low",))
    with pytest.raises(ValueError, match=r"own:X fails on .*clip_low float32\[\]: TracerBool"):
        try_objective("own:X", objective, Algorithm())
    # None is no array.
    try_objective("own:X", dataclasses.replace(objective, function=open_below), OPEN)


def open_below(ratio, weight, clip_low):
    return (ratio if clip_low is None else 1 / ratio) * weight, 0 * weight


OPEN = Algorithm(clip_low=None)
OVER_ZERO = Estimator(over_zero, "trajectory", ("reward_N",))
CONSTANT = Objective(constant, ("ratio", "weight"))


@pytest.mark.parametrize("field, part", [("advantage", "OVER_ZERO"), ("objective", "CONSTANT")])
def test_a_run_is_refused_before_its_environment_is_made(field, part, monkeypatch):
    monkeypatch.setattr(envs, "make", None)
    name = f"{__name__}:{part}"
    config = load_config(CONFIGS / "quickstart.py", [f"algorithm.{field}={name}"])
    with pytest.raises(ValueError, match=f"^config.algorithm.{field}: {name} (makes|has no)"):
        check_config(config)
