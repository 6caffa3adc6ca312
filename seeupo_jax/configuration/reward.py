"""`config.rewards`: functions of the finished episode, and the weights of named rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.user_code import NAMES, is_name
from seeupo_jax.options import above, checked, within


@dataclass(frozen=True)
class Reward:
    """A reward by name: that of a function, or without one what the environment gives."""

    function: str | None = checked(
        None, "module:function or module:Class", lambda value: ":" in value.strip(":")
    )
    """A function of the finished episode that returns a number; none: the reward is one that the
    environment gives."""
    weight: float = 1.0
    """Its weight in the trajectory's reward; 0: it is only logged."""
    name: str | None = checked(None, NAMES, is_name)
    """Its name in metrics; none: the function's. Without a function, env or one that the
    environment gives."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the function."""
    concurrency: int = within(1, 1024, 8)
    """Calls at a time, in each process."""
    timeout_s: float = above(0, 60.0, most=1_000_000)
    """Time limit of one call, in seconds."""

    @property
    def label(self) -> str:
        """Its name in metrics and trajectories."""
        return self.name if self.name is not None else self.function.rpartition(":")[2]


@dataclass(frozen=True)
class Judge:
    """Scores candidates of a turn before one of them is executed (forks.kind=candidates)."""

    function: str | None = checked(
        None, "module:function or module:Class", lambda value: ":" in value.strip(":")
    )
    """A function of a conversation that ends with a candidate, which returns a number; none: the
    environment's own, which order_desk has."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the function."""
    concurrency: int = within(1, 1024, 8)
    """Calls at a time, in each process."""
    timeout_s: float = above(0, 60.0, most=1_000_000)
    """Time limit of one call, in seconds."""


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Checks that each reward is of something, and that no two have one name.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    labels: set[str] = set()
    for number, reward in enumerate(rewards):
        field = f"config.rewards[{number}]"
        if reward.function is None and reward.name is None:
            raise ValueError(f"{field}: got no function and no name; allowed: at least one.")
        if reward.function is None and reward.options:
            raise ValueError(f"{field}.options: got options without a function; allowed: none.")
        if not is_name(reward.label):
            raise ValueError(f"{field}.name: got {reward.label!r}; allowed: {NAMES}.")
        if reward.function is not None and reward.label == "env":
            raise ValueError(
                f"{field}.name: got 'env' for a function; allowed: another name, since 'env' is the"
                " environment's own reward."
            )
        if reward.label in labels:
            raise ValueError(
                f"{field}.name: got {reward.label!r}, which an earlier reward has; allowed: a name"
                " of its own."
            )
        labels.add(reward.label)


def reward_weights(rewards: Sequence[Reward]) -> dict[str, float]:
    """Returns the weight of each reward of `config.rewards`, by name; any other has weight 1."""
    return {each.label: each.weight for each in rewards}
