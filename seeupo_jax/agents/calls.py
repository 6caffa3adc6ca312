"""The types that pass between an agent, its endpoint, and the sampler of its turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from seeupo_jax.envs.base import Tool, TurnRewards
from seeupo_jax.envs.pool import Failure
from seeupo_jax.envs.tool_calls import ToolCall


@dataclass(frozen=True)
class HistoryMessage:
    """A message of a conversation as a client sends it, whatever API it came by.

    role: system | user | assistant | tool.
    calls: of tools, in an assistant's message.
    ids: of these, by which their results are known; they do not reach the policy.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class ModelCall:
    """A request for the next assistant message.

    max_tokens: at most; None: as many as the run allows.
    stop: texts before which the message ends.
    """

    messages: tuple[HistoryMessage, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A sampled assistant message.

    text: of the whole action, up to a stop string; content and calls: what it says, what it calls.
    finish: stop | length | tool_calls.
    pieces: UTF-8 bytes of each token of the action; logp: of each, nats, as it was drawn.
    prompt_tokens: of the context; cached_tokens: of these, those that were not computed again.
    stopped_at: the stop string that ended it; None: something else did.
    """

    text: str
    content: str
    calls: tuple[ToolCall, ...]
    finish: str
    pieces: tuple[bytes, ...]
    logp: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int = 0
    stopped_at: str | None = None


class CallRefused(Exception):
    """A call that is not answered; the text is one sentence with what was got and what is allowed.

    status: of HTTP. code: for programs, such as `max_turns`. param: the field of the request.
    """

    def __init__(self, sentence: str, *, status: int = 400, code: str = "", param: str = ""):
        super().__init__(sentence)
        self.status, self.code, self.param = status, code, param


class Session(Protocol):
    """One episode as the endpoint sees it, in the endpoint's event loop.

    Cancelling `complete` takes the call back: its slot is free soon after, and no turn remains.
    """

    async def complete(
        self, call: ModelCall, on_text: Callable[[str], None] | None = None
    ) -> Completion:
        """Waits for the next assistant message; calls side by side are allowed.

        Args:
          on_text: is given the message's text piece by piece as it is sampled, never part of a
            character or of what may become a stop string; all pieces make `Completion.text`.

        Raises:
          CallRefused: the episode's turns or context are used up, or it is over.
        """
        ...

    def ignored(self, param: str) -> None:
        """Counts a sampling parameter of a request that has no effect."""
        ...


@dataclass(frozen=True)
class AgentTask:
    """The task that an agent is given.

    data: of the task's line in the file of tasks, a copy for each episode; or None.
    seed, episode_seed: as `Environment.reset` takes them.
    max_turns: calls that it may make.
    """

    task_id: str
    split: str
    data: Any
    seed: int
    episode_seed: int
    max_turns: int


@dataclass(frozen=True)
class AgentResult:
    """The result of an agent's episode.

    reward: of the episode; with `turn_rewards`, one a turn, their sum.
    score: from 0 to 1, 1 is success; None: the reward, cut to that range.
    rewards: further ones by name, as `StepResult.rewards`. info: for logs.
    """

    reward: float
    score: float | None = None
    rewards: Mapping[str, TurnRewards] = field(default_factory=dict[str, TurnRewards])
    turn_rewards: Sequence[float] = ()
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class AgentFailure(Failure):
    """Why an agent came to nothing.

    cause: exception | exit | crash | memory | output | result | timeout.
    answered: what it counts as where the policy had answered a call; None: a failure too.
    """

    cause: str = "exception"
    answered: AgentResult | None = None


@dataclass(frozen=True)
class Access:
    """How an agent reaches the policy: the address, which ends in /v1, and its episode's key."""

    base_url: str
    api_key: str


def can_be_sent(key: str) -> bool:
    """Whether a key can be a header's: signs of ASCII that are seen, and one at least."""
    return key.isascii() and key.isprintable() and key.split() == [key]


class Runner(Protocol):
    """Runs agents, many at once; none of its methods waits."""

    def start(
        self,
        task: AgentTask,
        access: Access,
        on_end: Callable[[AgentResult | AgentFailure], None],
    ) -> Callable[[], None]:
        """Starts an agent; `on_end` is called once, from any thread.

        Returns: a function that ends it early; `on_end` is then not called any more.
        """
        ...

    def close(self) -> None:
        """Ends all that still run."""
        ...
