"""OpenAI's responses: /v1/responses."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from seeupo_jax.agents.calls import CallRefused, Completion, HistoryMessage, ModelCall
from seeupo_jax.agents.dialects.constraint_fields import (
    AllowedTools,
    NamedFunction,
    TextFormat,
    ToolChoice,
    read_constraint,
    tool_choice,
    wanted_schema,
)
from seeupo_jax.agents.dialects.exchange import (
    Caller,
    Dialect,
    Event,
    OneAnswer,
    call_id,
    openai_error,
    order_results,
    reply_id,
    token_logprobs,
)
from seeupo_jax.agents.dialects.request_body import (
    Arguments,
    Count,
    Fields,
    as_list,
    by_type,
    read_fields,
    refuse,
)
from seeupo_jax.agents.dialects.response_tools import (
    INPUT,
    ResponseTool,
    ResponseTools,
    echo_tools,
    shown_name,
)
from seeupo_jax.agents.dialects.result_order import CallReference, ErrorPhrases, MessageCalls
from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.tool_calls import ToolCall

REMEMBERED = 1024  # conversations per key that `previous_response_id` can name

_PHRASES = ErrorPhrases(
    "No tool output found for function call",
    "No tool call found for function call output",
)


class _Part(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_Content = Annotated[
    list[_Part],
    as_list(lambda text: {"type": "input_text", "text": text}, "a text or a list of parts"),
]


class _Message(Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _FunctionCall(Fields):
    type: Literal["function_call"]
    name: str
    arguments: Arguments
    call_id: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class _CustomCall(Fields):
    type: Literal["custom_tool_call"]
    name: str
    input: str
    call_id: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {INPUT: self.input}


class _Output(Fields):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Content
    name: str | None = None
    id: str | None = None
    status: str | None = None


class _Reference(Fields):
    type: Literal["item_reference"]
    id: str


class _ReasoningText(Fields):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _ReasoningItem(Fields):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[_ReasoningText] | None = None  # not read: replies have none
    content: list[_ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


_Item = by_type(
    "message",
    message=_Message,
    reasoning=_ReasoningItem,
    function_call=_FunctionCall,
    custom_tool_call=_CustomCall,
    function_call_output=_Output,
    custom_tool_call_output=_Output,
    item_reference=_Reference,
)


_ToolChoice = tool_choice(NamedFunction, AllowedTools)


class _Text(Fields):
    format: TextFormat | None = None
    verbosity: str | None = None


class _Reasoning(Fields):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _StreamOptions(Fields):
    include_obfuscation: bool | None = None


class ResponsesRequest(Fields):
    """A request for a response."""

    model: str
    input: Annotated[
        list[_Item],
        as_list(lambda text: {"role": "user", "content": text}, "a text or a list of items"),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponseTool] | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    # The form of the answer.
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Determined by the run; a server takes most of them.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    truncation: str | None = None
    background: bool | None = None
    # Without effect on sampling.
    user: str | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None  # no history is edited here
    service_tier: str | None = None
    max_tool_calls: int | None = None  # of OpenAI's own tools
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    stream_options: _StreamOptions | None = None


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "top_logprobs"),
    *("truncation", "background"),
)


class ResponsesExchange(OneAnswer):
    """A request for a response, and its answer."""

    def __init__(self, tree: Any, caller: Caller):
        self._request, unknown = read_fields(ResponsesRequest, tree, ignore=caller.rules.ignore)
        request = self._request
        fields = {name: getattr(request, name) for name in _SAMPLING}
        if request.text:
            fields["text.verbosity"] = request.text.verbosity
        if request.reasoning:
            fields["reasoning.effort"] = request.reasoning.effort
        sampling, others = caller.rules.read(fields)
        caller.ignored += unknown + others
        self._caller = caller
        self._history = _read_history(request, caller)
        self._tools = ResponseTools(request.tools or (), caller)
        call = self._read_call(self._tools.shown)
        self.call = dataclasses.replace(call, **sampling._asdict())
        self.stream = bool(request.stream)
        self._logprobs = "message.output_text.logprobs" in (request.include or ())
        self._id = reply_id()
        self._created = int(time.time())
        self._sent = 0  # events
        self._message_open = self._thoughts_open = False

    def _read_call(self, tools: tuple[Tool, ...]) -> ModelCall:
        request, history = self._request, self._history
        if not history:
            refuse("input", "input: got no items; allowed: at least one.")
        head = (
            ()
            if request.instructions is None
            else (HistoryMessage("system", request.instructions),)
        )
        choice = ToolChoice() if request.tool_choice is None else request.tool_choice.choice()
        shown = () if choice.calls == "none" else tools
        constraint = read_constraint(
            self._caller,
            choice,
            shown,
            wanted_schema(request.text and request.text.format, "text.format"),
            single=request.parallel_tool_calls is False,
        )
        messages = (*head, *history)
        limit, role = request.max_output_tokens, self._caller.role
        return ModelCall(messages, shown, limit, constraint=constraint, role=role)

    def reply(self, *completions: Completion) -> dict[str, Any]:
        (completion,) = completions
        self._remember(completion)
        items = self._write_items(completion)
        return self._response(_status(completion), items, completion)

    def begin(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def think(self, piece: str) -> Iterator[Event]:
        if not self._thoughts_open:
            self._thoughts_open = True
            yield from self._begin_item(self._reasoning(""))
        yield self._of_part("response.reasoning_text.delta", "rs", delta=piece)

    def text(self, piece: str) -> Iterator[Event]:
        if not self._message_open:
            self._message_open = True
            yield from self._begin_item(self._message("", "in_progress", []))
        yield self._of_part("response.output_text.delta", "msg", delta=piece, logprobs=[])

    def end(self, completion: Completion, rest: str) -> Iterator[Event]:
        if rest or not (self._message_open or completion.calls):
            yield from self.text(rest)
        reply = self.reply(completion)
        for index, item in enumerate(reply["output"]):
            if item["type"] == "reasoning":
                yield from self._end_thoughts(item)
            elif item["type"] == "message":
                yield from self._end_message(item)
            else:
                yield from self._send_call(index, item)
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{reply['status']}", response=reply)

    def fail(self, refusal: CallRefused) -> Iterator[Event]:
        error = openai_error(refusal)["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
        yield self._event("error", **fields)

    def _begin_item(self, item: dict[str, Any]) -> Iterator[Event]:
        """The first events of thoughts or a message; takes its empty part out of the item."""
        part, kind = item["content"].pop(), item["id"].partition("_")[0]
        index = self._index(kind)
        yield self._event("response.output_item.added", output_index=index, item=item)
        yield self._of_part("response.content_part.added", kind, part=part)

    def _end_thoughts(self, item: dict[str, Any]) -> Iterator[Event]:
        (part,) = item["content"]
        yield self._of_part("response.reasoning_text.done", "rs", text=part["text"])
        yield self._of_part("response.content_part.done", "rs", part=part)

    def _end_message(self, item: dict[str, Any]) -> Iterator[Event]:
        (part,) = item["content"]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._of_part("response.output_text.done", "msg", **text)
        yield self._of_part("response.content_part.done", "msg", part=part)

    def _send_call(self, index: int, item: dict[str, Any]) -> Iterator[Event]:
        custom = item["type"] == "custom_tool_call"
        field = "input" if custom else "arguments"
        kind = "custom_tool_call_input" if custom else "function_call_arguments"
        in_progress = item | {field: "", "status": "in_progress"}
        place = {"output_index": index, "item_id": item["id"]}
        whole = {field: item[field]} if custom else {"name": item["name"], field: item[field]}
        yield self._event("response.output_item.added", output_index=index, item=in_progress)
        yield self._event(f"response.{kind}.delta", **place, delta=item[field])
        yield self._event(f"response.{kind}.done", **place, **whole)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _of_part(self, event: str, kind: str, **fields: Any) -> Event:
        """An event of the only part of the thoughts (`rs`) or of the message (`msg`)."""
        place = {"item_id": f"{kind}_{self._id}", "output_index": self._index(kind)}
        return self._event(event, **place, content_index=0, **fields)

    def _index(self, kind: str) -> int:
        return 1 if kind == "msg" and self._thoughts_open else 0

    def _reasoning(self, text: str) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "id": f"rs_{self._id}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }

    def _message(self, text: str, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {
            "type": "message",
            "id": f"msg_{self._id}",
            "status": status,
            "role": "assistant",
            "content": [part],
        }

    def _write_items(self, completion: Completion) -> list[dict[str, Any]]:
        items = []
        if completion.thoughts:
            items.append(self._reasoning(completion.thoughts))
        if completion.content or not completion.calls:
            logprobs = token_logprobs(completion) if self._logprobs else []
            items.append(self._message(completion.content, _status(completion), logprobs))
        for index, call in enumerate(completion.calls):
            ids = {"id": f"fc_{self._id}_{index}", "call_id": call_id(self._caller, index)}
            items.append(ids | self._tools.write(call) | {"status": "completed"})
        return items

    def _response(
        self, status: str, items: list[dict[str, Any]], completion: Completion | None = None
    ) -> dict[str, Any]:
        request, rules = self._request, self._caller.rules
        sampling, constraint = self.call.sampling, self.call.constraint
        forced = constraint is not None and not constraint.optional
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._caller.model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "temperature": sampling.temperature if sampling else rules.temperature,
            "tool_choice": _write_choice(request.tool_choice, self.call),
            "tools": echo_tools(request.tools or (), strict=forced),
            "top_p": sampling.top_p if sampling else 1.0 if rules.top_p is None else rules.top_p,
            "usage": None if completion is None else _usage(completion),
        }

    def _remember(self, completion: Completion) -> None:
        if self._request.store is False:
            return
        responses = self._caller.responses
        if len(responses) >= REMEMBERED:
            del responses[next(iter(responses))]
        ids = tuple(call_id(self._caller, index) for index in range(len(completion.calls)))
        answer = dataclasses.replace(completion.message, ids=ids)
        responses[f"resp_{self._id}"] = (*self._history, answer)


def _read_history(request: ResponsesRequest, caller: Caller) -> tuple[HistoryMessage, ...]:
    """The conversation without the instructions, which apply to one response only."""
    previous = request.previous_response_id
    read = list(_read_items([*_resolved(request.input, caller)]))
    if previous is None:
        return _share(order_results(read, _PHRASES), caller)
    before = caller.responses.get(previous)
    if before is None:
        refuse(
            "previous_response_id",
            f"previous_response_id: got {previous[:80]!r}; allowed: one of this key's last"
            f" {REMEMBERED} responses without store=False.",
        )
    *_, answer = before  # all earlier calls have their results
    waiting = MessageCalls([CallReference(each, "input") for each in answer.ids], closes=False)
    return _share((*before[:-1], *order_results([(answer, waiting), *read], _PHRASES)), caller)


def _share(history: tuple[HistoryMessage, ...], caller: Caller) -> tuple[HistoryMessage, ...]:
    """The same history; messages that equal the last response's are the same objects in memory."""
    pairs = zip(caller.last, history, strict=False)
    same = [old if old == new else new for old, new in pairs]
    return (*same, *history[len(same) :])


