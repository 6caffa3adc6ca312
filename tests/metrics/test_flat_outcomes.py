"""A run whose success, or whose reward, never moved is described with its figures."""

import math

import pytest

from seeupo_jax.metrics.flat_outcomes import flat_outcome


def lines(*pairs):
    """Of iterations with these success rates and mean rewards, between lines of an evaluation."""
    rollouts = [
        {"iteration": i, "rollout/success_rate": success, "rollout/reward_mean": reward}
        for i, (success, reward) in enumerate(pairs, 1)
    ]
    return [{"iteration": 0, "eval/avg@4": 0.5}, *rollouts, {"iteration": 9, "eval/avg@4": 0.5}]


SUCCESS = "rollout/success_rate was 0 in all 3 iterations: no episode had a score of 1. "
QUESTION = " docs/debugging.md has what to look at, in question 3."


@pytest.mark.parametrize(
    "pairs, sentence",
    [
        (
            [(0, -0.25), (0, 0.5), (0.0, 0.12345)],
            f"{SUCCESS}The mean reward was between -0.25 and 0.5.{QUESTION}",
        ),
        (
            [(0, 0.1), (0, 0.1), (0, 0.1 + 1e-9)],
            f"{SUCCESS}The mean reward was 0.1 in each.{QUESTION}",
        ),
        ([(0, 0.0)] * 3, f"{SUCCESS}The mean reward was 0 in each.{QUESTION}"),
        (
            [(0.125, 2.0), (0.5, 2.0)],
            "the mean reward was 2 in all 2 iterations, while rollout/success_rate was between"
            f" 0.125 and 0.5: success earns nothing.{QUESTION}",
        ),
        (
            [(0, 0.1), (0, 0.3), (None, None), (math.nan, 0.2), (0, 0.2)],
            f"{SUCCESS}The mean reward was between 0.1 and 0.3.{QUESTION}",
        ),
    ],
)
def test_what_never_moved_is_named_with_its_figures(pairs, sentence):
    assert flat_outcome(lines(*pairs)) == sentence


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(0, 0.1)],  # one iteration cannot move
        [(0, 0.1), (0.01, 0.2)],
        [(1.0, 1.0)] * 5,  # solved
        [(0.5, 0.5)] * 5,
        [(None, None)] * 5,
        [(0.5, 0.7), (0.6, 0.7 + 1e-4)],
    ],
)
def test_success_that_moves_or_is_there_is_no_warning(pairs):
    assert flat_outcome(lines(*pairs)) is None
