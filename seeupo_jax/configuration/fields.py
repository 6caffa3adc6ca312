"""Dataclasses whose fields declare their allowed values, built from plain values."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from seeupo_jax.configuration.renamed_fields import REPLACED, new_name
from seeupo_jax.configuration.user_code import expand_home, shortened, shown
from seeupo_jax.options import ALIAS, CHECK, OPTIONAL, SECTION, Section, names_of

_PATH = "path"  # metadata key: whether a `~` at the start is a home folder
_DEEPEST = 32  # levels of lists and dicts in a value of free form
_LEVELS = f"lists and dicts nested at most {_DEEPEST} levels deep"
_WORDS = {
    tuple: "a tuple",
    float: "a finite number",
    int: "a whole number",
    str: "a text",
    bool: "True or False",
}
_BRACKETS = ("[", "{", "(")
_JSON = {"true": True, "false": False, "null": None}
_LISTED = 800  # characters of the names that an error lists
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # two letters or more: C:/ is a path
_LARGEST = 2**63 - 1  # more than any count, and the most that arrays and trackers hold


def path_field(allowed: str = "a path", check: Callable[[Any], bool] = bool) -> Any:
    """A field of a path, none by default, whose `~` or `~USER` becomes that home folder."""
    return dataclasses.field(default=None, metadata={CHECK: (check, allowed), _PATH: True})


def mapping_field(allowed: str, check: Callable[[Any], bool]) -> Any:
    """A field of a dict, empty by default, that must pass a check."""
    return dataclasses.field(default_factory=dict, metadata={CHECK: (check, allowed)})


def is_url(text: str) -> bool:
    """Whether a text begins with `SCHEME:/`; of `SCHEME://` a Path would make a folder here."""
    return _URL.match(text) is not None


def allowed_values(field: dataclasses.Field, hint: Any) -> str:
    """Returns the values that a field of this type allows, in the words of its errors."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (expected,) = [option for option in options if option is not type(None)]
    origin = typing.get_origin(expected) or expected
    _, allowed = field.metadata.get(CHECK, (None, _WORDS.get(origin, "a dict")))
    return allowed + ", or none" * (type(None) in options)


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets `key`, a dotted path, in nested values; a group on it that is None becomes one.

    Raises:
      ValueError: a part of the path is a value already.
    """
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents):
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            name = ".".join(parents[: depth + 1])
            raise ValueError(
                f"config.{shortened(key)}: config.{shortened(name)} is a value, not a group of"
                " fields."
            )
    values[leaf] = value


def parse(text: str, name: str, expected: Any = None) -> Any:
    """JSON in brackets or a Python literal where it is one, `none` as None, else the text itself.

    Args:
      name: of the value, in errors.
      expected: of `type_of`: numbers stay as they were typed where a text is expected, or texts.

    Raises:
      ValueError: brackets nested deeper than Python reads.
    """
    value = _literal(text, name)
    items = value if isinstance(value, list | tuple) else (value,)
    if items and all(isinstance(item, int | float | complex) for item in items):
        bracket = text.lstrip(" \t").startswith(_BRACKETS)
        if expected == tuple[str, ...] or (expected is str and not bracket):
            return text
    return value


def type_of(cls: type, key: str) -> Any:
    """The type of a field below a dataclass, without None; None: no such field.

    Args:
      key: a dotted path.
    """
    classes: list[Any] = [cls]
    for part in key.split("."):
        found = [each for each in classes if part in _field_names(each)]
        if not found:
            return None
        (field,) = (f for f in dataclasses.fields(found[0]) if f.name == part)
        hint = typing.get_type_hints(found[0])[part]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        classes = [option for option in options if option is not type(None)]
        if section := field.metadata.get(SECTION):
            classes = [section.find(name) for name in section.names()]
    return classes[0]


def _field_names(cls: Any) -> tuple[str, ...]:
    return names_of(cls) if dataclasses.is_dataclass(cls) else ()


def _literal(text: str, name: str) -> Any:
    if text.lower() == "none":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lstrip(" \t").startswith(_BRACKETS):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)  # before Python, whose texts escape letters otherwise
    try:
        return ast.literal_eval(_syntax(text))
    except (RecursionError, MemoryError):  # of its parser: the first of its tree, the last of text
        nested = True
    except SyntaxError as error:
        nested = "too many nested" in str(error.msg)
    except (ValueError, TypeError):
        nested = False
    if nested:
        raise ValueError(f"{shortened(name)}: got {shown(text)}; allowed: {_LEVELS}.")
    return text


def _syntax(text: str) -> ast.Expression:
    """A text as Python reads it; in brackets, JSON's true, false and null are values."""
    tree = ast.parse(text.strip(" \t"), mode="eval")
    return _JsonNames().visit(tree) if text.lstrip(" \t")[:1] in _BRACKETS else tree


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _JSON:
            return node
        return ast.copy_location(ast.Constant(_JSON[node.id]), node)


