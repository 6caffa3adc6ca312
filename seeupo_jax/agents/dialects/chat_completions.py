"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from seeupo_jax.agents.calls import CallRefused, Completion, HistoryMessage, ModelCall
from seeupo_jax.agents.dialects.constraint_fields import (
    ChatAllowedTools,
    ChatFormat,
    ChatFunction,
    ToolChoice,
    read_constraint,
    tool_choice,
    wanted_schema,
)
from seeupo_jax.agents.dialects.exchange import (
    Caller,
    Dialect,
    Event,
    call_id,
    openai_error,
    order_results,
    reply_id,
    show_tools,
    token_logprobs,
    version_metadata,
    write_arguments,
)
from seeupo_jax.agents.dialects.request_body import (
    Arguments,
    Count,
    Fields,
    Stops,
    as_list,
    read_fields,
    refuse,
)
from seeupo_jax.agents.dialects.result_order import CHAT_PHRASES, CallReference, MessageCalls
from seeupo_jax.envs.tool_calls import ToolCall


class _Part(Fields):
    type: Literal["text"]
    text: str


_Content = Annotated[
    list[_Part], as_list(lambda text: {"type": "text", "text": text}, "a text or a list of parts")
]


class _Function(Fields):
    name: str
    arguments: Arguments


class _Call(Fields):
    function: _Function
    type: Literal["function"] = "function"
    id: str | None = None
    index: int | None = None  # sent back by clients that join a stream's chunks


class _Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # its other name
    tool_calls: list[_Call] | None = None
    name: str | None = None
    tool_call_id: str | None = None


