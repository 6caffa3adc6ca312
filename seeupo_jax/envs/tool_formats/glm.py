"""GLM's calls (4.5 and later): keys and values in tags, values that are no text as JSON.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

GLM 4.7 writes no line breaks between the tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import CALL, CALL_END, GLM_TAGS, Tool
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, no_duplicates, within_bounds
from seeupo_jax.envs.tool_formats.tool_format import (
    CallGrammar,
    Tag,
    expect,
    format_after,
    json_text,
    literal,
    read_each,
)
from seeupo_jax.envs.tool_formats.typed_values import ANY, argument_schema, typed_value
from seeupo_jax.envs.tool_formats.value_grammar import VALUE_RULES, value_rule

_KEY, _KEY_END, _VALUE, _VALUE_END = GLM_TAGS
_HEAD = re.compile(rf"\s*{CALL}([^<>]+?)\s*(?={_KEY}|{CALL_END})")
_ARGUMENT = re.compile(rf"\s*{_KEY}([^<>\n]+){_KEY_END}\s*{_VALUE}")
# A value may have the closing tag itself, but not with what follows a value.
_ENDING = re.compile(rf"{_VALUE_END}(?=\s*(?:{_KEY}|{CALL_END}))")


def _read_call(text: str, head: re.Match[str], tools: Sequence[Tool]) -> tuple[ToolCall, int]:
    name, end, arguments = head[1].strip(), head.end(), list[tuple[str, Any]]()
    while argument := _ARGUMENT.match(text, end):
        key, ending = argument[1].strip(), _ENDING.search(text, argument.end())
        if ending is None:
            raise ToolCallError(f"every {_VALUE} needs its {_VALUE_END}")
        value = text[argument.end() : ending.start()]
        arguments.append((key, typed_value(value, argument_schema(tools, name, key), ANY)))
        end = ending.end()
    end = expect(text, end, CALL_END)
    return within_bounds(ToolCall(name, no_duplicates(arguments))), end


def _write(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    for index, call in enumerate(calls):
        yield "\n" * bool(content or index)
        yield Tag(CALL)
        yield f"{call.name}\n"
        for key, value in call.arguments.items():
            yield Tag(_KEY)
            yield key
            yield Tag(_KEY_END)
            yield "\n"
            yield Tag(_VALUE)
            yield value if isinstance(value, str) else json_text(value)
            yield Tag(_VALUE_END)
            yield "\n"
        yield Tag(CALL_END)


def _call(name: str, schema: Mapping[str, Any]) -> str:
    parts = [rf'{literal(name)} "\n"']
    required = schema.get("required", ())
    for key, value in schema.get("properties", {}).items():
        written = value_rule(value, schema, "glm_text", rf'"{_VALUE_END}\n"')
        part = rf'{literal(f"{_KEY}{key}{_KEY_END}")} "\n{_VALUE}" {written}'
        parts.append(part if key in required else f"({part})?")
    return " ".join([*parts, f'"{CALL_END}"'])


GLM = format_after(
    CALL,
    "glm",
    read_each(_HEAD, _read_call, f"a tool call must begin with {CALL} and a name"),
    _write,
    grammar=CallGrammar(
        CALL,
        _call,
        rf'"\n" "{CALL}"',
        rules=VALUE_RULES.format(name="glm_text", end=rf"{_VALUE_END}\n"),
        excluded=(CALL_END,),
    ),
)
