"""Values that a format writes as plain text: read by the types of a tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.tool_calls import ToolCallError, no_duplicates, parse_literal

ANY = "any"  # a type that is not stated: JSON where it is, else a text
_JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_DEPTH = 16  # of references and combinations in a schema


def argument_schema(tools: Sequence[Tool], name: str, key: str) -> Mapping[str, Any] | None:
    """The schema of a tool's argument, in which references are resolved; None: not stated."""
    for tool in tools:
        if tool["name"] != name:
            continue
        root = tool.get("parameters") or {}
        properties = root.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return resolve(properties[key], root)
    return None


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or that to which its `$ref` leads within the root."""
    for _ in range(_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def json_types(schema: Mapping[str, Any], depth: int = 0) -> list[str]:
    """The JSON types that a schema allows, in its order; none: not stated."""
    if depth > _DEPTH:
        return []
    stated = schema.get("type")
    if isinstance(stated, str):
        return [stated]
    if isinstance(stated, list):
        return [each for each in stated if isinstance(each, str)]
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list):
            each = [json_types(part, depth + 1) for part in parts if isinstance(part, Mapping)]
            return list(dict.fromkeys(name for types in each for name in types))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return list(dict.fromkeys(_JSON_TYPES.get(type(value), ANY) for value in values))
    return ["object"] if "properties" in schema else ["array"] if "items" in schema else []


def main_type(schema: Mapping[str, Any] | None, unknown: str) -> tuple[str, bool]:
    """The type as which a text is read, and whether null is allowed besides.

    Of several types `string` is taken, since any text is one.

    Args:
      unknown: the type if the schema states none.
    """
    types = [] if schema is None else json_types(schema)
    others = [each for each in types if each != "null"]
    if not others:
        return ("null" if types else unknown), bool(types)
    return ("string" if "string" in others else others[0]), len(others) < len(types)


def typed_value(text: str, schema: Mapping[str, Any] | None, unknown: str) -> Any:
    """Converts a text by a schema: a text of another type than the schema's stays a text.

    Numbers, booleans, null, objects and arrays are read as JSON, or as Python writes them (`True`).

    Args:
      unknown: the type if the schema states none: `string` or `ANY`.
    """
    kind, nullable = main_type(schema, unknown)
    if kind == "string":
        return None if nullable and text in ("null", "None") else text
    value = _read(text)
    if value is None:
        return None if text.strip() in ("null", "None") else text
    match kind:
        case "integer":
            fits = isinstance(value, int) and not isinstance(value, bool)
        case "number":
            fits = isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            fits = isinstance(value, bool)
        case _:
            fits = not isinstance(value, str) or kind == ANY
    return value if fits else text


def _read(text: str) -> Any:
    """The value of a text in JSON or in Python; None: it has none."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        return parse_literal(text.strip())
    except ToolCallError:
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
