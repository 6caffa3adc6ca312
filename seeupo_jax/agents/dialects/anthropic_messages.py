"""Anthropic's messages: /v1/messages."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import pydantic

from seeupo_jax.agents.calls import CallRefused, Completion, HistoryMessage, ModelCall
from seeupo_jax.agents.dialects.constraint_fields import (
    MessageFormat,
    ToolChoice,
    read_constraint,
    wanted_schema,
)
from seeupo_jax.agents.dialects.exchange import (
    Caller,
    Dialect,
    Event,
    OneAnswer,
    call_id,
    clients_tools,
    order_results,
    reply_id,
    show_tools,
    write_arguments,
)
from seeupo_jax.agents.dialects.request_body import (
    Count,
    Fields,
    ServerTool,
    Stops,
    as_list,
    by_type,
    read_fields,
    refuse,
)
from seeupo_jax.agents.dialects.result_order import CallReference, ErrorPhrases, MessageCalls
from seeupo_jax.envs.tool_calls import ToolCall


class _Cached(Fields):
    cache_control: dict[str, Any] | None = None  # prefixes are always cached


class _Text(_Cached):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class _ToolUse(_Cached):
    type: Literal["tool_use"]
    name: str
    input: dict[str, Any]
    id: str
    caller: dict[str, Any] | None = None


_Texts = Annotated[
    list[_Text], as_list(lambda text: {"type": "text", "text": text}, "a text or a list of blocks")
]


class _ToolResult(_Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = pydantic.Field(default_factory=list[_Text])
    is_error: bool | None = None  # no effect: the policy reads the content


class _Thinking(Fields):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # of no meaning: the thoughts themselves are compared


class _Redacted(Fields):
    type: Literal["redacted_thinking"]
    data: str  # another model's thoughts, which nobody here can read


_Block = by_type(
    text=_Text,
    thinking=_Thinking,
    redacted_thinking=_Redacted,
    tool_use=_ToolUse,
    tool_result=_ToolResult,
)


class _Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[_Block],
        as_list(lambda text: {"type": "text", "text": text}, "a text or a list of blocks"),
    ]


class _Tool(_Cached):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[dict[str, Any]] | None = None  # not shown


class _Choice(Fields):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class _ChosenTool(Fields):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class _NoTool(Fields):
    type: Literal["none"]


_ToolChoice = by_type(auto=_Choice, any=_Choice, tool=_ChosenTool, none=_NoTool)


class _OutputConfig(Fields):
    format: MessageFormat | None = None
    effort: str | None = None


class MessagesRequest(_Cached):
    """A request for a message."""

    model: str
    messages: list[_Message]
    max_tokens: Count
    system: _Texts | None = None
    tools: list[by_type("custom", other=ServerTool, custom=_Tool)] | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    # Determined by the run; a server takes the first three.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tool_choice: _ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: _OutputConfig | None = None
    output_format: MessageFormat | None = None  # the former name of output_config.format
    thread: dict[str, Any] | None = None  # a conversation that the server would hold
    # Without effect on sampling.
    metadata: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None  # no history is edited here
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None


_SAMPLING = ("temperature", "top_p", "top_k", "thinking")
_NO_THREADS = "thread_unsupported_request"  # the SDK's tool runner then sends whole conversations
_PHRASES = ErrorPhrases(
    "each `tool_use` block must have a corresponding `tool_result` block in the next message",
    "each `tool_result` block must have a corresponding `tool_use` block in the previous message",
)
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "max_tokens",
}


class MessagesExchange(OneAnswer):
    """A request for a message, and its answer."""

    def __init__(self, tree: Any, caller: Caller):
        request, unknown = read_fields(MessagesRequest, tree, ignore=caller.rules.ignore)
        fields = {name: getattr(request, name) for name in _SAMPLING}
        if request.output_config is not None:
            fields["output_config.effort"] = request.output_config.effort
        sampling, others = caller.rules.read(fields)
        caller.ignored += unknown + others
        if request.thread is not None:  # never ignored: messages would be missing
            raise CallRefused(
                "thread: got one; allowed: none, and the whole conversation in messages.",
                code=_NO_THREADS,
                param="thread",
            )
        self.call = dataclasses.replace(_read_call(request, caller), **sampling._asdict())
        self.stream = bool(request.stream)
        self._caller = caller
        self._id = f"msg_{reply_id()}"
        self._blocks = 0  # complete ones
        self._open: str | None = None  # the type of the block that is being sent
        self._thoughts = ""  # sent

    def reply(self, *completions: Completion) -> dict[str, Any]:
        (completion,) = completions
        content = [
            *([_thinking(completion.thoughts)] if completion.thoughts else []),
            *([{"type": "text", "text": completion.content}] if completion.content else []),
            *self._write_calls(completion),
        ]
        ending = _ending(completion)
        return self._message(content) | ending | {"usage": _usage(completion)}

    def begin(self) -> Iterator[Event]:
        # The last events hold the length of the prompt.
        usage = {"input_tokens": 0, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([]) | {"usage": usage}}

    def think(self, piece: str) -> Iterator[Event]:
        yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        yield _delta(self._blocks, {"type": "thinking_delta", "thinking": piece})
        self._thoughts += piece

    def text(self, piece: str) -> Iterator[Event]:
        yield from self._begin({"type": "text", "text": ""})
        yield _delta(self._blocks, {"type": "text_delta", "text": piece})

    def end(self, completion: Completion, rest: str) -> Iterator[Event]:
        if rest:
            yield from self.text(rest)
        yield from self._end_block()
        for index, block in enumerate(self._write_calls(completion), start=self._blocks):
            yield _begin_block(index, block | {"input": {}})
            arguments = write_arguments(block["input"])
            yield _delta(index, {"type": "input_json_delta", "partial_json": arguments})
            yield {"type": "content_block_stop", "index": index}
        ending = _ending(completion)
        yield {"type": "message_delta", "delta": ending, "usage": _usage(completion)}
        yield {"type": "message_stop"}

    def fail(self, refusal: CallRefused) -> Iterator[Event]:
        yield write_error(refusal)

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begins a block, unless one of its type is being sent."""
        if self._open != block["type"]:
            yield from self._end_block()
            self._open = block["type"]
            yield _begin_block(self._blocks, block)

    def _end_block(self) -> Iterator[Event]:
        """Ends the block that is being sent, if any."""
        if self._open == "thinking":
            signature = _thinking(self._thoughts)["signature"]
            yield _delta(self._blocks, {"type": "signature_delta", "signature": signature})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._blocks}
            self._blocks, self._open = self._blocks + 1, None

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._caller.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _write_calls(self, completion: Completion) -> list[dict[str, Any]]:
        return [
            {
                "type": "tool_use",
                "id": call_id(self._caller, index),
                "name": call.name,
                "input": dict(call.arguments),
            }
            for index, call in enumerate(completion.calls)
        ]


