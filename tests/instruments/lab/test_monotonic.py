"""SeeUPO is for improvement that is certain: with exact gradients no iteration loses anything.

Not even where a step goes as far as the surrogate lets it. Turns that are updated as if the others
stayed as they were do lose there.
"""

import numpy as np
import pytest

from seeupo_jax.instruments.lab.laboratory import LabSettings, experiment
from seeupo_jax.instruments.lab.problems import PROBLEMS, Problem

LARGE_STEPS = LabSettings(seeds=1, iterations=100, lr=50.0, clip=10.0, exact=True)


def drawn_problems(count):
    """Rewards that are even, rare, or now and then large, in turn."""
    rng = np.random.default_rng(0)
    kinds = (lambda u: u, lambda u: np.where(u > 0.85, u, 0.0), lambda u: u**8)
    means = [kinds[i % 3](rng.uniform(size=(3, 3, 3))) for i in range(count)]
    return [Problem(f"drawn {i}", mean, np.ones_like(mean)) for i, mean in enumerate(means)]


def largest_fall(recipe):
    falls = [experiment(problem, recipe, LARGE_STEPS).fall_SI for problem in drawn_problems(60)]
    return np.max(falls)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_value_never_falls_with_small_steps(name):
    small_steps = LabSettings(seeds=1, iterations=150, exact=True)
    assert experiment(PROBLEMS[name](), "seeupo", small_steps).fall_SI.max() <= 1e-6


def test_the_value_never_falls_with_large_steps_either():
    assert largest_fall("seeupo") <= 1e-6


@pytest.mark.parametrize("recipe", ["seeupo_forward", "seeupo_unweighted", "parallel"])
def test_it_falls_with_large_steps_by_any_other_schedule(recipe):
    assert largest_fall(recipe) > 1e-5
