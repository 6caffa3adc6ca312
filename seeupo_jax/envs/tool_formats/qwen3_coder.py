"""Qwen3-Coder's and Qwen3.5's calls: a block for each argument, whose value is plain text.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import CALL, CALL_END, Tool
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, no_duplicates, within_bounds
from seeupo_jax.envs.tool_formats.tool_format import (
    CallGrammar,
    Tag,
    format_after,
    json_text,
    literal,
    read_each,
)
from seeupo_jax.envs.tool_formats.typed_values import argument_schema, typed_value
from seeupo_jax.envs.tool_formats.value_grammar import VALUE_RULES, value_rule

_HEAD = re.compile(rf"\s*{CALL}\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
# A value may have the closing tag itself, but not with what follows a value.
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_TAIL = re.compile(rf"\s*</function>\s*{CALL_END}")


def _read_call(text: str, head: re.Match[str], tools: Sequence[Tool]) -> tuple[ToolCall, int]:
    name, end, arguments = head[1].strip(), head.end(), list[tuple[str, Any]]()
    while parameter := _PARAMETER.match(text, end):
        key, closing = parameter[1].strip(), _VALUE_END.search(text, parameter.end())
        if closing is None:
            raise ToolCallError("every <parameter=KEY> needs its </parameter>")
        value = text[parameter.end() : closing.start()].removeprefix("\n").removesuffix("\n")
        schema = argument_schema(tools, name, key)
        arguments.append((key, typed_value(value, schema, "string")))
        end = closing.end()
    tail = _TAIL.match(text, end)
    if tail is None:
        raise ToolCallError(f"every <function=NAME> needs its </function> and {CALL_END}")
    return within_bounds(ToolCall(name, no_duplicates(arguments))), tail.end()


def _write(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    for index, call in enumerate(calls):
        yield "\n" if index else "\n\n" * bool(content)
        yield Tag(CALL)
        parameters = (
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        yield f"\n<function={call.name}>\n{''.join(parameters)}</function>\n"
        yield Tag(CALL_END)


def _text(value: Any) -> str:
    """A value as Qwen's templates write it: objects and lists as JSON, all others as Python."""
    return json_text(value) if isinstance(value, dict | list | tuple) else str(value)


def _call(name: str, schema: Mapping[str, Any]) -> str:
    parts = [rf'"\n<function=" {literal(name + ">")} "\n"']
    required = schema.get("required", ())
    for key, value in schema.get("properties", {}).items():
        written = value_rule(value, schema, "qwen_text", r'"\n</parameter>\n"')
        part = rf'{literal(f"<parameter={key}>")} "\n" {written}'
        parts.append(part if key in required else f"({part})?")
    return " ".join([*parts, rf'"</function>\n{CALL_END}"'])


QWEN3_CODER = format_after(
    CALL,
    "qwen3_coder",
    read_each(_HEAD, _read_call, f"a tool call must begin with {CALL} and <function=NAME>"),
    _write,
    grammar=CallGrammar(
        CALL,
        _call,
        rf'"\n" "{CALL}"',
        rules=VALUE_RULES.format(name="qwen_text", end=r"\n</parameter>\n"),
        excluded=(CALL_END,),
    ),
)
