"""Validates what an environment returns in an episode, local or remote, before it is used.

A fault raises `ProtocolError`, which ends that episode only: one sentence with the method, what was
got and what is allowed. `seeupo_jax.envs.tasks` validates what is independent of episodes.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

import numpy as np

from seeupo_jax.configuration.user_code import NAMES, encodes, is_name, shown, text_of
from seeupo_jax.envs.base import (
    Demonstrator,
    Environment,
    Message,
    StepResult,
    Tool,
)
from seeupo_jax.envs.null_fields import normal_tools
from seeupo_jax.envs.plain_values import TooManyValues, plain

ROLES = ("system", "user", "assistant", "tool")
OWN_REWARD = "env"  # the name of `StepResult.reward` among the rewards by name
# Lists of `info` that training reads, by name: the type of an entry; there is one per step so far.
_STEP_LISTS = {
    "states": (str, "texts"),  # the environment's names for its states
    "executed": (bool, "booleans"),  # whether the step's action could be executed
}
_AGENT_NAMES = ("lineages", "refused_calls", "ignored_sampling", "agent_failure")
TRAINER_NAMES = (
    *_AGENT_NAMES,
    "reward_failure",
    "fork_failure",
)  # `info` entries that the trainer writes and metrics read
_FIELDS = ("observation", "reward", "done", "info")
_MOST_REWARDS = 64  # names per step
_SHOWN = 60  # characters of an invalid value that an error shows
_LONGEST = 2000  # characters of an error that are kept
_ROUNDING = 1e-6  # a sum of shares may round to just above or below 1


class ProtocolError(Exception):
    """An environment returned a value that its interface does not allow."""


class RemoteEnvironmentError(Exception):
    """An environment failed in another process; the text begins with the error's class."""


