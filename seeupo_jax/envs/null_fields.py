"""The normal form of tools and calls, without the nulls of typed tables (Arrow, Parquet).

In a table every row has the fields of all rows: a tool's schema gets the keywords and properties of
all tools, and a call the arguments of all calls, with null for absent ones. JSON that was written
from a table has these nulls too, so schemas decide whether a null is a value, not the file type.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import Tool

_LOGGER = logging.getLogger(__name__)
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("default", "const", "enum", "example", "examples")  # keywords that hold values


@dataclass
class NullCounts:
    """The number of nulls that were removed, and that were kept since they may be values."""

    dropped: int = 0
    kept: int = 0


def normal_tool(tool: Tool, counts: NullCounts) -> Tool:
    """A tool in the one form that templates render, whichever way it came.

    Its name, description and parameters come first, in this order; what is absent is "" and the
    schema of no parameters. Nulls of its fields and schema are removed where they have no meaning.
    A null default is kept, since it may be intended; so is a null constant if the schema has no
    type. The schemas of properties keep their order.
    """
    cleaned = _schema(tool, counts)
    parameters = {"type": "object"} | (cleaned.get("parameters") or {"properties": {}})
    first = {"name": cleaned["name"], "description": cleaned.get("description", "")}
    return {**first, "parameters": parameters, **_others(cleaned)}


def _others(tool: Tool) -> Tool:
    known = ("name", "description", "parameters")
    return {name: value for name, value in tool.items() if name not in known}


def normal_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Applies `normal_tool` to an environment's tools; warns about removed nulls."""
    counts = NullCounts()
    cleaned = tuple(normal_tool(tool, counts) for tool in tools)
    if counts.dropped:
        _warn(counts.dropped)
    return cleaned


@functools.cache  # once per process and count: every episode starts with tools
def _warn(count: int) -> None:
    _LOGGER.warning(
        f"warning: the environment's tools have {count:,} null fields, which were removed: typed"
        " tables write null for absent fields."
    )


def drop_from_arguments(
    arguments: Mapping[str, Any], schema: Any, counts: NullCounts
) -> dict[str, Any]:
    """Removes nulls from a call's arguments that its tool's schema does not contain or allow.

    Args:
      schema: of the tool's parameters; None: unknown, so all nulls are kept.
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    result: dict[str, Any] = {}
    for name, value in arguments.items():
        part: Any = True  # the schema that allows everything
        if isinstance(properties, Mapping):
            part = properties.get(name, schema.get("additionalProperties", False))
        if value is None and not _allows_null(part):
            counts.dropped += 1
            continue
        counts.kept += value is None
        result[name] = _argument(value, part, counts)
    return result


def _argument(value: Any, schema: Any, counts: NullCounts) -> Any:
    if isinstance(value, Mapping):
        return drop_from_arguments(value, schema, counts)
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_argument(each, items, counts) for each in value]
    return value


def _schema(schema: Any, counts: NullCounts) -> Any:
    if isinstance(schema, list):
        return [_schema(each, counts) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if value is None and not _may_be_null(keyword, schema):
            counts.dropped += 1
            continue
        counts.kept += value is None
        if keyword in _OF_NAMES and isinstance(value, Mapping):
            present = {name: each for name, each in value.items() if each is not None}
            counts.dropped += len(value) - len(present)
            result[keyword] = {name: _schema(each, counts) for name, each in present.items()}
        else:
            result[keyword] = value if keyword in _DATA else _schema(value, counts)
    return result


def _may_be_null(keyword: str, schema: Mapping[str, Any]) -> bool:
    return keyword == "default" or (keyword == "const" and schema.get("type") is None)


def _allows_null(schema: Any) -> bool:
    """Whether null may be a value; true if the schema does not specify it, or uses a reference."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if schema.get("nullable") is True:
        return True
    kind, values, const = schema.get("type"), schema.get("enum"), schema.get("const")
    kinds = [kind] if isinstance(kind, str) else kind
    if isinstance(kinds, list) and "null" not in kinds:
        return False
    if const is not None or (isinstance(values, list) and None not in values):
        return False
    either = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    every = schema.get("allOf") if isinstance(schema.get("allOf"), list) else []
    return all(any(map(_allows_null, each)) for each in either) and all(map(_allows_null, every))
