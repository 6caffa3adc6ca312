"""Ids of calls, for templates that write them: Mistral's and Kimi's.

A result names the id of its call. The model writes ids of its own into its calls, where its format
has them; others are made here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import Message
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat

_RESULT_ID = "tool_call_id"
_READS_IDS = re.compile(r"\b(tool_call_)?id\b")


def id_formats(template: str) -> tuple[ToolFormat, ...]:
    """The formats with ids whose calls a template may write, if it reads ids."""
    if not _READS_IDS.search(template):
        return ()
    return tuple(
        each for each in TOOL_FORMATS.values() if each.call_id and each.opening in template
    )


def call_fields(text: str, template: str) -> dict[str, Any] | None:
    """An action as a message with calls in fields; None: it has none with ids.

    Of one that ends within a call the complete ones count, since an action may be cut.
    """
    for tool_format in id_formats(template):
        content, calls = tool_format.parse(text)
        if not calls:
            content, calls = tool_format.parse(text, cut=True)
        if calls:
            written = list(map(as_function, calls))
            return {"role": "assistant", "content": content, "tool_calls": written}
    return None


def as_function(call: ToolCall) -> dict[str, Any]:
    """A call in the form of chat templates."""
    function = {"name": call.name, "arguments": call.arguments}
    return ({"id": call.id} if call.id else {}) | {"type": "function", "function": function}


def with_ids(messages: Sequence[Message], template: str) -> list[Any]:
    """The messages with ids of calls in their template's form, and of results those of their calls.

    Results without an id are in the order of the calls. One that answers no call gets an id too,
    since Mistral's templates refuse a result without.
    """
    form, *_ = id_formats(template)
    made, waiting, count = list[Any](), list[tuple[str, str]](), 0
    for message in messages:
        if message["role"] == "tool":
            given = message.get(_RESULT_ID, "")
            place = next((i for i, pair in enumerate(waiting) if given == pair[0]), 0)
            _, used = waiting.pop(place) if waiting else ("", _made_id(form, "", count))
            made.append({**message, _RESULT_ID: used})
            continue
        fields = message
        if message["role"] == "assistant" and not message.get("tool_calls"):
            fields = call_fields(message["content"], template) or message
        calls = [_with_id(call, form, count + i) for i, call in enumerate(_calls(fields))]
        given_ids = (call.get("id", "") for call in _calls(fields))
        waiting = list(zip(given_ids, (call["id"] for call in calls), strict=True))
        count += len(calls)
        made.append({**message, "tool_calls": calls} if message.get("tool_calls") else message)
    return made


def _calls(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    return message.get("tool_calls") or ()


def _with_id(call: dict[str, Any], form: ToolFormat, number: int) -> dict[str, Any]:
    return {**call, "id": _made_id(form, call["function"]["name"], number, call.get("id") or "")}


def _made_id(form: ToolFormat, name: str, number: int, given: str = "") -> str:
    assert form.call_id is not None  # as `id_formats` says
    return form.call_id(ToolCall(name, {}, id=given), number)
