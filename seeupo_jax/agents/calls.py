"""The types exchanged between an agent, its endpoint and the sampler of its turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from seeupo_jax.envs.base import Tool, TurnRewards
from seeupo_jax.envs.pool import Failure
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.rollout.engine.protocol import Constraint, TurnSampling


@dataclass(frozen=True)
class HistoryMessage:
    """A message of a conversation as a client sends it, the same for all APIs.

    role: system | user | assistant | tool.
    calls: tool calls of an assistant's message. thoughts: of one, if they are no content.
    ids: the ids of these calls, by which results refer to them; they do not reach the policy.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    thoughts: str = ""
    ids: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class ModelCall:
    """A request for the next assistant message.

    max_tokens: limit of sampled tokens; None: the run's limit.
    stop: stop strings; the message ends before them.
    sampling: None: the run's, or the server's. seed: of its random numbers; None: any.
    answers: number of messages that are asked for; answer: the number of this one.
    constraint: the form of the message; None: any.
    prompt: the context itself instead of messages, as a text or as tokens. At a server only.
    echo: whether the completion has the context too; scores: number of likeliest tokens to state
      beside each of its log-probabilities, None: these are not computed either.
    role: that the client plays; "": the policy's own.
    end_ids: tokens that the client wants the message to end with. At a server only.
    """

    messages: tuple[HistoryMessage, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: TurnSampling | None = None
    seed: int | None = None
    answers: int = 1
    answer: int = 0
    constraint: Constraint | None = None
    prompt: str | tuple[int, ...] | None = None
    echo: bool = False
    scores: int | None = None
    role: str = ""
    end_ids: tuple[int, ...] = ()


class EchoedContext(NamedTuple):
    """A context that is sent back: fields as of `Completion`.

    logp, top: of the tokens but the first; empty: not asked for.
    """

    text: str
    pieces: tuple[bytes, ...]
    logp: tuple[float, ...] = ()
    top: tuple[tuple[tuple[bytes, float], ...], ...] = ()


class VersionSpan(NamedTuple):
    """The weights that sampled the tokens from `start` to before `end`, by their name."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """A sampled assistant message.

    text: of the whole action, up to a stop string, with the `<think>` of a header that opens
      thoughts if these are apart; content and calls: its content and tool calls.
    finish: stop | length | tool_calls | abort. One that was cut may have calls, those that were
      complete; one whose sampling was aborted may have no token.
    pieces: UTF-8 bytes of each token of the action; logp: log-probability of each, in nats, under
      the sampling distribution; at a server, as of `Action`.
    prompt_tokens: tokens of the context; cached_tokens: those of them that were in the cache.
    stopped_at: the stop string that ended it; None: it ended otherwise.
    thoughts: "" if there are none, or they are part of the content.
    top: of each token, the likeliest ones with their log-probabilities; empty: not asked for.
    context: that it continues, where the call asks for it.
    tokens: ids of the pieces. prompt: ids of the context. At a server only.
    versions: the weights that sampled the tokens. At a server only.
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
    thoughts: str = ""
    top: tuple[tuple[tuple[bytes, float], ...], ...] = ()
    context: EchoedContext | None = None
    tokens: tuple[int, ...] = ()
    prompt: Sequence[int] = ()
    versions: tuple[VersionSpan, ...] = ()

    @property
    def message(self) -> HistoryMessage:
        """The message as a client sends it back."""
        return HistoryMessage("assistant", self.content, self.calls, self.thoughts)


class CallRefused(Exception):
    """A call is refused; the text is one sentence with what was got and what is allowed.

    status: of HTTP. code: for programs, such as `max_turns`. param: the field of the request.
    """

    def __init__(self, sentence: str, *, status: int = 400, code: str = "", param: str = ""):
        super().__init__(sentence)
        self.status, self.code, self.param = status, code, param


def context_exceeded(got: str, allowed: str, max_context: int, param: str) -> CallRefused:
    """The refusal of a context that is too long.

    It has the words of OpenAI's and of Anthropic's API, by which clients recognise it.
    """
    return CallRefused(
        f"{param}: got {got}; allowed: {allowed}: the prompt is too long, since this model's"
        f" maximum context length is {max_context} tokens (rollout.max_context).",
        code="context_length_exceeded",
        param=param,
    )


def form_refusal(call: ModelCall, reason: str) -> CallRefused:
    """The refusal of a call whose constraint, or one of whose tools, has no grammar."""
    field = "tools"
    if call.constraint is not None and not call.constraint.optional:
        field = call.constraint.field
    sentence = f"{field}: {reason.removeprefix(f'{field}: ')}"
    return CallRefused(sentence, code="invalid_value", param=field)


class Session(Protocol):
    """One episode as the endpoint sees it, in the endpoint's event loop.

    Cancelling `complete` cancels the call: its slot becomes free soon after, and no turn remains.
    """

    async def complete(
        self, call: ModelCall, on_text: Callable[[str], None] | None = None
    ) -> Completion:
        """Waits for the next assistant message; concurrent calls are allowed.

        Args:
          on_text: receives the message's text in pieces while it is sampled, never a part of a
            character or of a possible stop string; the pieces concatenate to `Completion.text`.

        Raises:
          CallRefused: the episode's turns or context are used up, or it is over.
        """
        ...

    async def context(self, call: ModelCall) -> Sequence[int]:
        """The tokens that a call's context would have; nothing is sampled, and no turn is used.

        Raises:
          CallRefused: as `complete`.
        """
        ...

    @property
    def max_context(self) -> int:
        """The most tokens of a conversation."""
        ...

    def ignored(self, param: str) -> None:
        """Counts a sampling parameter of a request that has no effect."""
        ...


@dataclass(frozen=True)
class AgentTask:
    """The task of an agent.

    data: further fields of the task's line in the file of tasks, copied for each episode; or None.
    seed, episode_seed: as for `Environment.reset`.
    max_turns: the maximal number of calls.
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

    reward: of the episode; with `turn_rewards`, one per turn, their sum.
    score: from 0 to 1, 1 is success; None: the reward, clipped to that range.
    rewards: additional rewards by name, as `StepResult.rewards`. info: for logs.
    role_rewards: as `StepResult.role_rewards`.
    """

    reward: float
    score: float | None = None
    rewards: Mapping[str, TurnRewards] = field(default_factory=dict[str, TurnRewards])
    turn_rewards: Sequence[float] = ()
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    role_rewards: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class AgentFailure(Failure):
    """The failure of an agent.

    cause: exception | exit | crash | memory | output | result | timeout, and in a sandbox limit,
      verifier and sandbox.
    answered: the result that it counts as if the policy has answered a call; None: still a failure.
    """

    cause: str = "exception"
    answered: AgentResult | None = None


@dataclass(frozen=True)
class Access:
    """An agent's access to the policy: the address, which ends in /v1, and its episode's key."""

    base_url: str
    api_key: str


def is_header_value(key: str) -> bool:
    """Whether a key can be sent in a header: it is non-empty, visible ASCII."""
    return key.isascii() and key.isprintable() and key.split() == [key]


class Runner(Protocol):
    """Runs many agents concurrently; none of its methods blocks."""

    def start(
        self,
        task: AgentTask,
        access: Access,
        on_end: Callable[[AgentResult | AgentFailure], None],
    ) -> Callable[[], None]:
        """Starts an agent; `on_end` is called once, from any thread.

        Returns: a function that ends it early, after which `on_end` is not called.
        """
        ...

    def close(self) -> None:
        """Ends all agents that still run."""
        ...
