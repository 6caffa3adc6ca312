"""Formats in which the `bfcl` environment lists tools and the policy writes calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.bfcl.benchmark_files import Doc, read_docs
from seeupo_jax.envs.bfcl.simulated_apis import World, official
from seeupo_jax.envs.tool_calls import ToolCall, parse_python, render_python
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat

_SYSTEM = (
    "Do what the user asks with the tools. To call one, write {}; calls run in order."
    " When the request is done, or a tool or a detail that it needs is missing, write a message"
    " without a call."
)
SYSTEM = _SYSTEM.format('<tool_call>{"name": NAME, "arguments": {...}}</tool_call>')

# JSON schema's names of types that the official docs name as Python does; others are the same.
_SCHEMA_TYPES = {"dict": "object", "float": "number"}
# The official loader appends it to the description of every tool.
_HINT = " Note that the provided function is in Python 3 syntax."


@dataclass(frozen=True)
class Format:
    """A format of tool calls.

    begin: from the tools' docs and `compact`, makes the system message and the tools that the chat
      template lists.
    add: from the docs of later tools and `compact`, makes the user message that adds them.
    parse: from a message and the task's tools, reads the calls.
    render: writes a message with at least one call.
    solve: from a world and a reference call, makes the call as the oracle writes it.
    tags: of calls, which are no leaked control tokens.
    single: whether a message has at most one call.
    """

    begin: Callable[[Sequence[Doc], bool], tuple[str, tuple[Tool, ...]]]
    add: Callable[[Sequence[Doc], bool], str]
    parse: Callable[[str, Sequence[Tool]], tuple[ToolCall, ...]]
    render: Callable[[Sequence[ToolCall]], str]
    solve: Callable[[World, str], ToolCall]
    tags: frozenset[str] = frozenset()
    single: bool = False

    def without_tags(self, text: str) -> str:
        """A message without the tags of calls."""
        for tag in self.tags:
            text = text.replace(tag, "")
        return text


def to_tool(doc: Doc, compact: bool) -> Tool:
    """Converts an official doc to JSON schema, without the tool's return value.

    Args:
      compact: omit the sentence about the tool's class.
    """
    text = _own_description(doc) if compact else doc["description"]
    return {"name": doc["name"], "description": text, "parameters": _to_schema(doc["parameters"])}


def _to_schema(doc: dict[str, Any]) -> dict[str, Any]:
    """Converts a parameter's official description to JSON schema, recursively."""
    schema = {**doc, "type": _SCHEMA_TYPES.get(doc["type"], doc["type"])}
    if "properties" in doc:
        schema["properties"] = {key: _to_schema(part) for key, part in doc["properties"].items()}
    if "items" in doc:
        schema["items"] = _to_schema(doc["items"])
    return schema


def _own_description(doc: Doc) -> str:
    return doc["description"].rpartition("Tool description: ")[2]


def _prompts() -> Any:
    return official("bfcl_eval.constants.default_prompts")


@lru_cache
def known_tools(classes: tuple[str, ...]) -> tuple[Tool, ...]:
    """The tools of simulators, by whose schemas calls are read."""
    return tuple(to_tool(doc, compact=True) for name in classes for doc in read_docs(name))


def _listed(tool_format: ToolFormat) -> Format:
    """A format of models, whose tools the chat template lists."""
    shown = "a call in this form:\n" + tool_format.example + "\n"
    system = SYSTEM if tool_format.name == "hermes" else _SYSTEM.format(shown)

    def begin(docs: Sequence[Doc], compact: bool) -> tuple[str, tuple[Tool, ...]]:
        return system, tuple(to_tool(doc, compact) for doc in docs)

    def parse(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        return tool_format.read(text, tools).calls

    def render(calls: Sequence[ToolCall]) -> str:
        return tool_format.render("", calls)

    single = tool_format is TOOL_FORMATS["harmony"]
    return Format(begin, _add_listed, parse, render, World.read, tool_format.own_tags, single)


def _add_listed(docs: Sequence[Doc], compact: bool) -> str:
    # Chat templates list tools only at the start, so later tools are listed in a message in their
    # form.
    lines = [json.dumps({"type": "function", "function": to_tool(doc, compact)}) for doc in docs]
    return _added("\n".join(["<tools>", *lines, "</tools>"]))


def _added(listing: str) -> str:
    """The official user message that adds tools."""
    prompt = _prompts().DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    return prompt.format(functions=listing)


def _begin_python(docs: Sequence[Doc], compact: bool) -> tuple[str, tuple[Tool, ...]]:
    prompts = _prompts()
    style = prompts.PROMPT_STYLE_TEMPLATES["classic"]
    listing = _list_shortly(docs) if compact else json.dumps(_with_hint(docs), indent=4)
    form = style["tool_call_no_tag"].format(
        output_format=prompts.OUTPUT_FORMAT_MAPPING["python"],
        param_types=prompts.PARAM_TYPE_MAPPING["python"],
    )
    text = prompts.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
        persona=style["persona"],
        task=style["task"],
        tool_call_format=form,
        multiturn_behavior=style["multiturn_behavior"],
        available_tools=style["available_tools"].format(format="json", functions=listing),
    )
    return text, ()


def _add_python(docs: Sequence[Doc], compact: bool) -> str:
    return _added(_list_shortly(docs) if compact else repr(_with_hint(docs)))


def _list_shortly(docs: Sequence[Doc]) -> str:
    """Lists one tool per line, with its own description and without its return value."""
    rows = [doc | {"description": _own_description(doc)} for doc in docs]
    lines = [json.dumps({key: row[key] for key in row if key != "response"}) for row in rows]
    return f"[{f',{chr(10)}'.join(lines)}]"


def _with_hint(docs: Sequence[Doc]) -> list[Doc]:
    return [doc | {"description": doc["description"] + _HINT} for doc in docs]


def _parse_python(text: str, _: Sequence[Tool]) -> tuple[ToolCall, ...]:
    return parse_python(text)


def _read_positional(_: World, source: str) -> ToolCall:
    (call,) = parse_python(f"[{source}]")
    return call


FORMATS = {
    "hermes": _listed(TOOL_FORMATS["hermes"]),
    # The leaderboard's prompting format `[f(x=1), g()]`; the system message lists the tools.
    "python": Format(_begin_python, _add_python, _parse_python, render_python, _read_positional),
    **{name: _listed(form) for name, form in TOOL_FORMATS.items() if name != "hermes"},
}
