"""The interface of environments: text in, text out, one episode at a time, no jax."""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

# A chat message, {"role": "system" | "user" | "assistant" | "tool", "content": str}.
Message = dict[str, str]

# A tool in the JSON-schema form of the OpenAI and Qwen chat templates:
# {"name": str, "description": str, "parameters": {"type": "object", "properties": {...}}}.
Tool = dict[str, Any]

# Tags that parsers of a model's text read. A tokenizer may have one as a control token, which
# decoders leave out of texts, and which no text may forge: what the model samples keeps these.
CALL, CALL_END = "<tool_call>", "</tool_call>"  # of Hermes and Qwen
THOUGHT, THOUGHT_END = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"  # of Llama 3: calls follow
# In the text of every action; Llama's only where its form of calls is read, which alone knows it.
TEXT_TAGS = (CALL, CALL_END, THOUGHT, THOUGHT_END)
TAGS = (*TEXT_TAGS, PYTHON_TAG)

# A reward for one step or turn, or one number for each step or turn of the episode so far.
Pay = float | Sequence[float]

ENVIRONMENT = "env"  # the label of a task that says of which environment of a `mixture` it is
TURNS = "turns"  # the trajectory's number of turns in names of metrics, where labels stand too


class Missing(ValueError):
    """What an environment needs is not on this machine: files, a benchmark, a server's program."""


def read_options(text: str) -> dict[str, Any]:
    """An environment's options as a command takes them, `--options`.

    Raises:
      ValueError: no JSON object.
    """
    options: dict[str, Any] | None = None
    with contextlib.suppress(ValueError, RecursionError):
        options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError(f"--options: got {text!r}; allowed: a JSON object.")
    return options


def check_choice(option: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises ValueError where an environment's option is none of the allowed names."""
    if value not in allowed:
        raise ValueError(f"{option}: got {value!r}; allowed: {', '.join(allowed)}.")


@dataclass(frozen=True)
class StepResult:
    """The outcome of one action.

    observation: the messages that answer the action; empty when the episode ends without one.
    reward: this step's share of the episode's reward.
    done: no further action is accepted.
    info: counters and labels of the episode so far, for logs; nothing in it reaches the policy.
      The entry `states`, a list of texts, names the state before each step so far, for
      advantages per turn (`trajectories.states`); `executed`, a list of True and False, says of
      each step so far whether its action could be executed (`trajectories.states`).
    rewards: further shares of the episode's reward, by name; `config.rewards` weighs each, by
      default with 1, and each is logged. A number is paid for this step; a list, a number for each
      step so far, adds to what they were paid, for what a later step decides about earlier ones.
    """

    observation: tuple[Message, ...]
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    rewards: Mapping[str, Pay] = field(default_factory=dict[str, Pay])


@dataclass(frozen=True)
class Demonstration:
    """A finished conversation to imitate; its assistant messages are the actions."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


class TransientError(Exception):
    """Raised by `Environment.step`: the action had no effect, and the same call may be repeated.

    For a refused connection, say, or a server that is still busy. The trainer waits and repeats the
    call on the same object, up to `config.env.retries` times, and the episode continues.
    """


class ServerAtCapacity(TransientError):
    """A server has no room for another episode or connection; waiting for it is no retry."""


class Tasks(Protocol):
    """What names the tasks: an environment, or what an agent's come from."""

    def task_ids(self, split: str) -> Sequence[str]:
        """The tasks of a split, as in `Environment.task_ids`."""
        ...


class Environment(Protocol):
    """A simulated world that a policy acts on by writing messages.

    One object plays one episode at a time; objects share no mutable state, so that many of them run
    in threads. A method that raises ends the episode with `stop='env_error'`, with two exceptions:
    a `reset` that fails is tried again on a new object, and so is a `step` that raises
    `TransientError`, on the same one.
    """

    def task_ids(self, split: str) -> Sequence[str]:
        """Names of the tasks of `train`, `test` and, where there are any, `validation`.

        Raises ValueError on a split that it does not have. Checkpoints are selected on `validation`
        tasks, which are neither training nor test tasks.
        """
        ...

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode; returns its first messages and the tools that exist.

        An environment whose transitions are random also takes the keyword `episode_seed`, an int
        from 0 to 2**31 - 1 of the episode: what happens at random after the first messages derives
        from it, and these do not.
        """
        ...

    def step(self, text: str) -> StepResult:
        """Takes one whole model response, without its end token."""
        ...

    def score(self) -> float:
        """The episode's result so far in [0, 1]; 1 is success."""
        ...

    def close(self) -> None:
        """Frees what the episode holds."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can also show how its tasks are done (for `warm_start`)."""

    def demonstrations(self, split: str, **options: Any) -> Sequence[Demonstration]:
        """Finished conversations of a split, by random access and in a fixed order."""
        ...

    def vocabulary(self) -> Sequence[str]:
        """Words that a tokenizer made for this environment keeps whole."""
        ...


@runtime_checkable
class Referenced(Protocol):
    """An environment that knows how its tasks end well (for the information gain of turns)."""

    def reference(self, task_id: str) -> str | None:
        """A task's reference answer: the closing message, or what that is to contain; None: none.

        Nothing of it reaches the policy: it is scored behind the conversation.
        """
        ...


@runtime_checkable
class Labelled(Protocol):
    """An environment that says of what kind its tasks are (for statistics of each kind)."""

    def labels(self, task_id: str) -> Mapping[str, str]:
        """A task's kind in each respect, such as {"category": "refunds", "steps": "3"}."""
        ...


class Killable(abc.ABC):
    """An environment of the package that waits for what another thread can end."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends the call that runs and every later one but `close`; any thread may call it."""


@dataclass(frozen=True)
class TaskShare:
    """A part of a split's tasks. weight: how much of training is of it, relative to the others."""

    name: str
    weight: float
    task_ids: Sequence[str]


@runtime_checkable
class WeightedTasks(Protocol):
    """An environment whose tasks are in parts, which training draws from by their weights."""

    def task_shares(self, split: str) -> Sequence[TaskShare]:
        """The parts: together all tasks of the split, each in one of them."""
        ...
