"""Strict readers of the tool calls in a model's response."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCallError(ValueError):
    """A response that holds no readable tool call; the text says why, for the model to read."""


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


def render_hermes(name: str, /, **arguments: Any) -> str:
    """A tool call in the Hermes/Qwen form."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def parse_hermes(text: str) -> tuple[ToolCall, ...]:
    """The calls of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks, in order.

    Text before and between the blocks is allowed (reasoning); an unclosed block, text after the
    last block, keys other than the two and duplicate keys are not. No block at all: ().

    Raises:
      ToolCallError: a block that breaks the form.
    """
    calls = tuple(_read_block(match.group(1)) for match in _BLOCK.finditer(text))
    rest = _BLOCK.sub("", text)
    if "<tool_call>" in rest or "</tool_call>" in rest:
        raise ToolCallError("every <tool_call> needs its </tool_call>")
    if calls and text[text.rindex("</tool_call>") + len("</tool_call>") :].strip():
        raise ToolCallError("nothing may follow the last </tool_call>")
    return calls


def _read_block(block: str) -> ToolCall:
    try:
        value = json.loads(block, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ToolCallError(f"a tool call must be one JSON object: {error}") from None
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        raise ToolCallError('a tool call has exactly the keys "name" and "arguments"')
    if not isinstance(value["name"], str) or not isinstance(value["arguments"], dict):
        raise ToolCallError('"name" must be a string and "arguments" an object')
    return ToolCall(value["name"], value["arguments"])


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ToolCallError("a key occurs twice in one object")
    return result