def _unread(value: Any) -> str:
    """Says why and where a text that begins with a bracket cannot be parsed; "": it can be."""
    if not isinstance(value, str) or not value.strip(" \t").startswith(_BRACKETS):
        return ""
    try:
        nodes = [node for node in ast.walk(_syntax(value)) if isinstance(node, ast.Name)]
        wrong = [(node.col_offset + 1, f"{shortened(node.id)} is no value") for node in nodes]
    except SyntaxError as error:
        wrong = [(error.offset or 1, error.msg)]
    except (RecursionError, MemoryError, ValueError):
        wrong = []
    if not wrong:
        return ""
    column, why = min(wrong)
    return f", neither a Python literal nor JSON (column {column}: {why})"


def build(cls: type, values: Mapping[str, Any], name: str, **private: Any) -> Any:
    """The dataclass of nested values, each of them checked.

    Args:
      name: of the dataclass, in errors.
      private: fields whose names begin with an underscore; not checked.

    Raises:
      ValueError: an unknown key, a wrong type or a value that is not allowed.
    """
    values = own_names(cls, _group(values, name), name)
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.name.startswith("_")}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise ValueError(_no_such_field(cls, str(key), fields, name))
    for key, field in fields.items():
        if _required(field) and key not in values:
            raise ValueError(
                f"{name}.{key}: got none; allowed: {allowed_values(field, hints[key])}."
            )
    built = {
        key: _convert(value, hints[key], fields[key], f"{name}.{key}")
        for key, value in values.items()
        if SECTION not in fields[key].metadata
    }
    for key in values.keys() - built.keys():
        section = fields[key].metadata[SECTION]
        selected = None if section.inside else built.get(section.by, getattr(cls, section.by))
        built[key] = build_section(section, values[key], selected, f"{name}.{key}")
    return cls(**built, **private)


def build_sections(instance: Any, name: str) -> None:
    """Replaces the values of a frozen dataclass's sections, as it was given them, by theirs.

    Args:
      name: of the dataclass, in errors.

    Raises:
      ValueError: as `build_section`, or a section of another class than the selected one.
    """
    for field in dataclasses.fields(instance):
        if OPTIONAL in field.metadata and isinstance(getattr(instance, field.name), Mapping):
            hint = typing.get_type_hints(type(instance))[field.name]
            value = _convert(getattr(instance, field.name), hint, field, f"{name}.{field.name}")
            object.__setattr__(instance, field.name, value)
        if (section := field.metadata.get(SECTION)) is None:
            continue
        value, selected = getattr(instance, field.name), vars(instance).get(section.by)
        if not dataclasses.is_dataclass(value):
            value = build_section(section, value, selected, f"{name}.{field.name}")
            object.__setattr__(instance, field.name, value)
        elif not section.inside and not isinstance(value, section.find(str(selected))):
            raise ValueError(
                f"{name}.{field.name}: got {type(value).__name__} with {section.by}={selected};"
                f" allowed: {section.find(str(selected)).__name__}."
            )