def reset_episode(
    environment: Environment, task_id: str, seed: int, episode_seed: int | None
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Calls `reset`, with the keyword `episode_seed` if the environment declares it."""
    if episode_seed is None or not _takes_episode_seed(environment):
        return environment.reset(task_id, seed)
    return environment.reset(task_id, seed, episode_seed=episode_seed)


def _takes_episode_seed(environment: Environment) -> bool:
    """Whether `reset` declares the keyword; `**kwargs` does not count.

    A wrapper might pass its keywords to an environment that rejects this one.
    """
    try:
        named = inspect.signature(environment.reset).parameters.get("episode_seed")
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return named is not None and named.kind in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY)


def check_reset(answer: Any) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Validates what `reset` returned; returns its messages and its tools."""
    if not isinstance(answer, list | tuple) or len(answer) != 2:
        raise refusal("reset()", answer, "a pair: messages and tools")
    messages, tools = answer
    return _messages(messages, "reset() messages"), _tools(tools)


def first_role(environment: Any, roles: Collection[str] | None = None) -> str:
    """The role that acts first in the episode that was just reset; `roles`: as of `check_role`."""
    return check_role(getattr(environment, "role", ""), "the attribute role", roles)


def check_role(value: Any, where: str, roles: Collection[str] | None = None) -> str:
    """Validates the name of a role; `roles`: those that there are beside `""`; None: any."""
    if value == "" or (is_name(value) and (roles is None or value in roles)):
        return value
    names = NAMES if roles is None else ", ".join(roles) or "it alone without config.roles"
    raise refusal(where, value, f'"", or a name of config.roles: {names}')


def check_step(
    answer: Any,
    *,
    turn: int | None = None,
    max_reward: float = math.inf,
    roles: Collection[str] | None = None,
) -> StepResult:
    """Validates what `step` returned; its rewards become floats, its `info` plain JSON values.

    Args:
      turn: the step's index in the episode, from 0; None: unknown.
      max_reward: the largest magnitude of each of a step's rewards.
      roles: as of `check_role`.
    """
    if not all(hasattr(answer, name) for name in _FIELDS):
        raise refusal("step()", answer, f"a StepResult({', '.join(_FIELDS)})")
    steps = None if turn is None else turn + 1
    observation = _messages(answer.observation, "step() observation")
    reward = check_reward(answer.reward, "step() reward", max_reward=max_reward)
    given, where = getattr(answer, "rewards", {}), "step() rewards"
    named = check_named_rewards(given, where, turns=steps, max_reward=max_reward)
    done = answer.done
    if not isinstance(done, bool | np.bool_ | int) or done not in (0, 1):
        raise refusal("step() done", done, "True or False")
    info = check_info(answer.info, "step() info", steps)
    role = check_role(getattr(answer, "role", ""), "step() role", roles)
    given, where = getattr(answer, "role_rewards", {}), "step() role_rewards"
    of_roles = check_role_rewards(given, where, max_reward=max_reward, roles=roles)
    return StepResult(observation, reward, bool(done), info, named, role, of_roles)


def check_role_rewards(
    value: Any,
    where: str,
    *,
    max_reward: float = math.inf,
    roles: Collection[str] | None = None,
    earned: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Validates rewards by role; see `check_reward` and `check_role`.

    Args:
      earned: the sums of each role's before these; None: 0.
    """
    earned = {} if earned is None else earned
    if not isinstance(value, Mapping):
        raise refusal(where, value, "a dict of numbers by role")
    return {
        check_role(role, where, roles): check_reward(
            each, f"{where}[{role!r}]", max_reward=max_reward, earned=earned.get(role, 0.0)
        )
        for role, each in value.items()
    }


def check_reward(
    value: Any, where: str, *, max_reward: float = math.inf, earned: float = 0.0
) -> float:
    """Validates a reward; `where` names it in the error.

    Args:
      max_reward: the largest magnitude of the reward, and of the episode's sum.
      earned: the episode's sum before this reward.
    """
    bound = "" if max_reward == math.inf else f" of magnitude at most {max_reward:g}"
    bound += " (config.env.max_reward), alone and in an episode's sum" if bound else ""
    reward = as_number(value)
    if reward is None or not math.isfinite(reward) or abs(reward) > max_reward:
        raise refusal(where, value, f"a finite number{bound}")
    if abs(earned + reward) > max_reward:
        got = f"{reward:g} after {earned:g}"
        raise ProtocolError(f"{where}: got {got}; allowed: a finite number{bound}.")
    return reward


def check_turn_rewards(
    value: Any, where: str, *, turns: int | None, max_reward: float = math.inf
) -> float | tuple[float, ...]:
    """Validates a reward, or a list with one reward per turn; see `check_reward`.

    Args:
      turns: number of turns so far; None: unknown.
    """
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return check_reward(value, where, max_reward=max_reward)
    if turns is not None and len(value) != turns:
        allowed = f"a number, or a list of {turns}, one for each turn so far"
        raise ProtocolError(f"{where}: got a list of {len(value)}; allowed: {allowed}.")
    return tuple(
        check_reward(each, f"{where}[{turn}]", max_reward=max_reward)
        for turn, each in enumerate(value)
    )


def check_named_rewards(
    value: Any, where: str, *, turns: int | None = None, max_reward: float = math.inf
) -> dict[str, float | tuple[float, ...]]:
    """Validates rewards by name; see `check_turn_rewards`."""
    if not isinstance(value, Mapping) or len(value) > _MOST_REWARDS:
        raise refusal(where, value, f"a dict of at most {_MOST_REWARDS} numbers by name")
    for name in value:
        if not is_name(name) or name == OWN_REWARD:
            raise refusal(where, name, f"{NAMES}, but not {OWN_REWARD!r}", "the name ")
    return {
        name: check_turn_rewards(each, f"{where}[{name!r}]", turns=turns, max_reward=max_reward)
        for name, each in value.items()
    }


def has_finish(environment: Environment) -> bool:
    """Whether an environment has `finish`, which is called when the trainer ends an episode."""
    return callable(getattr(environment, "finish", None))


def has_demonstrations(environment: Any) -> TypeGuard[Demonstrator]:
    """Whether an environment has `demonstrations` and `vocabulary`, also by `__getattr__`."""
    # Not by isinstance, which ignores __getattr__ since Python 3.12.
    return all(callable(getattr(environment, n, None)) for n in ("demonstrations", "vocabulary"))


def check_finish(value: Any, *, max_reward: float = math.inf) -> float:
    """Validates what `finish` returned: a last reward, or None for 0; see `check_reward`."""
    if value is None:
        return 0.0
    return check_reward(value, "finish()", max_reward=max_reward)


def check_score(value: Any, where: str = "score()") -> float:
    """Validates what `score` returned; a score within the rounding error of 1 becomes 1."""
    score = as_number(value)
    if score is None or not -_ROUNDING <= score <= 1 + _ROUNDING:
        raise refusal(where, value, "a number from 0 to 1")
    return 1.0 if score >= 1 - _ROUNDING else max(score, 0.0)


def describe(error: BaseException) -> str:
    """Returns an error's class and text, bounded; for a `ProtocolError` only the text."""
    complete = type(error) in (ProtocolError, RemoteEnvironmentError)
    kind = "" if complete else f"{type(error).__name__}: "
    return f"{kind}{text_of(error)}"[:_LONGEST]


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    allowed = "a tuple or a list of messages, dicts with role and content"
    if not isinstance(value, list | tuple):
        raise refusal(where, value, allowed)
    for message in value:
        if not isinstance(message, Mapping):
            raise refusal(where, message, allowed, "a message ")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise refusal(where, role, ", ".join(ROLES), "a role ")
        if not isinstance(content, str) or not encodes(content):
            raise refusal(where, content, "a text that UTF-8 can encode", "a content ")
    return tuple(_plain(message, where) for message in value)


def _tools(value: Any) -> tuple[Tool, ...]:
    where = "reset() tools"
    allowed = "a tuple or a list of dicts with texts name and description, JSON schema parameters"
    if not isinstance(value, list | tuple):
        raise refusal(where, value, allowed)
    for tool in value:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise refusal(where, tool, allowed, "a tool ")
        described = isinstance(tool.get("description", ""), str)
        if not described or not isinstance(tool.get("parameters", {}), dict):
            raise refusal(where, tool, allowed, "a tool ")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        sentence = f"{where}: got no JSON ({text_of(error)}); allowed: {allowed}."
        raise ProtocolError(sentence) from None
    return normal_tools(value)


def check_info(value: Any, where: str, steps: int | None = None) -> dict[str, Any]:
    """Validates `info` and returns it as plain JSON values.

    Args:
      steps: number of steps so far; None: unknown.
    """
    if not isinstance(value, Mapping):
        raise refusal(where, value, "a dict")
    info = _plain(value, where)
    taken = [name for name in TRAINER_NAMES if name in info]
    if taken:
        got = f"the name {taken[0]!r}, which the trainer uses"
        raise ProtocolError(f"{where}: got {got}; allowed: another.")
    if steps is not None:
        check_step_lists(info, where, steps)
    return info


def check_step_lists(info: Mapping[str, Any], where: str, steps: int) -> None:
    """Checks the lists of `info` that training reads: one entry per step so far.

    Raises:
      ProtocolError: one of them is no such list.
    """
    for name, (kind, words) in _STEP_LISTS.items():
        if name not in info:
            continue
        given = info[name]
        listed = isinstance(given, list) and all(isinstance(one, kind) for one in given)
        if not listed or len(given) != steps:
            allowed = f"a list of {steps} {words}, one for each step so far"
            raise refusal(f'{where}["{name}"]', given, allowed)


def _plain(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    try:
        return plain(value)
    except TooManyValues as error:
        raise ProtocolError(f"{where}: got {error}") from None


def as_number(value: Any) -> float | None:
    """Converts a scalar of any library to a float; None: it is not a scalar."""
    text = isinstance(value, str | bytes)
    if text or not hasattr(type(value), "__float__") or getattr(value, "shape", ()) != ():
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def refusal(where: str, got: Any, allowed: str, what: str = "") -> ProtocolError:
    """Makes the error for an invalid value; `what` says which part of it `got` is."""
    kind = "" if got is None else f" ({type(got).__name__})"
    return ProtocolError(f"{where}: got {what}{shown(got, _SHOWN)}{kind}; allowed: {allowed}.")
