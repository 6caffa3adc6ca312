"""Validates the result of an agent, as `envs.validation` does for environments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from seeupo_jax.agents.calls import AgentResult
from seeupo_jax.envs.validation import (
    ProtocolError,
    check_info,
    check_named_rewards,
    check_reward,
    check_role_rewards,
    check_score,
)

_FIELDS = tuple(field.name for field in dataclasses.fields(AgentResult))
_WHERE = "the agent's result:"
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # tolerances of the sum of turn_rewards


def check_result(answer: Any, *, max_reward: float = math.inf) -> AgentResult:
    """Validates what an agent returned or wrote to its file: a number, or AgentResult's fields.

    Args:
      max_reward: the largest magnitude of each of its rewards.

    Raises:
      ProtocolError: it is invalid; one sentence with what was got and what is allowed.
    """
    if isinstance(answer, Mapping):
        answer = _of_fields(answer)
    if not isinstance(answer, AgentResult):
        answer = AgentResult(answer)
    reward = check_reward(answer.reward, f"{_WHERE} reward", max_reward=max_reward)
    score = min(max(reward, 0.0), 1.0) if answer.score is None else answer.score
    score = check_score(score, f"{_WHERE} score")
    where = f"{_WHERE} rewards"
    rewards = check_named_rewards(answer.rewards, where, max_reward=max_reward)
    turn_rewards = _check_turns(answer.turn_rewards, reward, max_reward)
    info = check_info(answer.info, f"{_WHERE} info")
    where = f"{_WHERE} role_rewards"
    of_roles = check_role_rewards(answer.role_rewards, where, max_reward=max_reward)
    return AgentResult(reward, score, rewards, turn_rewards, info, of_roles)


def _of_fields(fields: Mapping[Any, Any]) -> AgentResult:
    unknown = [str(name) for name in fields if name not in _FIELDS]
    if unknown or "reward" not in fields:
        got = f"the field {unknown[0]}" if unknown else "no reward"
        raise ProtocolError(f"{_WHERE} got {got}; allowed: reward, and {', '.join(_FIELDS[1:])}.")
    return AgentResult(**fields)


def _check_turns(value: Any, reward: float, max_reward: float) -> tuple[float, ...]:
    where = f"{_WHERE} turn_rewards"
    if not isinstance(value, list | tuple):
        raise ProtocolError(
            f"{where}: got {_kind(value)}; allowed: a list of numbers, one per turn."
        )
    turns = tuple(
        check_reward(each, f"{where}[{turn}]", max_reward=max_reward)
        for turn, each in enumerate(value)
    )
    try:
        total = math.fsum(turns)
    except OverflowError:  # each number is within the range, but not their sum
        total = math.inf
    if turns and not math.isclose(total, reward, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
        raise ProtocolError(
            f"{where}: got a sum of {total:g}; allowed: the reward, {reward:g}, as their sum."
        )
    return turns


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"a{'n' * (name[:1] in 'aeiou')} {name}"