def write_error(refusal: CallRefused) -> dict[str, Any]:
    """A refusal in the form of Anthropic's API, with the additional fields `param` and `code`."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    other = "api_error" if refusal.status >= 500 else "invalid_request_error"
    error = {"type": kinds.get(refusal.status, other), "message": str(refusal)}
    named = {"param": refusal.param or None, "code": refusal.code or None}
    details = {"details": {"error_code": _NO_THREADS}} if refusal.code == _NO_THREADS else {}
    return {"type": "error", "error": error | named | details}


def _read_call(request: MessagesRequest, caller: Caller) -> ModelCall:
    if not request.messages:
        refuse("messages", "messages: got none; allowed: at least one.")
    if request.messages[-1].role == "assistant":
        refuse("messages", "messages: the last is the assistant's; allowed: another role's.")
    head = () if request.system is None else (HistoryMessage("system", _join(request.system)),)
    read = [
        part
        for index, message in enumerate(request.messages)
        for part in _read_message(message, f"messages[{index}]")
    ]
    messages = order_results(read, _PHRASES)
    choice = _read_choice(request.tool_choice)
    tools = () if choice.calls == "none" else clients_tools(request.tools or (), caller)
    shown = show_tools([(tool, tool.input_schema) for tool in tools], caller)
    stop = tuple(request.stop_sequences or ())
    constraint = read_constraint(
        caller,
        choice,
        shown,
        wanted_schema(*_read_format(request)),
        single=bool(getattr(request.tool_choice, "disable_parallel_tool_use", False)),
    )
    messages = (*head, *messages)
    return ModelCall(
        messages, shown, request.max_tokens, stop, constraint=constraint, role=caller.role
    )


def _read_format(request: MessagesRequest) -> tuple[MessageFormat | None, str]:
    """The format of the answer, and the field that holds it."""
    former, output = request.output_format, request.output_config
    if former is None:
        return output and output.format, "output_config.format"
    if output is not None and output.format not in (None, former):
        refuse("output_format", "output_format: got another one than output_config.format.")
    return former, "output_format"


def _read_choice(choice: _Choice | _ChosenTool | _NoTool | None) -> ToolChoice:
    if isinstance(choice, _ChosenTool):
        return ToolChoice("must", (choice.name,))
    kinds = {"auto": "may", "any": "must", "none": "none"}
    return ToolChoice() if choice is None else ToolChoice(kinds[choice.type])


def _read_message(message: _Message, place: str) -> Iterator[tuple[HistoryMessage, MessageCalls]]:
    """Splits a message: tool results become separate messages."""
    kinds = {"user": (_Text, _ToolResult), "assistant": (_Text, _Thinking, _Redacted, _ToolUse)}
    allowed = kinds.get(message.role, (_Text,))
    for index, block in enumerate(message.content):
        if not isinstance(block, allowed):
            name = f"{place}.content[{index}].type"
            refuse(name, f"{name}: got {block.type!r} in a message of {message.role!r}.")
    if message.role == "assistant":
        uses = {i: block for i, block in enumerate(message.content) if isinstance(block, _ToolUse)}
        calls = tuple(ToolCall(use.name, use.input) for use in uses.values())
        named = [
            CallReference(use.id, f"{place}.content[{i}].id", use.name) for i, use in uses.items()
        ]
        thoughts = [b.thinking for b in message.content if isinstance(b, _Thinking)]
        text, thought = _join(message.content), "\n".join(thoughts).strip()
        yield HistoryMessage("assistant", text, calls, thought), MessageCalls(named)
        return
    texts: list[Any] = []
    # This API joins consecutive user messages: results may be in any of them.
    without_calls = MessageCalls(closes=False)
    for index, block in enumerate(message.content):
        if isinstance(block, _ToolResult):
            if texts:
                yield HistoryMessage(message.role, _join(texts)), without_calls
            texts = []
            result = CallReference(block.tool_use_id, f"{place}.content[{index}].tool_use_id")
            yield HistoryMessage("tool", _join(block.content)), MessageCalls(result=result)
        else:
            texts.append(block)
    if texts or not message.content:
        yield HistoryMessage(message.role, _join(texts)), without_calls


def _join(blocks: Sequence[Any]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, _Text))


def _thinking(thoughts: str) -> dict[str, Any]:
    """A block of thoughts; clients send only signed ones back."""
    signature = hashlib.sha256(thoughts.encode()).hexdigest()
    return {"type": "thinking", "thinking": thoughts, "signature": signature}


def _ending(completion: Completion) -> dict[str, Any]:
    stop_sequence = completion.stopped_at if completion.finish == "stop" else None
    return {
        "stop_reason": _STOP_REASONS[completion.finish]
        if stop_sequence is None
        else "stop_sequence",
        "stop_sequence": stop_sequence,
    }


def _begin_block(index: int, block: dict[str, Any]) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "input_tokens": completion.prompt_tokens - completion.cached_tokens,
        "cache_read_input_tokens": completion.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(completion.pieces),
    }


DIALECT = Dialect(MessagesExchange, write_error)