def _resolved(items: Sequence[Any], caller: Caller) -> Iterator[Any]:
    """The items, those for references that name an item of an earlier response of the key."""
    for index, item in enumerate(items):
        yield item if not isinstance(item, _Reference) else _find_item(item.id, index, caller)


def _find_item(name: str, index: int, caller: Caller) -> Any:
    kind, _, rest = name.partition("_")
    response, _, number = rest.partition("_")
    *_, answer = caller.responses.get(f"resp_{response}", (None,))
    match kind:
        case "msg" if answer and answer.content:
            return _Message(role="assistant", content=answer.content)
        case "rs" if answer and answer.thoughts:
            part = _ReasoningText(type="reasoning_text", text=answer.thoughts)
            return _ReasoningItem(type="reasoning", content=[part])
        case "fc" if answer and number.isdecimal() and int(number) < len(answer.calls):
            call = answer.calls[int(number)]
            return _FunctionCall(
                type="function_call",
                name=call.name,
                arguments=call.arguments,
                call_id=answer.ids[int(number)],
            )
    refuse(
        f"input[{index}].id",
        f"input[{index}].id: got {name[:80]!r}; allowed: an item of one of this key's last"
        f" {REMEMBERED} responses without store=False.",
    )


def _read_items(items: Sequence[Any]) -> Iterator[tuple[HistoryMessage, MessageCalls]]:
    """Reads items as messages; an assistant's thoughts, message and calls in a row become one."""
    answer: HistoryMessage | None = None
    named: list[CallReference] = []
    for index, item in enumerate(items):
        if isinstance(item, _FunctionCall | _CustomCall):
            before = answer or HistoryMessage("assistant", "")
            call = ToolCall(shown_name(item.name, item.namespace), item.arguments)
            answer = dataclasses.replace(before, calls=(*before.calls, call))
            named.append(CallReference(item.call_id, f"input[{index}].call_id", call.name))
            continue
        # Thoughts alone belong to the message that follows.
        thoughts = "" if not answer or answer.content or answer.calls else answer.thoughts
        if answer and not thoughts:
            yield answer, MessageCalls(named, closes=False)
        answer, named = None, []
        if isinstance(item, _ReasoningItem):
            text = "\n".join(part.text for part in item.content or ())
            answer = HistoryMessage("assistant", "", thoughts=text.strip())
            continue
        message, link = _read_message(item, f"input[{index}]")
        if message.role == "assistant":
            answer = dataclasses.replace(message, thoughts=thoughts)
        else:
            yield message, link
    if answer:
        yield answer, MessageCalls(named, closes=False)


def _read_message(item: _Message | _Output, place: str) -> tuple[HistoryMessage, MessageCalls]:
    if isinstance(item, _Output):
        result = CallReference(item.call_id, f"{place}.call_id")
        return HistoryMessage("tool", _join(item.output)), MessageCalls(result=result)
    role = "system" if item.role == "developer" else item.role
    return HistoryMessage(role, _join(item.content)), MessageCalls(closes=False)


def _join(parts: Sequence[_Part]) -> str:
    return "\n".join(part.text for part in parts)


def _write_choice(choice: Any, call: ModelCall) -> Any:
    """A tool choice as the request has it, if it holds."""
    if choice is None or (call.constraint is None and choice.choice().calls != "none"):
        return "auto"
    written = choice.model_dump()
    return written["type"] if len(written) == 1 else written


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish in ("length", "abort") else "completed"


def _usage(completion: Completion) -> dict[str, Any]:
    sampled = len(completion.pieces)
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": completion.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": completion.prompt_tokens + sampled,
    }


DIALECT = Dialect(ResponsesExchange, openai_error)
