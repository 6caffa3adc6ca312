"""The JSON of a request: parsed within bounds, then checked against a dialect's fields."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, cast

import pydantic

from seeupo_jax.agents.calls import CallRefused
from seeupo_jax.agents.dialects.sampling_rules import IGNORED_WITH
from seeupo_jax.configuration.user_code import encodes, escaped

MAX_DEPTH = 100  # of nested lists and objects
MAX_VALUES = 100_000  # in all lists and objects; each may cause an error of a kilobyte
EMPTY = (None, [], {})
# Unknown fields that are never ignored: without them the policy would read another conversation.
CONTENT = ("functions", "function_call", "audio", "images", "conversation", "prompt", "mcp_servers")

Read = TypeVar("Read", bound="Fields")
Path = tuple[int | str, ...]


class Fields(pydantic.BaseModel):
    """An object of a request: types are not converted, and unknown fields are errors."""

    model_config = pydantic.ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False
    )


def parse_json(text: str | bytes) -> Any:
    """Parses JSON whose texts are all UTF-8 and whose numbers are finite.

    Raises:
      ValueError: it is not, or it is deeper or larger than the bounds above.
    """
    try:
        source = text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        tree = json.loads(source, parse_constant=_refuse_constant, parse_float=_read_float)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _check_tree(tree)
    return tree


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name}")


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {reprlib.repr(text)} is too large")
    return value


def _check_tree(tree: Any) -> None:
    todo: list[tuple[Path, Any]] = [((), [tree])]
    values = 0
    while todo:
        path, node = todo.pop()
        values += len(node)
        if len(path) > MAX_DEPTH + 1:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if not all(encodes(each) for each in (key, value) if isinstance(each, str)):
                raise ValueError(f"{show_path((*path[1:], key))} holds half a character")
            if isinstance(value, dict | list):
                todo.append(((*path, key), value))


def show_path(path: Sequence[int | str]) -> str:
    """Writes a field's path as `messages[0].content`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return escaped("".join(parts).removeprefix("."))[:200]


def read_fields(kind: type[Read], tree: Any, *, ignore: bool) -> tuple[Read, list[str]]:
    """Reads the fields of a request.

    Args:
      ignore: drop unknown fields, except those of `CONTENT`. Empty unknown fields (null, [] or {})
        are always dropped: replies that clients send back as history contain such fields.

    Returns: the fields, and the names of dropped fields with a value.

    Raises:
      CallRefused: a field is unknown or wrong.
    """
    if not isinstance(tree, dict):
        refuse("", f"the body: got {reprlib.repr(tree)}; allowed: a JSON object.")
    try:
        return kind.model_validate(tree), []
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False)
    unknown = [e for e in errors if e["type"] == "extra_forbidden"]
    for wrong in errors:
        if wrong["type"] != "extra_forbidden":
            _refuse_field(tree, wrong)
    ignored = [e for e in unknown if e["input"] not in EMPTY]
    for wrong in ignored:
        name = show_path(_path(tree, wrong["loc"]))
        if wrong["loc"][-1] in CONTENT:
            refuse(name, f"{name}: got a field whose content is not read here; allowed: none.")
        if not ignore:
            refuse(name, f"{name}: an unknown field; {IGNORED_WITH} ignores it.")
    names = [show_path(_path(tree, e["loc"])) for e in ignored]
    for path in [_path(tree, e["loc"]) for e in unknown]:
        _remove(tree, path)
    fields, others = read_fields(kind, tree, ignore=ignore)
    return fields, names + others


def refuse(param: str, sentence: str) -> NoReturn:
    """Refuses a request for one of its fields."""
    raise CallRefused(sentence, code="invalid_value", param=param)


def _refuse_field(tree: Any, error: Any) -> NoReturn:
    missing = error["type"] == "missing"
    path = _path(tree, error["loc"])
    name = show_path((*path, error["loc"][-1]) if missing else path)
    if missing:
        refuse(name, f"{name}: is missing.")
    reason = error["msg"].removeprefix("Value error, ")
    if error["type"] == "model_type":
        reason = "allowed: an object"
    elif reason.startswith("Input should be "):
        reason = f"allowed: {reason.removeprefix('Input should be ')}"
    refuse(name, f"{name}: got {reprlib.repr(error['input'])}; {reason}.")


