"""The functions of `config.rewards`, and how rewards by name become one reward."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.reward import Reward
from seeupo_jax.configuration.user_code import (
    check_arguments,
    describe,
    import_attribute,
    origin,
    text_of,
)
from seeupo_jax.envs.base import TurnRewards
from seeupo_jax.rewards.finished_episode import FinishedEpisode

_EPISODE = FinishedEpisode("", "train", (), (), "done", 0, 0.0, {}, 0.0, {})


@dataclass(frozen=True)
class RewardFunction:
    """A function of the user's; `close` it.

    call: takes a finished episode; returns a number, a list with one number per turn, or an
      awaitable of either.
    concurrency, timeout_s: see `Reward`.
    """

    name: str
    call: Callable[[FinishedEpisode], Any]
    concurrency: int
    timeout_s: float
    close: Callable[[], None] = lambda: None


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The reward that rewards by name make: sum of weight × reward, a weight not given being 1.

    Args:
      rewards: at least one; they are added in their order.
    """
    weighted = [weights.get(name, 1.0) * reward for name, reward in rewards.items()]
    return functools.reduce(operator.add, weighted)  # sum() would make 0 of -0


def by_turn(rewards: Mapping[str, TurnRewards]) -> list[dict[str, float]]:
    """Rewards by name for each of the last turns: a list has one per turn, a number is the last's.

    There is at least one entry; an episode without turns has its rewards in it.
    """
    lists = [pay for pay in rewards.values() if isinstance(pay, Sequence)]
    turns: list[dict[str, float]] = [{} for _ in range(max([1, *map(len, lists)]))]
    for name, pay in rewards.items():
        for turn, reward in enumerate(reversed(pay if isinstance(pay, Sequence) else [pay])):
            turns[-1 - turn][name] = reward
    return turns


def load_functions(rewards: Sequence[Reward]) -> tuple[RewardFunction, ...]:
    """The functions that rewards name, each checked to take an episode; classes are instantiated.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    return tuple(
        load_function(reward, f"config.rewards[{number}]")
        for number, reward in enumerate(rewards)
        if reward.function is not None
    )


def load_function(reward: Reward, field: str) -> RewardFunction:
    """The function that a reward names; `field` is where, in errors. Raises: as above."""
    where, options = f"{field}.function", dict(reward.options)
    function = import_attribute(reward.function, where, "function or class", callable)
    close: Callable[[], None] = _nothing_to_close
    if inspect.isclass(function):
        _check_call(function, (), options, f"{where}: {reward.function}", f"{field}.options")
        function, options = _make(function, options, f"{where}: {reward.function}"), {}
        close_method = getattr(function, "close", None)
        close = close_method if callable(close_method) else close
    _check_call(function, (_EPISODE,), options, f"{where}: {reward.function}", f"{field}.options")
    call = functools.partial(function, **options)
    return RewardFunction(reward.label, call, reward.concurrency, reward.timeout_s, close)


def _nothing_to_close() -> None:
    pass


def _make(cls: type, options: Mapping[str, Any], where: str) -> Callable[..., Any]:
    try:
        made = cls(**options)
    except (Exception, SystemExit) as error:
        message = text_of(error) if isinstance(error, ValueError) else describe(error)
        message = f"{message.rstrip('.')} {origin(error)}".rstrip()
        raise ValueError(f"{where}: {message}.") from error
    if not callable(made):
        raise ValueError(f"{where}: got a class without __call__(episode); allowed: one with it.")
    return made


def _check_call(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    where: str,
    keywords: str,
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not all that is written in C has one
        return
    try:
        check_arguments(signature, arguments, options)
    except TypeError as error:
        takes = "the finished episode and " if arguments else ""
        raise ValueError(
            f"{where}{signature} cannot be called ({error}); allowed: what takes {takes}the"
            f" keywords of {keywords}."
        ) from None
