"""The interface of all dialects, and their shared functions."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

from seeupo_jax.agents.calls import CallRefused, Completion, HistoryMessage, ModelCall
from seeupo_jax.agents.dialects.request_body import ServerTool, refuse
from seeupo_jax.agents.dialects.result_order import (
    ErrorPhrases,
    MessageCalls,
    UnmatchedResult,
    result_order,
)
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.null_fields import NullCounts, normal_tool

Event = Mapping[str, Any] | str
_NUMBERS = random.Random()  # a separate generator: agents may seed the global one
NOT_STATED = -9999.0  # OpenAI's value for a log-probability that it does not state


@dataclass
class Caller:
    """The sender of a request.

    model: the served name, or that of the role which the request names as its model.
    number: of the request among the sender's requests.
    responses: conversations by the id of the response that ends them; other requests change it.
    last: the conversation that ends with the latest response.
    ids: the prefix of the ids of tool calls.
    ignored: fields without effect, which will be counted.
    role: that it plays; "": the policy's own.
    """

    model: str
    number: int
    rules: SamplingRules
    responses: dict[str, tuple[HistoryMessage, ...]]
    last: tuple[HistoryMessage, ...]
    ids: str = "call"
    ignored: list[str] = field(default_factory=list[str])
    role: str = ""


class Exchange(Protocol):
    """A request and its answer, which is one `reply` or a stream of events.

    A request for several answers has an exchange for each, its `branches`, of which only `think`,
    `text` and `end` are used.
    """

    call: ModelCall
    stream: bool

    @property
    def branches(self) -> Sequence[Exchange]:
        """An exchange for each answer; of one answer, this one."""
        ...

    def reply(self, *completions: Completion) -> dict[str, Any]:
        """The whole answer, or all answers."""
        ...

    def begin(self) -> Iterable[Event]:
        """The events before the first text."""
        ...

    def think(self, piece: str) -> Iterable[Event]:
        """The events of further thoughts; all come before the content."""
        ...

    def text(self, piece: str) -> Iterable[Event]:
        """The events of further content."""
        ...

    def end(self, completion: Completion, rest: str) -> Iterable[Event]:
        """The events of the remaining content, the tool calls, and the answer's end."""
        ...

    def close(self, *completions: Completion) -> Iterable[Event]:
        """The events after the ends of all answers."""
        ...

    def fail(self, refusal: CallRefused) -> Iterable[Event]:
        """The events of an error after the stream has begun."""
        ...


class OneAnswer:
    """Methods of an exchange whose requests ask for one answer."""

    @property
    def branches(self) -> tuple[Self]:
        return (self,)

    def close(self, *completions: Completion) -> Iterable[Event]:
        return ()


class Dialect(NamedTuple):
    """An API.

    read: parses a request's JSON; raises CallRefused. error: makes the JSON of a refusal.
    """

    read: Callable[[Any, Caller], Exchange]
    error: Callable[[CallRefused], dict[str, Any]]


def openai_error(refusal: CallRefused) -> dict[str, Any]:
    """A refusal in the form of OpenAI's APIs."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(refusal),
            "type": kind,
            "param": refusal.param or None,
            "code": refusal.code or None,
        }
    }


def order_results(
    read: Sequence[tuple[HistoryMessage, MessageCalls]], words: ErrorPhrases
) -> tuple[HistoryMessage, ...]:
    """Returns a request's messages with tool results in the order of their calls.

    Raises:
      CallRefused: a call without a result, or a result without a call.
    """
    try:
        order = result_order([link for _, link in read], words)
    except UnmatchedResult as error:
        refuse(error.field, str(error))
    return tuple(read[place][0] for place in order)


class RequestTool(Protocol):
    """A tool of a request."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str | None: ...


def clients_tools(given: Sequence[Any], caller: Caller) -> Iterator[Any]:
    """The tools that a client runs itself; others count as ignored."""
    for index, tool in enumerate(given):
        if isinstance(tool, ServerTool):
            caller.ignored.append(f"tools[{index}] of type {tool.type[:40]}")
        else:
            yield tool


def show_tools(
    given: Sequence[tuple[RequestTool, dict[str, Any] | None]], caller: Caller
) -> tuple[Tool, ...]:
    """Converts tools to the normal form, so that all dialects give the same prompt.

    Null fields are removed and count as ignored.
    """
    shown = list[Tool]()
    for index, (tool, schema) in enumerate(given):
        counts = NullCounts()
        described = {"name": tool.name, "description": tool.description or ""}
        shown.append(normal_tool({**described, "parameters": schema or {}}, counts))
        if counts.dropped:
            caller.ignored.append(f"null fields of tools[{index}]")
    return tuple(shown)


def written_ids(completion: Completion) -> dict[str, list[int]]:
    """The tokens of an answer and of its context, as vLLM's completions name them."""
    return {"token_ids": list(completion.tokens), "prompt_token_ids": list(completion.prompt)}


def version_metadata(completions: Sequence[Completion]) -> dict[str, Any]:
    """The weights behind the answers to a request, as SGLang's completions state them; empty: they
    have no name."""
    if not completions or not completions[0].versions:
        return {}
    metadata: dict[str, Any] = {"weight_version": completions[-1].versions[-1].version}
    if len(completions) == 1:
        metadata |= {"weight_versions": [span._asdict() for span in completions[0].versions]}
    return {"metadata": metadata}


def reply_id() -> str:
    """Makes a reply's id. It is no secret: the system's random numbers would block other calls."""
    return f"{_NUMBERS.getrandbits(96):024x}"


def call_id(caller: Caller, index: int, *, answer: int = 0) -> str:
    """Makes a tool call's id, which is reproducible, since an agent may show it to the policy.

    Args:
      answer: its number, of several to a request.
    """
    request = f"{caller.number}-{answer}" if answer else caller.number
    return f"{caller.ids}_{request}_{index}"


def write_arguments(arguments: Mapping[str, Any]) -> str:
    """Writes a call's arguments as JSON."""
    return json.dumps(arguments, ensure_ascii=False)


def token_logprobs(completion: Completion) -> list[dict[str, Any]]:
    """Each token's text and log-probability, in the form of OpenAI's APIs.

    The bytes of all tokens concatenate to the text, even if a token is part of a character.
    """
    return [
        {
            "token": piece.decode(errors="replace"),
            "logprob": logp if math.isfinite(logp) else NOT_STATED,
            "bytes": list(piece),
            "top_logprobs": [
                {"token": likely.decode(errors="replace"), "logprob": p, "bytes": list(likely)}
                for likely, p in top
            ],
        }
        for piece, logp, top in zip(
            completion.pieces,
            completion.logp,
            completion.top or [()] * len(completion.pieces),
            strict=True,
        )
    ]
