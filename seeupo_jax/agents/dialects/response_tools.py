"""Tools of OpenAI's responses: functions, functions of a namespace, custom tools, the server's own.

The policy sees functions. One of a namespace has the namespace in its name, and a custom tool,
whose input is a text, is a function with one argument. Their calls are sent back as the client's
own. Tools that OpenAI's servers would run, such as web search, are not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from seeupo_jax.agents.dialects.exchange import (
    Caller,
    clients_tools,
    show_tools,
    write_arguments,
)
from seeupo_jax.agents.dialects.request_body import Fields, ServerTool, by_type, refuse
from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.tool_calls import ToolCall

INPUT = "input"  # the argument of a custom tool
_CUSTOM = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


class FunctionTool(Fields):
    """A function of the client."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(Fields):
    """A tool of the client whose input is a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None  # a grammar, which does not constrain the text here
    defer_loading: bool | None = None


class NamespaceTool(Fields):
    """Tools of the client in a namespace, such as those of a server of MCP."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[by_type(function=FunctionTool, custom=CustomTool)]


ResponseTool = by_type(
    other=ServerTool, function=FunctionTool, custom=CustomTool, namespace=NamespaceTool
)


class _Named(NamedTuple):
    """A tool of the client, as the policy sees it.

    namespace: that it is in; None: none.
    """

    tool: FunctionTool | CustomTool
    namespace: str | None

    @property
    def name(self) -> str:
        return shown_name(self.tool.name, self.namespace)

    @property
    def description(self) -> str | None:
        return self.tool.description


def shown_name(name: str, namespace: str | None) -> str:
    """A tool's name as the policy sees it."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class ResponseTools:
    """The tools of a request.

    Raises:
      CallRefused: two tools would have one name.
    """

    def __init__(self, given: Sequence[Any], caller: Caller):
        named = list(_named(given, caller))
        self._by_name = {each.name: each for each in named}
        if len(self._by_name) < len(named):
            names = [each.name for each in named]
            twice = next(name for name in names if names.count(name) > 1)
            refuse("tools", f"tools: got two named {twice[:80]!r}; allowed: one of each name.")
        functions = [(each, _schema(each.tool)) for each in named]
        self.shown: tuple[Tool, ...] = show_tools(functions, caller)

    def write(self, call: ToolCall) -> dict[str, Any]:
        """A call as an item, without its ids and its status."""
        named = self._by_name.get(call.name)
        if named is None:
            return _function_call(call.name, call.arguments)
        inside = {} if named.namespace is None else {"namespace": named.namespace}
        name = named.tool.name
        if isinstance(named.tool, CustomTool):
            text = call.arguments.get(INPUT, "")
            text = text if isinstance(text, str) else write_arguments(call.arguments)
            return {"type": "custom_tool_call", "name": name, **inside, "input": text}
        return _function_call(name, call.arguments) | inside


def echo_tools(given: Sequence[Any], *, strict: bool) -> list[dict[str, Any]]:
    """The tools as a response lists them: those that the policy saw, by the fields that it saw.

    Args:
      strict: whether calls follow the schemas.
    """
    return [_echo(tool, strict) for tool in given if not isinstance(tool, ServerTool)]


def _echo(tool: Any, strict: bool) -> dict[str, Any]:
    named = {"type": tool.type, "name": tool.name, "description": tool.description}
    if isinstance(tool, NamespaceTool):
        return named | {"tools": echo_tools(tool.tools, strict=strict)}
    if isinstance(tool, CustomTool):
        return named
    return named | {"parameters": tool.parameters, "strict": strict}


def _named(given: Sequence[Any], caller: Caller) -> Iterator[_Named]:
    for tool in clients_tools(given, caller):
        if isinstance(tool, NamespaceTool):
            yield from (_Named(each, tool.name) for each in tool.tools)
        else:
            yield _Named(tool, None)


def _schema(tool: FunctionTool | CustomTool) -> dict[str, Any] | None:
    return _CUSTOM if isinstance(tool, CustomTool) else tool.parameters


def _function_call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": write_arguments(arguments)}
