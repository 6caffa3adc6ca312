"""Kimi's calls (K2): a section of calls, each with an id that names the tool and counts calls.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>, all without line breaks
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import KIMI_TAGS, Tool
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, decode_json, within_bounds
from seeupo_jax.envs.tool_formats.tool_format import (
    CallGrammar,
    Reading,
    Tag,
    ToolFormat,
    as_object,
    expect,
    json_arguments,
    json_text,
    literal,
    read_after,
    read_until,
    shown_before,
    skip_space,
)

_SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS = KIMI_TAGS
_NAMED = re.compile(r"(?:functions\.)?([^\n]+):(\d+)")


def _read(text: str, tools: Sequence[Tool]) -> Reading:
    return read_after(text, _SECTION, _read_section)


def _read_section(text: str, start: int) -> tuple[list[ToolCall], int]:
    end, calls = start + len(_SECTION), list[ToolCall]()
    while text.startswith(_CALL, skip_space(text, end)):
        given, end = read_until(text, expect(text, end, _CALL), _ARGUMENTS)
        named = _NAMED.fullmatch(given)
        if named is None:
            raise ToolCallError(f"a tool call needs functions.NAME:NUMBER, not {given[:40]!r}")
        value, end = decode_json(text, end)
        end = expect(text, end, _CALL_END)
        calls.append(within_bounds(ToolCall(named[1], as_object(value), id=given)))
    if not calls:
        raise ToolCallError(f"after {_SECTION} a {_CALL} must follow")
    return calls, expect(text, end, _SECTION_END)


def _write(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    if not calls:
        return
    yield Tag(_SECTION)
    for index, call in enumerate(calls):
        yield Tag(_CALL)
        yield _call_id(call, index)
        yield Tag(_ARGUMENTS)
        yield json_text(call.arguments)
        yield Tag(_CALL_END)
    yield Tag(_SECTION_END)


def _call_id(call: ToolCall, number: int) -> str:
    named = _NAMED.fullmatch(call.id)
    # An id of another origin says nothing to the model.
    return call.id if named and named[1] == call.name else f"functions.{call.name}:{number}"


def _call(name: str, schema: Mapping[str, Any]) -> str:
    head = f"{literal(f'{_CALL}functions.{name}:')} /[0-9]{{1,4}}/ {literal(_ARGUMENTS)}"
    return f"{head} {json_arguments(schema)} {literal(_CALL_END)}"


KIMI = ToolFormat(
    "kimi",
    _read,
    _write,
    shown_before(_SECTION),
    grammar=CallGrammar(_SECTION, _call, '""', end=f'"{_SECTION_END}"'),
    call_id=_call_id,
)
