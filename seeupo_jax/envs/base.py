"""The interface of environments: text in, text out, one episode at a time, without jax."""

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

# Tags that parsers of a model's text read. A tokenizer may have one as a control token: decoders
# drop control tokens and no text may forge them, but sampled text keeps these.
CALL, CALL_END = "<tool_call>", "</tool_call>"  # of Hermes, Qwen and GLM
THOUGHT, THOUGHT_END = "<think>", "</think>"
THOUGHT_TAGS = ((THOUGHT, THOUGHT_END), ("[THINK]", "[/THINK]"))  # the second pair: Magistral's
PYTHON_TAG = "<|python_tag|>"  # of Llama 3: calls follow
MISTRAL_TAGS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
DEEPSEEK_TAGS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
KIMI_TAGS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
)
GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# Of gpt-oss, where they are tags only in a tokenizer that has them all: other models end messages
# with such names.
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
# Kept in the text of every action; Llama's tag only where calls are read in Llama's form.
TEXT_TAGS = (
    *(CALL, CALL_END, *THOUGHT_TAGS[0], *THOUGHT_TAGS[1]),
    *(*MISTRAL_TAGS, *DEEPSEEK_TAGS, *KIMI_TAGS, *GLM_TAGS, *HARMONY_TAGS),
)
TAGS = (*TEXT_TAGS, PYTHON_TAG)

# A reward for one step or turn, or one number for each step or turn of the episode so far.
TurnRewards = float | Sequence[float]

ENVIRONMENT = "env"  # the label that names a task's environment in a `mixture`
TURNS = "turns"  # the number of turns in names of metrics, which also hold labels


class EnvironmentUnavailable(ValueError):
    """This machine lacks what an environment needs: files, a benchmark, a server's program."""


def read_options(text: str) -> dict[str, Any]:
    """Parses the value of a command's `--options`.

    Raises:
      ValueError: it is no JSON object.
    """
    options: dict[str, Any] | None = None
    with contextlib.suppress(ValueError, RecursionError):
        options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError(f"--options: got {text!r}; allowed: a JSON object.")
    return options


def check_choice(option: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises ValueError if an environment's option is none of the allowed names."""
    if value not in allowed:
        raise ValueError(f"{option}: got {value!r}; allowed: {', '.join(allowed)}.")


@dataclass(frozen=True)
class StepResult:
    """The outcome of one action.

    observation: the messages that answer the action; empty if the episode ends without an answer.
    reward: this step's share of the episode's reward.
    done: the episode is over; no further action is accepted.
    info: counters and labels of the episode so far, for logs; nothing in it reaches the policy.
      The entry `states`, a list of texts, names the state before each step so far, for
      advantages per turn (`trajectories.states`); `executed`, a list of booleans, records for each
      step so far whether its action could be executed (`trajectories.states`).
    rewards: further shares of the episode's reward, by name; `config.rewards` weighs each, by
      default with 1, and each is logged. A number is a reward of this step; a list, with a number
      for each step so far, adds to their rewards, for what a later step decides about earlier ones.
    role: who acts next, and reads `observation`; the first to act is the environment's attribute
      `role`, if it has one. "": the only one. `config.roles` names the others.
    role_rewards: what single roles earn beside `reward` and `rewards`, which all roles share.
    """

    observation: tuple[Message, ...]
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    rewards: Mapping[str, TurnRewards] = field(default_factory=dict[str, TurnRewards])
    role: str = ""
    role_rewards: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Demonstration:
    """A finished conversation to imitate; its assistant messages are the actions."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


class TransientError(Exception):
    """Raised by `Environment.step`: the action had no effect, and the same call may be repeated.

    Examples are a refused connection and a server that is still busy. The trainer waits, repeats
    the call on the same object up to `config.env.retries` times, and the episode continues.
    """


class ServerAtCapacity(TransientError):
    """A server has no room for another episode or connection; waiting for room uses no retry."""


class Tasks(Protocol):
    """A source of tasks: an environment, or the tasks of an agent."""

    def task_ids(self, split: str) -> Sequence[str]:
        """The tasks of a split, as in `Environment.task_ids`."""
        ...


class Environment(Protocol):
    """A simulated world that a policy acts on by writing messages.

    One object plays one episode at a time; objects share no mutable state, so that many of them run
    in threads. A method that raises ends the episode with `stop='env_error'`, with two exceptions:
    a `reset` that fails is retried on a new object, and a `step` that raises `TransientError` is
    retried on the same one.
    """

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of `train`, `test` or, if there are any, `validation`.

        Raises ValueError for a split that it does not have. Checkpoints are selected on
        `validation` tasks, which are neither training nor test tasks.
        """
        ...

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode; returns its first messages and its tools.

        An environment whose transitions are random also takes the keyword `episode_seed`, an int
        from 0 to 2**31 - 1: random events after the first messages derive from it; the first
        messages do not.
        """
        ...

    def step(self, text: str) -> StepResult:
        """Executes one whole model response, given without its end token."""
        ...

    def score(self) -> float:
        """The episode's result so far in [0, 1]; 1 is success."""
        ...

    def close(self) -> None:
        """Frees what the episode holds."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that also has demonstrations of its tasks (for `warm_start`)."""

    def demonstrations(self, split: str, **options: Any) -> Sequence[Demonstration]:
        """Returns finished conversations of a split, with random access and in a fixed order."""
        ...

    def vocabulary(self) -> Sequence[str]:
        """Returns words that a tokenizer made for this environment keeps as one token each."""
        ...


@runtime_checkable
class Referenced(Protocol):
    """An environment with reference answers to its tasks (for the information gain of turns)."""

    def reference(self, task_id: str) -> str | None:
        """Returns a task's reference answer: the closing message, or its content; None: no answer.

        It never reaches the policy: its probability after the conversation is computed.
        """
        ...


@runtime_checkable
class Listed(Protocol):
    """An environment whose episodes can all be listed (for `evaluation.exact`).

    Its observations follow from the task and the actions; only rewards may be random.
    """

    def action_texts(self) -> Sequence[str]:
        """Returns the texts that act, in every turn; any other text ends the episode."""
        ...

    def expected_reward(self, task_id: str, actions: Sequence[str]) -> float:
        """Returns the mean reward of an episode of these actions.

        Where more were to come, it is that of an episode which another text then ended.
        """
        ...


@runtime_checkable
class Labelled(Protocol):
    """An environment that labels its tasks (for statistics by label)."""

    def labels(self, task_id: str) -> Mapping[str, str]:
        """Returns a task's labels by name, such as {"category": "refunds", "steps": "3"}."""
        ...


class Killable(abc.ABC):
    """An environment of the package whose running call another thread can end."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends the running call and every later one except `close`; any thread may call it."""


@dataclass(frozen=True)
class TaskShare:
    """A part of a split's tasks. weight: its share of training, relative to the other parts."""

    name: str
    weight: float
    task_ids: Sequence[str]


@runtime_checkable
class HasTaskShares(Protocol):
    """An environment whose tasks form weighted parts, from which training draws by weight."""

    def task_shares(self, split: str) -> Sequence[TaskShare]:
        """Returns the parts; each task of the split is in exactly one of them."""
        ...