class _FunctionTool(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # does not constrain sampling; `config.rollout.grammar` does


class _Tool(Fields):
    type: Literal["function"]
    function: _FunctionTool


_ToolChoice = tool_choice(ChatFunction, ChatAllowedTools)


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Fields):
    """How completions are sampled: determined by a run; a server takes most of them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class ChatRequest(SamplingFields):
    """A request for a chat completion."""

    model: str
    messages: list[_Message]
    tools: list[_Tool] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    # The form of the answer.
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ChatFormat | None = None
    # Determined by the run; a server takes most of them.
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    # As vLLM has it; at a server only.
    return_token_ids: bool | None = None
    # Without effect on sampling.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


_SAMPLING = (
    *SamplingFields.model_fields,
    *("top_logprobs", "reasoning_effort", "verbosity", "modalities"),
)


class ChatExchange:
    """A request for a chat completion, and its answer."""

    def __init__(self, tree: Any, caller: Caller):
        request, unknown = read_fields(ChatRequest, tree, ignore=caller.rules.ignore)
        fields = {name: getattr(request, name) for name in _SAMPLING}
        sampling, others = caller.rules.read(fields)
        caller.ignored += unknown + others
        self._token_ids = bool(request.return_token_ids)
        if self._token_ids and not caller.rules.serves:
            self._token_ids = False
            caller.ignored.append(caller.rules.refuse_ids("return_token_ids"))
        self.call = dataclasses.replace(_read_call(request, caller), **sampling._asdict())
        self.stream = bool(request.stream)
        self._logprobs = bool(request.logprobs)
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._caller, self._index = caller, 0
        self._head = {
            "id": f"chatcmpl-{reply_id()}",
            "created": int(time.time()),
            "model": caller.model,
        }

    @property
    def branches(self) -> tuple[ChatExchange, ...]:
        return tuple(self._branch(index) for index in range(self.call.answers))

    def _branch(self, index: int) -> ChatExchange:
        branch = copy.copy(self)
        branch._index = index
        branch.call = dataclasses.replace(self.call, answer=index)
        return branch

    def reply(self, *completions: Completion) -> dict[str, Any]:
        pairs = zip(self.branches, completions, strict=True)
        written = self._head | {
            "object": "chat.completion",
            "choices": [branch._choice(completion) for branch, completion in pairs],
            "usage": _usage(completions),
        }
        if self._token_ids:
            written["prompt_token_ids"] = list(completions[0].prompt)
        return written | version_metadata(completions)

    def _choice(self, completion: Completion) -> dict[str, Any]:
        calls = self._write_calls(completion)
        message = {
            "role": "assistant",
            "content": None if calls and not completion.content else completion.content,
            "refusal": None,
            **({"reasoning_content": completion.thoughts} if completion.thoughts else {}),
            **({"tool_calls": calls} if calls else {}),
        }
        choice = {"index": self._index, "message": message, **self._finish(completion)}
        return choice | ({"token_ids": list(completion.tokens)} if self._token_ids else {})

    def begin(self) -> Iterator[Event]:
        for branch in self.branches:
            yield branch._chunk({"role": "assistant", "content": ""})

    def think(self, piece: str) -> Iterator[Event]:
        yield self._chunk({"reasoning_content": piece})

    def text(self, piece: str) -> Iterator[Event]:
        yield self._chunk({"content": piece})

    def end(self, completion: Completion, rest: str) -> Iterator[Event]:
        if rest:
            yield from self.text(rest)
        for index, call in enumerate(self._write_calls(completion)):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, **self._finish(completion))

    def close(self, *completions: Completion) -> Iterator[Event]:
        if self._usage:
            yield self._head | {
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": _usage(completions),
            }
        yield "[DONE]"

    def fail(self, refusal: CallRefused) -> Iterator[Event]:
        yield openai_error(refusal)

    def _chunk(self, delta: dict[str, Any], **ending: Any) -> Event:
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        } | ending
        usage = {"usage": None} if self._usage else {}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]} | usage

    def _finish(self, completion: Completion) -> dict[str, Any]:
        logprobs = {"content": token_logprobs(completion), "refusal": None}
        return {
            "finish_reason": completion.finish,
            "logprobs": logprobs if self._logprobs else None,
        }

    def _write_calls(self, completion: Completion) -> list[dict[str, Any]]:
        return [
            {
                "id": call_id(self._caller, index, answer=self._index),
                "type": "function",
                "function": {"name": call.name, "arguments": write_arguments(call.arguments)},
            }
            for index, call in enumerate(completion.calls)
        ]


def _read_call(request: ChatRequest, caller: Caller) -> ModelCall:
    if not request.messages:
        refuse("messages", "messages: got none; allowed: at least one.")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        refuse("max_tokens", "max_tokens: got another value than max_completion_tokens.")
    choice = ToolChoice() if request.tool_choice is None else request.tool_choice.choice()
    tools = () if choice.calls == "none" else request.tools or ()
    functions = [tool.function for tool in tools]
    shown = show_tools([(function, function.parameters) for function in functions], caller)
    read = [_read_message(m, f"messages[{i}]") for i, m in enumerate(request.messages)]
    messages = order_results(read, CHAT_PHRASES)
    return ModelCall(
        messages,
        shown,
        limits.pop() if limits else None,
        tuple(request.stop or ()),
        constraint=read_constraint(
            caller,
            choice,
            shown,
            wanted_schema(request.response_format, "response_format"),
            single=request.parallel_tool_calls is False,
        ),
        role=caller.role,
    )


def _read_message(message: _Message, place: str) -> tuple[HistoryMessage, MessageCalls]:
    if message.role != "assistant" and message.content is None:
        refuse(f"{place}.content", f"{place}.content: is missing.")
    if message.role != "assistant" and message.tool_calls:
        refuse(
            f"{place}.tool_calls", f"{place}.tool_calls: only an assistant's message may have them."
        )
    calls = message.tool_calls or ()
    read = HistoryMessage(
        "system" if message.role == "developer" else message.role,
        "\n".join(part.text for part in message.content or ()),
        tuple(ToolCall(call.function.name, call.function.arguments) for call in calls),
        _read_thoughts(message, place),
    )
    if message.role == "tool":
        field = f"{place}.tool_call_id"
        return read, MessageCalls(result=CallReference(message.tool_call_id, field, message.name))
    named = (
        CallReference(call.id, f"{place}.tool_calls[{index}].id", call.function.name)
        for index, call in enumerate(calls)
    )
    return read, MessageCalls(tuple(named))


def _read_thoughts(message: _Message, place: str) -> str:
    """The thoughts of an assistant's message, under either of their names."""
    names = ("reasoning_content", "reasoning")
    given = {name: text for name in names if (text := getattr(message, name))}
    for name in given if message.role != "assistant" else ():
        refuse(f"{place}.{name}", f"{place}.{name}: only an assistant's message may have it.")
    if len(set(given.values())) > 1:
        refuse(f"{place}.reasoning", f"{place}.reasoning: differs from reasoning_content.")
    return next(iter(given.values()), "").strip()


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    first, sampled = completions[0], sum(len(each.pieces) for each in completions)
    return usage_of(first.prompt_tokens, sampled, first.cached_tokens)


def usage_of(prompt_tokens: int, sampled: int, cached_tokens: int) -> dict[str, Any]:
    """Numbers of tokens, as OpenAI's completions state them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


DIALECT = Dialect(ChatExchange, openai_error)
