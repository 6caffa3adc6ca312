"""One conversation as OpenAI and TRL write it, checked: `messages`, and optional `tools`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax.agents.dialects.result_order import (
    CHAT_PHRASES,
    CallReference,
    MessageCalls,
    UnmatchedResult,
    result_order,
)
from seeupo_jax.configuration.user_code import encodes
from seeupo_jax.envs.base import Demonstration, Tool
from seeupo_jax.envs.null_fields import NullCounts, drop_from_arguments, normal_tool
from seeupo_jax.tasks.row_list import short

ALLOWED = 'a JSON object with "messages", and perhaps "tools"'
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",  # OpenAI's later name
}
# Of a message; others may be there with null or empty.
_READ = ("role", "content")
_KEPT = ("name", "tool_call_id")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of one field
_OF_ASSISTANTS = ("tool_calls", *_THOUGHTS, "weight")


@dataclass(frozen=True)
class ReadConversation(Demonstration):
    """A conversation, and the nulls of its tools and calls."""

    nulls: NullCounts = field(default_factory=NullCounts)


def read_conversation(value: Mapping[str, Any], where: str) -> ReadConversation:
    """A conversation whose assistant messages are to be learned from.

    The arguments of tool calls become objects, tools their functions, and content a text; results
    stand as their calls do, and nulls that tables write for what is absent are left out. Other keys
    of the conversation than these two are not read.

    Args:
      where: it stands, in errors.

    Raises:
      ValueError: one sentence with `where`.
    """
    messages = _listed(value.get("messages"), f"{where}: messages", "a list of messages")
    read = tuple(_message(m, f"{where}: messages[{i}]") for i, m in enumerate(messages))
    roles = [message["role"] for message in read]
    if "assistant" not in roles:
        got = f"the roles {', '.join(dict.fromkeys(roles))}" if roles else "none"
        raise ValueError(f"{where}: messages: got {got}; allowed: at least one assistant message.")
    if roles[0] == "assistant":
        raise ValueError(
            f"{where}: messages[0]: got role 'assistant'; allowed: a message that it answers first."
        )
    weights = [m.get("weight", 1) for m in read if m["role"] == "assistant"]
    if not any(weights):
        raise ValueError(f"{where}: messages: got weight 0 for all; allowed: 1 for at least one.")
    given = value.get("tools")
    if isinstance(given, str):  # as tables hold it
        given = _json(given, f"{where}: tools")
    listed = () if given is None else _listed(given, f"{where}: tools", "a list of tools")
    nulls = NullCounts()
    try:
        tools = tuple(_tool(t, f"{where}: tools[{i}]", nulls) for i, t in enumerate(listed))
        messages = _without_nulls(_ordered(read, where), tools, nulls)
    except RecursionError:
        raise ValueError(f"{where}: got values nested too deep; allowed: a few levels.") from None
    return ReadConversation(messages, tools, nulls)


def _without_nulls(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], nulls: NullCounts
) -> tuple[dict[str, Any], ...]:
    """Messages whose calls have no nulls that their tools' schemas do not allow."""
    schemas = {tool["name"]: tool.get("parameters") for tool in tools}

    def cleaned(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        schema = schemas.get(function["name"])
        arguments = drop_from_arguments(function["arguments"], schema, nulls)
        return {**call, "function": {**function, "arguments": arguments}}

    return tuple(
        {**message, "tool_calls": [cleaned(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    )


def _ordered(messages: Sequence[dict[str, Any]], where: str) -> tuple[dict[str, Any], ...]:
    """Messages with results of tools in the order of their calls."""
    links = [_link(message, f"messages[{i}]") for i, message in enumerate(messages)]
    try:
        order = result_order(links, CHAT_PHRASES, ends=False)
    except UnmatchedResult as error:
        raise ValueError(f"{where}: {error}") from None
    return tuple(messages[place] for place in order)


def _link(message: Mapping[str, Any], place: str) -> MessageCalls:
    if message["role"] == "tool":
        field = f"{place}.tool_call_id"
        return MessageCalls(
            result=CallReference(message.get("tool_call_id"), field, message.get("name"))
        )
    calls = (
        CallReference(call.get("id"), f"{place}.tool_calls[{i}].id", call["function"]["name"])
        for i, call in enumerate(message.get("tool_calls", ()))
    )
    return MessageCalls(tuple(calls))


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: got {short(value)}; allowed: an object with role and content.")
    given = {name: item for name, item in value.items() if item is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"{where}.role: got {short(role)}; allowed: {', '.join(_ROLES)}.")
    allowed = (*_READ, *_KEPT, *(_OF_ASSISTANTS if role == "assistant" else ()))
    for name, item in given.items():
        if name not in allowed and item not in ("", [], {}):
            raise ValueError(
                f"{where}: got {short(name)} in a message of role {role}; allowed:"
                f" {', '.join(allowed)}."
            )
    given = {name: given[name] for name in allowed if name in given}
    message = {"role": _ROLES[role], "content": _content(given.get("content"), where)}
    message |= {n: _text(str(given[n]), f"{where}.{n}") for n in _KEPT if n in given}
    if given.get("weight", 1) not in (0, 1):
        raise ValueError(f"{where}.weight: got {short(given['weight'])}; allowed: 0 or 1.")
    if not given.get("weight", 1):
        message["weight"] = 0
    if thoughts := _thoughts(given, where):
        message["reasoning_content"] = thoughts
    if calls := given.get("tool_calls"):
        listed = _listed(calls, f"{where}.tool_calls", "a list of calls")
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(listed)
        ]
    content_keys = ("content", "tool_calls", "reasoning_content")
    if role == "assistant" and not any(message.get(name) for name in content_keys):
        raise ValueError(f"{where}: got no content; allowed: a text that is not empty.")
    if role != "assistant" and given.get("content") in (None, []):
        raise ValueError(
            f"{where}.content: got none in a message of role {role}; allowed: a text, or parts of"
            " type text."
        )
    return message


def _thoughts(given: Mapping[str, Any], where: str) -> str:
    """The thoughts of a message, whichever of their names it uses; several must agree."""
    found = {name: _text(given[name], f"{where}.{name}") for name in _THOUGHTS if given.get(name)}
    if len({*found.values()}) > 1:
        names = " and ".join(found)
        raise ValueError(f"{where}: got different thoughts in {names}; allowed: in one of them.")
    return next(iter(found.values()), "")


def _content(value: Any, where: str) -> str:
    """A text, also where it comes in parts, each then a line as at the endpoint; none is empty."""
    if value is None:
        return ""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return _text(value, f"{where}.content")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError(
                f"{where}.content[{i}]: got {short(part)}; allowed: parts of type text."
            )
        texts.append(_text(part.get("text"), f"{where}.content[{i}].text"))
    return "\n".join(texts)


def _call(value: Any, where: str) -> dict[str, Any]:
    """A call of a function, as chat templates read it."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise ValueError(f"{where}: got {short(value)}; allowed: a call of a function.")
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = {} if not arguments.strip() else _json(arguments, f"{where}.function.arguments")
    if not name or not isinstance(arguments, Mapping):
        raise ValueError(
            f"{where}.function: got {short(function)}; allowed: a name, and an object of arguments"
            " or its JSON."
        )
    _check_texts(arguments, f"{where}.function.arguments")
    given = {} if value.get("id") is None else {"id": _text(str(value["id"]), f"{where}.id")}
    return {**given, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(value: Any, where: str, nulls: NullCounts) -> Tool:
    inner = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ValueError(f"{where}: got {short(value)}; allowed: a function with a name.")
    _check_texts(inner, where)
    if (parameters := inner.get("parameters")) is not None:
        _check_parameters(parameters, f"{where}.parameters")
    return normal_tool(dict(inner), nulls)


def _check_parameters(value: Any, where: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: got {short(value)}; allowed: an object, a JSON schema.")
    properties = value.get("properties")
    if properties is not None and not isinstance(properties, Mapping):
        raise ValueError(f"{where}.properties: got {short(properties)}; allowed: an object.")
    required = value.get("required")
    if isinstance(required, str) or not isinstance(required, Sequence | None):
        raise ValueError(f"{where}.required: got {short(required)}; allowed: a list of names.")


def _listed(value: Any, where: str, allowed: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        got = "none" if value is None else short(value)
        raise ValueError(f"{where}: got {got}; allowed: {allowed}.")
    return value


def _text(value: Any, where: str) -> str:
    """JSON can hold half of a character, which no tokenizer can."""
    if not isinstance(value, str) or not encodes(value):
        raise ValueError(f"{where}: got {short(value)}; allowed: a text.")
    return value


def _check_texts(value: Any, where: str) -> None:
    if not encodes(json.dumps(value, ensure_ascii=False)):
        got = f"{short(value)}, with half of a character"
        raise ValueError(f"{where}: got {got}; allowed: texts that UTF-8 can encode.")


def _json(value: str, where: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: got {short(value)}; allowed: JSON.") from None