def own_names(cls: type, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Values with a dataclass's own names in the place of aliases.

    Raises:
      ValueError: a field by both of its names.
    """
    own = {f.metadata[ALIAS]: f.name for f in dataclasses.fields(cls) if ALIAS in f.metadata}
    for alias in own.keys() & values.keys():
        if own[alias] in values:
            raise ValueError(f"{name}.{alias}: got it and {own[alias]}; allowed: one of the two.")
    return {own.get(key, key): value for key, value in values.items()}


def _group(values: Any, name: str, example: str = "") -> Mapping[str, Any]:
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = dataclasses.asdict(values)
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{name}: got {shown(values)}{_unread(values)}; allowed: a group of fields{example}."
        )
    return values


def build_section(section: Section, values: Any, selected: Any, name: str) -> Any:
    """The dataclass of a group whose class is selected by a name.

    Args:
      values: of its fields; None: none of them.
      selected: the value of the field next to the group that selects its class, if that does.

    Raises:
      ValueError: as `build`, or an option of another class.
    """
    first, *others = section.names()
    shown_kind = values if isinstance(values, str) and values in others else first
    example = f", as {name}.kind={shown_kind}" * section.inside
    values = _group({} if values is None else values, name, example)
    if section.inside:
        selected = values.get("kind", first)
        selected = "none" if selected is None else selected
        if selected not in section.names():
            allowed = ", ".join(section.names())
            raise ValueError(f"{name}.kind: got {shown(selected)}; allowed: one of {allowed}.")
        values = {**values, "kind": selected}
    cls = section.find(selected)
    for key, value in values.items():
        others = [] if key in names_of(cls) else section.having(key)
        if others:
            by = f"{name.rpartition('.')[2]}.kind" if section.inside else section.by
            allowed = " or ".join(f"{by}={each}" for each in others)
            raise ValueError(
                f"{name}.{key}: got {shown(value)} with {by}={selected}, which does not"
                f" have it; allowed with {allowed}."
            )
    return build(cls, values, name)


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _no_such_field(cls: type, key: str, fields: Mapping[str, Any], name: str) -> str:
    if key in REPLACED:
        return f"{name}.{key}: no such field; {REPLACED[key]}."
    if found := new_name(cls, key):
        return f"{name}.{key}: no such field; it is {name}.{found}."
    near = difflib.get_close_matches(key, fields, n=1)
    hint = f" did you mean {near[0]}?" if near else ""
    allowed = ", ".join(fields) or "none"
    if len(allowed) > _LISTED:
        allowed = f"one of its {len(fields)} fields, which docs/configuration.md lists"
    return f"{name}.{shortened(key)}: no such field;{hint} allowed: {allowed}."


def _convert(value: Any, hint: Any, field: dataclasses.Field, name: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    (expected,) = [option for option in options if option is not type(None)]
    if value is None and expected is str:
        value = "none"  # an override's `none` where it is the name of a choice
    value = _as_type(value, expected, name)
    check, _ = field.metadata.get(CHECK, (lambda _: True, ""))
    if not check(value):
        raise ValueError(f"{name}: got {shown(value)}; allowed: {allowed_values(field, hint)}.")
    begins_at_home = _PATH in field.metadata and value.startswith("~")
    return str(expand_home(value)) if begins_at_home else value


def _as_type(value: Any, expected: Any, name: str) -> Any:
    if dataclasses.is_dataclass(expected):
        return build(expected, value, name)
    origin = typing.get_origin(expected) or expected
    if origin is tuple:
        (item, _) = typing.get_args(expected)
        if isinstance(value, item) and not isinstance(value, bool):
            # `steps=3` as `steps=(3,)`, `trackers=a,b` as `trackers=('a', 'b')`
            value = _texts(value) if item is str else (value,)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_as_type(v, item, f"{name}[{i}]") for i, v in enumerate(value))
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else value
    right_type = isinstance(value, origin) and (expected is bool or not isinstance(value, bool))
    if expected is float and right_type:
        right_type = value == value and abs(value) != float("inf")
    if expected is int and right_type:
        right_type = abs(value) <= _LARGEST
    if right_type and origin is Mapping:
        return _as_json(value, name)
    if not right_type:
        words = _WORDS.get(origin, "a dict")
        words += " below 2**63 in magnitude" * (origin is int and isinstance(value, int))
        got = f"{shown(value)} ({type(value).__name__}){_unread(value)}"
        raise ValueError(f"{name}: got {got}; allowed: {words}.")
    return value


def _texts(text: str) -> list[str]:
    """The items of `a,b`, `(a, b)` or `[a, b]`; commas within an item's brackets are its own."""
    match = re.fullmatch(r"\(([^()]*?),?\)|\[([^][]*?),?\]", text.strip())
    inner = text if match is None else match[match.lastindex or 0]
    items, depth = [""], 0
    for letter in inner:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items]


def _as_json(value: Any, name: str, depth: int = 0) -> Any:
    """A free-form value as JSON restores it, since checkpoints store it so: tuples as lists."""
    if isinstance(value, Mapping | list | tuple) and depth > _DEEPEST:
        raise ValueError(f"{name}: got {shown(value)}; allowed: {_LEVELS}.")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{name}: got the key {shown(key)}; allowed: keys that are texts.")
        return {key: _as_json(item, f"{name}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    wrong = isinstance(value, int) and not abs(value) <= _LARGEST
    wrong = wrong or (isinstance(value, float) and not math.isfinite(value))
    if not wrong and (value is None or isinstance(value, bool | int | float | str)):
        return value
    raise ValueError(
        f"{name}: got {shown(value)} ({type(value).__name__}); allowed: texts, finite numbers,"
        " whole ones below 2**63 in magnitude, True, False, none, and lists and dicts of them."
    )
