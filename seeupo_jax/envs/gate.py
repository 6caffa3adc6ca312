"""Checks of all that an environment returns, local or remote, before it is used.

A fault of an episode raises `ProtocolError`, which costs that episode; a fault of the class (its
tasks, its labels) raises `ValueError`. Either is one sentence: method, got, allowed.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard, cast

import numpy as np

from seeupo_jax.configuration.user_code import NAMES, encodes, is_name, shown, text_of
from seeupo_jax.envs.base import (
    TURNS,
    Demonstrator,
    Environment,
    Labelled,
    Message,
    Referenced,
    Shared,
    StepResult,
    Tasks,
    TaskShare,
    Tool,
)
from seeupo_jax.envs.plain_values import TooMany, plain
from seeupo_jax.envs.tools.null_fields import drop_from_tools

ROLES = ("system", "user", "assistant", "tool")
OWN_REWARD = "env"  # what `StepResult.reward` is called among the rewards by name
# Lists of `info` that training reads, by name: the type of what they hold of each step so far.
_OF_STEPS = {
    "states": (str, "texts"),  # the environment's own names of its states
    "executed": (bool, "booleans"),  # whether it could execute the step's action
}
_OF_AGENTS = ("lineages", "refused_calls", "ignored_sampling", "agent_failure")
TRAINER_NAMES = (*_OF_AGENTS, "reward_failure", "fork_failure")  # read by metrics
_FIELDS = ("observation", "reward", "done", "info")
_MOST_REWARDS = 64  # by name, of a step
_SHOWN = 60  # characters of a refused value
_LONGEST = 2000  # characters of an error's text
_ROUNDING = 1e-6  # a score that is a sum of shares may come out above 1, or just below


class ProtocolError(Exception):
    """An environment returned what its protocol does not allow."""


class ErrorElsewhere(Exception):
    """An error of an environment in another process; its text begins with the error's class."""


def reset(
    environment: Environment, task_id: str, seed: int, episode_seed: int | None
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Calls `reset`, with the episode's own seed where the environment names such a keyword."""
    if episode_seed is None or not _takes_episode_seed(environment):
        return environment.reset(task_id, seed)
    return environment.reset(task_id, seed, episode_seed=episode_seed)


def _takes_episode_seed(environment: Environment) -> bool:
    """`**kwargs` does not count: a wrapper might pass it on to an environment that rejects it."""
    try:
        named = inspect.signature(environment.reset).parameters.get("episode_seed")
    except (TypeError, ValueError):  # not all that is written in C has a signature
        return False
    return named is not None and named.kind in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY)


def check_opening(answer: Any) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """What `reset` returned: its messages and its tools."""
    if not isinstance(answer, list | tuple) or len(answer) != 2:
        raise _refuse("reset()", answer, "a pair: messages and tools")
    messages, tools = answer
    return _messages(messages, "reset() messages"), _tools(tools)


def check_step(answer: Any, *, turn: int | None = None, max_reward: float = math.inf) -> StepResult:
    """What `step` returned, with float rewards and an `info` that JSON can hold.

    Args:
      turn: of the episode, from 0; None: unknown.
      max_reward: the largest magnitude of each of a step's rewards.
    """
    if not all(hasattr(answer, name) for name in _FIELDS):
        raise _refuse("step()", answer, f"a StepResult({', '.join(_FIELDS)})")
    steps = None if turn is None else turn + 1
    observation = _messages(answer.observation, "step() observation")
    reward = check_reward(answer.reward, "step() reward", max_reward=max_reward)
    given, where = getattr(answer, "rewards", {}), "step() rewards"
    named = check_named_rewards(given, where, turns=steps, max_reward=max_reward)
    done = answer.done
    if not isinstance(done, bool | np.bool_ | int) or done not in (0, 1):
        raise _refuse("step() done", done, "True or False")
    info = check_info(answer.info, "step() info", steps)
    return StepResult(observation, reward, bool(done), info, named)


def check_reward(
    value: Any, where: str, *, max_reward: float = math.inf, earned: float = 0.0
) -> float:
    """A reward in `where`.

    Args:
      max_reward: the largest magnitude of it, and of the episode's.
      earned: by the episode before.
    """
    bound = "" if max_reward == math.inf else f" of magnitude at most {max_reward:g}"
    bound += " (config.env.max_reward), alone and in an episode's sum" if bound else ""
    reward = _number(value)
    if reward is None or not math.isfinite(reward) or abs(reward) > max_reward:
        raise _refuse(where, value, f"a finite number{bound}")
    if abs(earned + reward) > max_reward:
        got = f"{reward:g} after {earned:g}"
        raise ProtocolError(f"{where}: got {got}; allowed: a finite number{bound}.")
    return reward


