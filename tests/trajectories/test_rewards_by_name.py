"""Named rewards side by side: the same columns for whoever has the same trajectories."""

import numpy as np

from seeupo_jax.trajectories.rewards_by_name import named_rewards
from seeupo_jax.types import Trajectory

GIVEN = [
    Trajectory.of((), 0.5, 0, rewards={"env": 0.25, "late": 1.0, "form": 2.0}),
    Trajectory.of((), 0.75, 0),
    Trajectory.of((), 0.5, 0, rewards={"form": 3.0, "extra": -1.0}),
]


def test_names_are_in_one_order_and_what_was_not_given_is_zero():
    named = named_rewards(GIVEN)
    assert [*named] == ["env", "extra", "form", "late"]
    # One without names has all of its reward from the environment.
    assert np.stack([*named.values()], axis=1).tolist() == [
        [0.25, 0, 2, 1],
        [0.75, 0, 0, 0],
        [0, -1, 3, 0],
    ]
    assert [*named_rewards(GIVEN[::-1])] == [*named]
    assert [*named_rewards(GIVEN, ["late", "nobody", "env"])] == ["late", "env", "extra", "form"]


def test_without_names_there_is_none():
    assert named_rewards(GIVEN[1:2]) == named_rewards([]) == {}
