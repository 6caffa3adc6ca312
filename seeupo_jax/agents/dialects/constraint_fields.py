"""Request fields that determine the form of an answer: forced calls, and JSON instead of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic

from seeupo_jax.agents.dialects.exchange import Caller
from seeupo_jax.agents.dialects.request_body import Fields, by_type, refuse
from seeupo_jax.envs.base import Tool
from seeupo_jax.rollout.engine.constraints import check_schema
from seeupo_jax.rollout.engine.protocol import Constraint

_OBJECT = {"type": "object"}


class ToolChoice(NamedTuple):
    """Whether an answer calls tools (none | may | must), and which; no names: any."""

    calls: str = "may"
    names: tuple[str, ...] = ()


class _Word(Fields):
    type: Literal["auto", "none", "required"]

    def choice(self) -> ToolChoice:
        return ToolChoice({"auto": "may", "none": "none", "required": "must"}[self.type])


class _Name(Fields):
    name: str


class ChatFunction(Fields):
    """A function as chat completions name it."""

    type: Literal["function"]
    function: _Name

    def choice(self) -> ToolChoice:
        return ToolChoice("must", (self.function.name,))


class NamedFunction(Fields):
    """A function as responses name it."""

    type: Literal["function"]
    name: str

    def choice(self) -> ToolChoice:
        return ToolChoice("must", (self.name,))


class _Allowed(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChatFunction], pydantic.Field(min_length=1)]


class ChatAllowedTools(Fields):
    """The tools that may be called, as chat completions have them."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed

    def choice(self) -> ToolChoice:
        return _some_of(self.allowed_tools.mode, self.allowed_tools.tools)


class AllowedTools(Fields):
    """The tools that may be called, as responses have them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], pydantic.Field(min_length=1)]

    def choice(self) -> ToolChoice:
        return _some_of(self.mode, self.tools)


def _some_of(mode: str, tools: Sequence[ChatFunction | NamedFunction]) -> ToolChoice:
    names = tuple(name for tool in tools for name in tool.choice().names)
    return ToolChoice("may" if mode == "auto" else "must", names)


def _by_word(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def tool_choice(function: type[Fields], allowed: type[Fields]) -> Any:
    """The field `tool_choice` of OpenAI's APIs, which differ in these two forms."""
    words = dict.fromkeys(("auto", "none", "required"), _Word)
    either = by_type(**words, function=function, allowed_tools=allowed)
    return Annotated[either, pydantic.BeforeValidator(_by_word)]


class _Text(Fields):
    type: Literal["text"]


class _JsonObject(Fields):
    type: Literal["json_object"]


class Schema(Fields):
    """A JSON schema by its name."""

    json_schema: dict[str, Any] = pydantic.Field(alias="schema", default=_OBJECT)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # it always is


class _ChatSchema(Fields):
    type: Literal["json_schema"]
    json_schema: Schema


class _NamedSchema(Schema):
    type: Literal["json_schema"]


ChatFormat: Any = by_type(text=_Text, json_object=_JsonObject, json_schema=_ChatSchema)
TextFormat: Any = by_type(text=_Text, json_object=_JsonObject, json_schema=_NamedSchema)
MessageFormat: Any = by_type(json_schema=_NamedSchema)


def wanted_schema(wanted: Any, field: str) -> tuple[Mapping[str, Any] | None, str]:
    """The schema of one of the formats above, or None, and the field that holds it."""
    if wanted is None or isinstance(wanted, _Text):
        return None, field
    if isinstance(wanted, _JsonObject):
        return _OBJECT, field
    if isinstance(wanted, _ChatSchema):
        return wanted.json_schema.json_schema, f"{field}.json_schema.schema"
    return wanted.json_schema, f"{field}.schema"


def read_constraint(
    caller: Caller,
    choice: ToolChoice,
    tools: Sequence[Tool],
    wanted: tuple[Mapping[str, Any] | None, str],
    *,
    single: bool = False,
) -> Constraint | None:
    """The constraint of a request; None: its answer may have any form.

    Args:
      tools: that the policy is shown. wanted: as `wanted_schema`.
      single: whether there is at most one call.

    Raises:
      CallRefused: no request may have one, a tool is not there, or a schema cannot be enforced.
    """
    (calls, names), field, (schema, place) = choice, "tool_choice", wanted
    asked = [field] * bool(calls == "must" or names) + [place] * (schema is not None)
    if asked and not caller.rules.constrains:
        caller.ignored += [caller.rules.refuse_constraint(name) for name in asked]
        return None
    known = {tool["name"] for tool in tools}
    if calls == "must" and not tools:
        refuse(field, f"{field}: got a choice that forces calls; allowed with tools only.")
    for name in names:
        if name not in known:
            refuse(field, f"{field}: got {name[:80]!r}; allowed: the name of one of the tools.")
    if not tools:
        calls = "none"
    if schema is not None and calls != "must":
        try:
            check_schema(schema, place)
        except ValueError as error:
            refuse(place, str(error))
        text = json.dumps(schema, ensure_ascii=False)
        return Constraint(calls, names, single, schema=text, field=place)
    if calls == "must" or names or (single and calls == "may"):
        return Constraint(calls, names, single, field=field)
    return None