def check_pay(
    value: Any, where: str, *, turns: int | None, max_reward: float = math.inf
) -> float | tuple[float, ...]:
    """A reward in `where`, or a list of rewards, one for each turn; see `check_reward`.

    Args:
      turns: of the episode so far; None: unknown.
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
    """Rewards by name in `where`; see `check_pay`."""
    if not isinstance(value, Mapping) or len(value) > _MOST_REWARDS:
        raise _refuse(where, value, f"a dict of at most {_MOST_REWARDS} numbers by name")
    for name in value:
        if not is_name(name) or name == OWN_REWARD:
            raise _refuse(where, name, f"{NAMES}, but not {OWN_REWARD!r}", "the name ")
    return {
        name: check_pay(each, f"{where}[{name!r}]", turns=turns, max_reward=max_reward)
        for name, each in value.items()
    }


def has_finish(environment: Environment) -> bool:
    """Whether an environment has `finish`, for episodes that the trainer ends."""
    return callable(getattr(environment, "finish", None))


def has_demonstrations(environment: Any) -> TypeGuard[Demonstrator]:
    """Whether an environment has `demonstrations` and `vocabulary`, itself or by what it wraps."""
    # Not by isinstance, which since Python 3.12 asks no __getattr__.
    return all(callable(getattr(environment, n, None)) for n in ("demonstrations", "vocabulary"))


def check_last_reward(value: Any, *, max_reward: float = math.inf) -> float:
    """What `finish` returned: a last reward, or None for 0; see `check_reward`."""
    if value is None:
        return 0.0
    return check_reward(value, "finish()", max_reward=max_reward)


def check_score(value: Any, where: str = "score()") -> float:
    """What `score` returned; what rounding takes from a sum of shares that is 1 is given back."""
    score = _number(value)
    if score is None or not -_ROUNDING <= score <= 1 + _ROUNDING:
        raise _refuse(where, value, "a number from 0 to 1")
    return 1.0 if score >= 1 - _ROUNDING else max(score, 0.0)


def task_ids(environment: Tasks, split: str) -> list[str]:
    """The tasks of a split.

    Raises:
      ValueError: one sentence: no such split, no tasks, or what is no list of texts.
    """
    where = f"{type(environment).__name__}.task_ids({split!r})"
    returned = _ask(where, lambda: environment.task_ids(split))
    listed = hasattr(returned, "__len__") and hasattr(returned, "__getitem__")
    if not listed or isinstance(returned, str | bytes | Mapping):
        raise ValueError(str(_refuse(where, returned, "a list of texts")))
    tasks = _ask(where, lambda: list(returned))
    if not tasks:
        raise ValueError(f"{where}: got no task; allowed: at least one.")
    texts = [task for task in tasks if isinstance(task, str)]
    if len(texts) < len(tasks) or not encodes("".join(texts)):
        wrong = next(task for task in tasks if not isinstance(task, str) or not encodes(task))
        raise ValueError(str(_refuse(where, wrong, "a list of texts", "a task ")))
    return [str(task) for task in tasks]


def task_shares(environment: Tasks, split: str) -> list[TaskShare]:
    """The parts of a split's tasks with their weights; one of all where it has none.

    Raises:
      ValueError: one sentence: as `task_ids`, or parts that are not the split's tasks.
    """
    every = task_ids(environment, split)
    if not callable(getattr(environment, "task_shares", None)):
        return [TaskShare("", 1.0, every)]
    where = f"{type(environment).__name__}.task_shares({split!r})"
    returned = _ask(where, lambda: cast(Shared, environment).task_shares(split))
    shares = isinstance(returned, list | tuple) and all(isinstance(s, TaskShare) for s in returned)
    if not shares:
        raise ValueError(str(_refuse(where, returned, "a list of TaskShare")))
    if sorted(task for share in returned for task in share.task_ids) != sorted(every):
        raise ValueError(f"{where}: got other tasks than task_ids({split!r}); allowed: the same.")
    for share in returned:
        weight = _number(share.weight)
        if not share.task_ids or weight is None or not 0 < weight < math.inf:
            got = f"{share.name!r} with {len(share.task_ids)} tasks and weight {share.weight!r}"
            raise ValueError(f"{where}: got {got}; allowed: at least one task, a weight > 0.")
    return list(returned)


def labels(environment: Tasks, task_id: str) -> dict[str, str]:
    """A task's labels; empty where the environment has none.

    Raises:
      ValueError: one sentence: `labels` raised, or returned no texts by name, or one that is named
        as the number of turns is in metrics.
    """
    if not callable(getattr(environment, "labels", None)):
        return {}
    where = f"{type(environment).__name__}.labels({task_id!r})"
    returned = _ask(where, lambda: cast(Labelled, environment).labels(task_id))
    if not isinstance(returned, Mapping):
        raise ValueError(str(_refuse(where, returned, "a dict of texts")))
    for label, value in returned.items():
        if not all(isinstance(text, str) and encodes(text) for text in (label, value)):
            raise ValueError(str(_refuse(where, dict(returned), "a dict of texts")))
        if label.partition("=")[0] == TURNS:
            allowed = f"any name but {TURNS}, the number of turns that metrics count"
            raise ValueError(f"{where}: got the label {label!r}; allowed: {allowed}.")
    return dict(returned)


def reference(environment: Tasks, task_id: str) -> str | None:
    """A task's reference answer; None where it, or the environment, has none.

    Raises:
      ValueError: one sentence: `reference` raised, or returned no text.
    """
    if not callable(getattr(environment, "reference", None)):
        return None
    where = f"{type(environment).__name__}.reference({task_id!r})"
    returned = _ask(where, lambda: cast(Referenced, environment).reference(task_id))
    if returned is not None and not (isinstance(returned, str) and returned and encodes(returned)):
        raise ValueError(str(_refuse(where, returned, "a text that is not empty, or None")))
    return returned


def labels_of(
    environment: Tasks, tasks: Collection[str], warn: Callable[[str], None]
) -> dict[str, dict[str, str]]:
    """The labels of several tasks; one whose labels fail has none, and `warn` gets a sentence."""
    by_task, wrong = {}, []
    for task_id in tasks:
        try:
            by_task[task_id] = labels(environment, task_id)
        except ValueError as error:
            by_task[task_id] = {}
            wrong.append(str(error))
    if wrong:
        warn(f"{len(wrong)} of {len(tasks)} tasks have no labels: {wrong[0]}")
    return by_task


def check_tasks(environment: Tasks, splits: Sequence[str], *, labelled: int) -> None:
    """Whether all splits have tasks, and the first `labelled` of each split their labels.

    Raises:
      ValueError: as `task_ids` and `labels`.
    """
    for split in dict.fromkeys(splits):
        for task_id in task_ids(environment, split)[:labelled]:
            labels(environment, task_id)


def describe(error: BaseException) -> str:
    """An error's class and text, whatever its class does; of a `ProtocolError` its sentence."""
    complete = type(error) in (ProtocolError, ErrorElsewhere)
    kind = "" if complete else f"{type(error).__name__}: "
    return f"{kind}{text_of(error)}"[:_LONGEST]


