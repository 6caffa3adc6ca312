"""Hermes' and Qwen's calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import CALL, CALL_END, Tool
from seeupo_jax.envs.tool_calls import ToolCall, read_hermes, render_hermes
from seeupo_jax.envs.tool_formats.tool_format import (
    CallGrammar,
    Reading,
    Tag,
    ToolFormat,
    complete_calls,
    json_arguments,
    json_text,
    literal,
    shown_before,
)


def _read(text: str, tools: Sequence[Tool], cut: bool = False) -> Reading:
    blocks = complete_calls(read_hermes(text), cut=cut)
    end = blocks[-1].end if blocks else len(text)  # only space follows, unless it was cut
    starts = [*(block.start for block in blocks), end]
    ends = [0, *(block.end for block in blocks)]
    outside = (text[end:start] for end, start in zip(ends, starts, strict=True))
    return Reading("".join(outside), tuple(block.call for block in blocks))


def _write(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    for index, call in enumerate(calls):
        yield "\n" * bool(content or index)
        yield Tag(CALL)
        text = render_hermes(call.name, **call.arguments)
        yield text.removeprefix(CALL).removesuffix(CALL_END)
        yield Tag(CALL_END)


def _call(name: str, schema: Mapping[str, Any]) -> str:
    quoted = literal(json_text(name))
    head = rf'"\n"? "{{\"name\":" " "? {quoted} "," " "? "\"arguments\":" " "?'
    return rf'{head} {json_arguments(schema)} "}}" "\n"? "</tool_call>"'


HERMES = ToolFormat(
    "hermes",
    _read,
    _write,
    shown_before(CALL),
    grammar=CallGrammar(CALL, _call, rf'"\n"? "{CALL}"', excluded=(CALL_END,)),
)
