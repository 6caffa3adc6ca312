"""Gemma's calls: Python in a fence with the language `tool_code`, one call a line.

```tool_code
name(argument="value")
```
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.tool_calls import (
    ToolCall,
    ToolCallError,
    no_duplicates,
    read_lines,
    write_call,
)
from seeupo_jax.envs.tool_formats.tool_format import expect_end, format_after

_FENCE = "```tool_code"
_END = re.compile(r"\n[ \t]*```[ \t]*(?=\n|\Z)")


def _read(text: str, start: int, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    code, end = start + len(_FENCE), _END.search(text, start + len(_FENCE))
    # Of a block without its end the last line may not be complete.
    last = text.rfind("\n") if end is None else end.start()
    call = None
    for call in read_lines(text[code:last]):
        yield _name_arguments(call, tools)
    if end is None:
        raise ToolCallError("the block of calls must be closed by a line ```")
    if call is None:
        raise ToolCallError("the block of calls is empty")
    expect_end(text, end.end())


def _name_arguments(call: ToolCall, tools: Sequence[Tool]) -> ToolCall:
    """A call whose positional arguments have the names of the tool's first parameters."""
    if not call.positional:
        return call
    tool = next((tool for tool in tools if tool["name"] == call.name), {})
    names = list((tool.get("parameters") or {}).get("properties") or ())
    if len(names) < len(call.positional):
        raise ToolCallError(f"{call.name} has more arguments without a name than parameters")
    given = zip(names, call.positional, strict=False)
    return ToolCall(call.name, no_duplicates([*given, *call.arguments.items()]))


def _write(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    yield content
    if calls:
        yield "\n" * bool(content)
        yield f"{_FENCE}\n"
        yield "\n".join(map(write_call, calls))
        yield "\n```"


GEMMA = format_after(_FENCE, "gemma", _read, _write)