def _ask(where: str, question: Callable[[], Any]) -> Any:
    """The class's answer; an error becomes a sentence with the call, or a ValueError's of ours."""
    try:
        return question()
    except (Exception, SystemExit) as error:
        text, call = text_of(error), where[where.index(".") : where.index("(") + 1]
        complete = isinstance(error, ValueError) and ("; allowed: " in text or call in text)
        sentence = text if complete else f"{where} raised {describe(error).rstrip('.')}."
        raise ValueError(sentence) from error


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    allowed = "a tuple or a list of messages, dicts with role and content"
    if not isinstance(value, list | tuple):
        raise _refuse(where, value, allowed)
    for message in value:
        if not isinstance(message, Mapping):
            raise _refuse(where, message, allowed, "a message ")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise _refuse(where, role, ", ".join(ROLES), "a role ")
        if not isinstance(content, str) or not encodes(content):
            raise _refuse(where, content, "a text that UTF-8 can encode", "a content ")
    return tuple(_plain(message, where) for message in value)


def _tools(value: Any) -> tuple[Tool, ...]:
    where = "reset() tools"
    allowed = "a tuple or a list of dicts with texts name and description, JSON schema parameters"
    if not isinstance(value, list | tuple):
        raise _refuse(where, value, allowed)
    for tool in value:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise _refuse(where, tool, allowed, "a tool ")
        described = isinstance(tool.get("description", ""), str)
        if not described or not isinstance(tool.get("parameters", {}), dict):
            raise _refuse(where, tool, allowed, "a tool ")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        sentence = f"{where}: got no JSON ({text_of(error)}); allowed: {allowed}."
        raise ProtocolError(sentence) from None
    return drop_from_tools(value)


def check_info(value: Any, where: str, steps: int | None = None) -> dict[str, Any]:
    """`info` as `plain` leaves it; `steps`: so far, None: unknown."""
    if not isinstance(value, Mapping):
        raise _refuse(where, value, "a dict")
    info = _plain(value, where)
    taken = [name for name in TRAINER_NAMES if name in info]
    if taken:
        got = f"the name {taken[0]!r}, which the trainer uses"
        raise ProtocolError(f"{where}: got {got}; allowed: another.")
    if steps is not None:
        check_of_steps(info, where, steps)
    return info


def check_of_steps(info: Mapping[str, Any], where: str, steps: int) -> None:
    """Checks the lists of `info` that training reads, as `plain` leaves them.

    Raises:
      ProtocolError: another number than that of the steps so far, or something else.
    """
    for name, (kind, words) in _OF_STEPS.items():
        if name not in info:
            continue
        given = info[name]
        listed = isinstance(given, list) and all(isinstance(one, kind) for one in given)
        if not listed or len(given) != steps:
            allowed = f"a list of {steps} {words}, one for each step so far"
            raise _refuse(f'{where}["{name}"]', given, allowed)


def _plain(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    try:
        return plain(value)
    except TooMany as error:
        raise ProtocolError(f"{where}: got {error}") from None


def _number(value: Any) -> float | None:
    """A scalar of any library as a float; None: not a scalar."""
    text = isinstance(value, str | bytes)
    if text or not hasattr(type(value), "__float__") or getattr(value, "shape", ()) != ():
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _refuse(where: str, got: Any, allowed: str, what: str = "") -> ProtocolError:
    kind = "" if got is None else f" ({type(got).__name__})"
    return ProtocolError(f"{where}: got {what}{shown(got, _SHOWN)}{kind}; allowed: {allowed}.")