def _path(tree: Any, loc: Path) -> Path:
    """The path of an error, without the names of alternatives that pydantic inserts."""
    path: list[int | str] = []
    node: Any = tree
    for part in loc:
        if (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int)
        ):
            path.append(part)
            node = cast(Any, node)[part]
    return tuple(path)


def _remove(tree: Any, path: Path) -> None:
    for part in path[:-1]:
        tree = tree[part]
    del tree[path[-1]]


# Types of parts that are no text, each with the type of a text beside them.
_MEDIA = {
    **dict.fromkeys(("image", "document", "image_url", "file", "input_audio"), "text"),
    **dict.fromkeys(("input_image", "input_file"), "input_text"),
}


def leave_out_media(tree: Any) -> list[str]:
    """Replaces the images, files and sounds of a request's messages by a text that names them.

    Returns: the names of the fields that had them, such as `messages[2].content[0]`.
    """
    found: list[str] = []
    for field in ("messages", "input") if isinstance(tree, dict) else ():
        _replace_media(tree.get(field), (field,), found)
    return found


def _replace_media(parts: Any, path: Path, found: list[str]) -> None:
    for index, part in enumerate(parts) if isinstance(parts, list) else ():
        kind, place = (part.get("type") if isinstance(part, dict) else None), (*path, index)
        if isinstance(kind, str) and kind in _MEDIA:
            parts[index] = {"type": _MEDIA[kind], "text": f"[{kind} left out]"}
            found.append(show_path(place))
        elif isinstance(part, dict):
            for field in ("content", "output"):
                _replace_media(part.get(field), (*place, field), found)


class ServerTool(pydantic.BaseModel):
    """A tool that the API's own servers would run, such as web search; the policy has none."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)
    type: str


def by_type(
    default: str | None = None,
    *,
    other: type[pydantic.BaseModel] | None = None,
    **kinds: type[pydantic.BaseModel],
) -> Any:
    """A union of object types, which their field `type` distinguishes.

    Args:
      default: the type of an object without the field.
      other: what an object of another type is; None: an error.
    """
    if other is None:
        allowed: Any = Literal[tuple(kinds)]
        other = pydantic.create_model("Other", __base__=Fields, type=(allowed, ...))

    def tag(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else None
        return f"({kind})" if kind in list(kinds) else "(other)"  # it may be unhashable

    tagged = [Annotated[kind, pydantic.Tag(f"({name})")] for name, kind in kinds.items()]
    either: Any = Union[(*tagged, Annotated[other, pydantic.Tag("(other)")])]  # noqa: UP007
    return Annotated[either, pydantic.Discriminator(tag)]


def as_list(make: Callable[[str], Any], allowed: str) -> pydantic.BeforeValidator:
    """Validates a list; a text is converted to a list with one element."""

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            return [make(value)]
        if value is not None and not isinstance(value, list):
            raise ValueError(f"allowed: {allowed}")
        return value

    return pydantic.BeforeValidator(convert)


INVALID = "invalid_json"  # the argument that holds a text which is not an object's JSON


def _read_arguments(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise ValueError("allowed: a text of JSON")
    try:
        arguments = parse_json(value) if value.strip() else {}
    except ValueError:
        return {INVALID: value}
    return arguments if isinstance(arguments, dict) else {INVALID: value}


# Arguments of a call, which OpenAI's APIs send as JSON in a text. A text that is no object's JSON
# is kept: a model has written it.
Arguments = Annotated[dict[str, Any], pydantic.BeforeValidator(_read_arguments)]
Stops = Annotated[
    list[Annotated[str, pydantic.Field(min_length=1)]],
    as_list(str, "a text or a list of texts"),
    pydantic.Field(max_length=16),
]
Count = Annotated[int, pydantic.Field(ge=1)]
