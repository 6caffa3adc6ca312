"""DeepSeek's calls: V3 and R1 with JSON in a fence, V3.1 with bare JSON.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import DEEPSEEK_TAGS
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError
from seeupo_jax.envs.tool_formats.tool_format import (
    CallGrammar,
    Tag,
    expect,
    format_after,
    json_arguments,
    json_text,
    literal,
    read_arguments,
    read_section,
    read_until,
)

_SECTION, _SECTION_END, _CALL, _CALL_END, _SEP = DEEPSEEK_TAGS
_KIND, _FENCE, _FENCE_END = "function", "```json\n", "\n```"


def _fenced(text: str, start: int) -> tuple[ToolCall, int]:
    _, end = read_until(text, start, _SEP)
    name, end = read_until(text, end, "\n")
    call, end = read_arguments(text, expect(text, end, "```json"), _named(name))
    return call, expect(text, expect(text, end, "```"), _CALL_END)


def _bare(text: str, start: int) -> tuple[ToolCall, int]:
    name, end = read_until(text, start, _SEP)
    call, end = read_arguments(text, end, _named(name))
    return call, expect(text, end, _CALL_END)


def _named(name: str) -> str:
    if not name or "\n" in name or "<" in name:
        raise ToolCallError(f"a tool call needs a name, not {name[:40]!r}")
    return name


def _write(content: str, calls: Sequence[ToolCall], *, fenced: bool) -> Iterable[str]:
    yield content
    if not calls:
        return
    yield Tag(_SECTION)
    for index, call in enumerate(calls):
        yield "\n" * bool(index and fenced)
        yield Tag(_CALL)
        yield _KIND if fenced else call.name
        yield Tag(_SEP)
        text = json_text(call.arguments)
        yield f"{call.name}\n{_FENCE}{text}{_FENCE_END}" if fenced else text
        yield Tag(_CALL_END)
    yield Tag(_SECTION_END)


def _write_v3(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    return _write(content, calls, fenced=True)


def _write_v31(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    return _write(content, calls, fenced=False)


def _call_v3(name: str, schema: Mapping[str, Any]) -> str:
    head = literal(f"{_CALL}{_KIND}{_SEP}{name}\n{_FENCE}")
    return f"{head} {json_arguments(schema)} {literal(_FENCE_END + _CALL_END)}"


def _call_v31(name: str, schema: Mapping[str, Any]) -> str:
    return f"{literal(_CALL + name + _SEP)} {json_arguments(schema)} {literal(_CALL_END)}"


DEEPSEEK_V3 = format_after(
    _SECTION,
    "deepseek_v3",
    read_section(_SECTION, _SECTION_END, _CALL, _fenced),
    _write_v3,
    grammar=CallGrammar(_SECTION, _call_v3, r'"\n"', end=f'"{_SECTION_END}"'),
)
DEEPSEEK_V31 = format_after(
    _SECTION,
    "deepseek_v31",
    read_section(_SECTION, _SECTION_END, _CALL, _bare),
    _write_v31,
    grammar=CallGrammar(_SECTION, _call_v31, '""', end=f'"{_SECTION_END}"'),
)
