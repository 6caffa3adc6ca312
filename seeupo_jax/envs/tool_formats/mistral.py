"""Mistral's calls: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and since tokenizer v11
`[TOOL_CALLS]NAME[ARGS]{...}`, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import MISTRAL_TAGS, Tool
from seeupo_jax.envs.tool_calls import ToolCall, call_of_object, decode_json
from seeupo_jax.envs.tool_formats.tool_format import (
    CallGrammar,
    Tag,
    expect,
    expect_end,
    format_after,
    json_arguments,
    json_text,
    literal,
    read_arguments,
    read_each,
    skip_space,
)

_CALLS, _ARGS, _ID = MISTRAL_TAGS
_NINE = re.compile("[A-Za-z0-9]{9}")
_HEAD = re.compile(
    rf"\s*{re.escape(_CALLS)}\s*([^\[\]\n]+?)\s*"
    rf"(?:{re.escape(_ID)}\s*([^\[\]\n]+?)\s*)?{re.escape(_ARGS)}"
)


def _read_list(text: str, start: int, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    place, more = expect(text, start + len(_CALLS), "["), True
    while more:
        value, place = decode_json(text, place)
        yield _read_object(value)
        place = skip_space(text, place)
        more = text.startswith(",", place)
        place += more
    expect_end(text, expect(text, place, "]"))


def _read_object(value: Any) -> ToolCall:
    """A call; some versions of the format give it an id."""
    named = dict(value) if isinstance(value, dict) else value
    given = named.pop("id", "") if isinstance(named, dict) else ""
    call = call_of_object(named, "arguments")
    return ToolCall(call.name, call.arguments, id=given if isinstance(given, str) else "")


def _write_list(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    if calls:
        yield Tag(_CALLS)
        named = [{"name": call.name, "arguments": call.arguments} for call in calls]
        yield f" {json_text(named)}"


def _call_in_list(name: str, schema: Mapping[str, Any]) -> str:
    head = rf'"{{\"name\":" " "? {literal(json_text(name))} "," " "? "\"arguments\":" " "?'
    return f'{head} {json_arguments(schema)} "}}"'


def _read_args(text: str, head: re.Match[str], tools: Sequence[Tool]) -> tuple[ToolCall, int]:
    return read_arguments(text, head.end(), head[1], head[2] or "")


def _write_args(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    for call in calls:
        yield Tag(_CALLS)
        yield call.name
        yield Tag(_ARGS)
        yield json_text(call.arguments)


def _call_with_args(name: str, schema: Mapping[str, Any]) -> str:
    return f"{literal(name + _ARGS)} {json_arguments(schema)}"


def _call_id(call: ToolCall, number: int) -> str:
    """Nine letters and digits, which the templates ask for."""
    return call.id if _NINE.fullmatch(call.id) else f"call{number:05d}"


MISTRAL = format_after(
    _CALLS,
    "mistral",
    _read_list,
    _write_list,
    grammar=CallGrammar(_CALLS, _call_in_list, '", "', '" "? "["', '"]"'),
    call_id=_call_id,
)
MISTRAL_ARGS = format_after(
    _CALLS,
    "mistral_args",
    read_each(_HEAD, _read_args, f"a tool call must begin with {_CALLS}NAME{_ARGS}"),
    _write_args,
    grammar=CallGrammar(_CALLS, _call_with_args, f'"{_CALLS}"'),
    call_id=_call_id,
)
