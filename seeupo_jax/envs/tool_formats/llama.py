"""Llama 3's calls: `{"name": ..., "parameters": {...}}`, and `<function=NAME>{...}</function>`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import PYTHON_TAG, Tool
from seeupo_jax.envs.thoughts import thoughts_end
from seeupo_jax.envs.tool_calls import ToolCall, read_llama
from seeupo_jax.envs.tool_formats.tool_format import (
    CallGrammar,
    Reading,
    Tag,
    ToolFormat,
    complete_calls,
    expect,
    format_after,
    json_arguments,
    json_text,
    literal,
    read_arguments,
    read_each,
    text_before,
)

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_HEAD = re.compile(r"\s*<function=([^<>\n]+)>")


def _read_json(text: str, tools: Sequence[Tool], cut: bool = False) -> Reading:
    calls = complete_calls(read_llama(text), cut=cut)
    start = thoughts_end(text)
    rest = text[start:]
    before = "" if rest.lstrip().startswith("{") else rest.partition(PYTHON_TAG)[0]
    return Reading(text[:start] + before, calls)


def _write_json(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    if calls and content:
        yield Tag(PYTHON_TAG)
    objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
    yield "; ".join(map(json_text, objects))


def _shown_json(text: str) -> str:
    start = thoughts_end(text)
    mark = "{" if text[start:].lstrip()[:1] in ("", "{") else PYTHON_TAG
    return text[: text_before(text, mark, start)]


def _call_json(name: str, schema: Mapping[str, Any]) -> str:
    head = rf'"{{\"name\":" " "? {literal(json_text(name))} "," " "? "\"parameters\":" " "?'
    return f'{head} {json_arguments(schema)} "}}"'


def _read_function(text: str, head: re.Match[str], tools: Sequence[Tool]) -> tuple[ToolCall, int]:
    call, end = read_arguments(text, head.end(), head[1].strip())
    return call, expect(text, end, _FUNCTION_END)


def _write_functions(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    for index, call in enumerate(calls):
        yield "\n" * bool(content or index)
        yield f"{_FUNCTION}{call.name}>{json_text(call.arguments)}{_FUNCTION_END}"


def _call_function(name: str, schema: Mapping[str, Any]) -> str:
    return f'{literal(name + ">")} {json_arguments(schema)} "{_FUNCTION_END}"'


LLAMA = ToolFormat(
    "llama",
    _read_json,
    _write_json,
    _shown_json,
    mark=PYTHON_TAG,
    grammar=CallGrammar("", _call_json, '"; "'),
)
LLAMA_FUNCTION = format_after(
    _FUNCTION,
    "llama_function",
    read_each(_HEAD, _read_function, "a tool call must begin with <function=NAME>"),
    _write_functions,
    grammar=CallGrammar(_FUNCTION, _call_function, rf'"\n"? "{_FUNCTION}"'),
)
