"""Every field of the configuration in words, for `--help` and the documentation's reference."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from seeupo_jax.configuration.fields import allowed_values
from seeupo_jax.configuration.schema import Config
from seeupo_jax.options import OPTIONAL, SECTION, Section


class FieldDescription(NamedTuple):
    """A field, as `--config.NAME=VALUE` takes it.

    group: the part of the name before its last dot, "" for fields of the configuration itself;
    `rewards[]` and `warm_start.stages[]` hold the fields of each of those dicts.
    name: the last part.
    type: such as `int`, `float or none`, `tuple of str`.
    default: as it is typed; "" where there is none.
    allowed: values, in words.
    sentence: what the field decides.
    selected: the choices with which there is such a field, as `advantage=gae, spa`; "": any.
    """

    group: str
    name: str
    type: str
    default: str
    allowed: str
    sentence: str
    selected: str = ""

    @property
    def full_name(self) -> str:
        """The name with its group, as after `--config.`."""
        return f"{self.group}.{self.name}".removeprefix(".")

    @property
    def words(self) -> str:
        """The sentence, behind the choices with which there is such a field."""
        return f"{self.selected}: {self.sentence}" if self.selected else self.sentence


@functools.cache
def describe_fields() -> tuple[FieldDescription, ...]:
    """Every field of `Config`: first its own, then group after group in the order of `Config`."""
    return tuple(_described(Config, Config(), ""))


def fields_help(width: int) -> str:
    """Every field for `--help`, group after group, in lines of at most so many characters."""
    fill = functools.partial(textwrap.fill, width=width, break_on_hyphens=False)
    head = (
        "Fields of the configuration, as --config.FIELD=VALUE. Behind a field is the value that it"
        " has where the file sets none; the algorithm's are SeeUPO's."
    )
    paragraphs = [fill(head)]
    for group, about in describe_groups().items():
        lines = [fill(f"{group}: {about}" if group else about)]
        for field in describe_fields():
            if field.group == group:
                words = f"{field.words} ({field.type}; {field.allowed})"
                lines.append(f"  {field.full_name}={field.default}")
                lines.append(fill(words, initial_indent=" " * 6, subsequent_indent=" " * 6))
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"


@functools.cache
def describe_groups() -> Mapping[str, str]:
    """Maps each group of `describe_fields`, in its order, to a sentence that describes it."""
    descriptions = {"": _first_sentence(Config)}
    for field in describe_fields():
        if field.group and field.group not in descriptions:
            descriptions[field.group] = _about(Config, field.group)
    return types.MappingProxyType(descriptions)


def _about(cls: type, group: str) -> str:
    first, _, rest = group.partition(".")
    name = first.removesuffix("[]")
    (field,) = (each for each in dataclasses.fields(cls) if each.name == name)
    if {SECTION, OPTIONAL} & {*field.metadata}:
        return _sentences(cls)[name]
    hint = typing.get_type_hints(cls)[name]
    if first.endswith("[]"):
        (hint, _) = typing.get_args(hint)
    return _about(hint, rest) if rest else _first_sentence(hint)


def _first_sentence(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


def _described(cls: type, values: Any, group: str) -> Iterator[FieldDescription]:
    hints, sentences = typing.get_type_hints(cls), _sentences(cls)
    parts, sections = [], []
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        hint = hints[field.name]
        if section := field.metadata.get(SECTION):
            sections.append((section, field.name))
            continue
        if dataclasses.is_dataclass(hint):
            parts.append((hint, getattr(values, field.name), field.name))
            continue
        default = _typed(field.default if values is None else getattr(values, field.name))
        yield FieldDescription(
            group,
            field.name,
            _type_name(hint),
            default,
            allowed_values(field, hint),
            sentences.get(field.name, ""),
        )
        item = next(iter(typing.get_args(hint)), None)
        if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(item):
            parts.append((item, item(), f"{field.name}[]"))
        if OPTIONAL in field.metadata:
            (part,) = (each for each in typing.get_args(hint) if each is not type(None))
            parts.append((part, None, field.name))
    for part, value, name in parts:
        yield from _described(part, value, f"{group}.{name}".removeprefix("."))
    for section, name in sections:
        yield from _of_section(section, f"{group}.{name}")


def _of_section(section: Section, group: str) -> Iterator[FieldDescription]:
    """The fields of all its classes, each with the names of those that have it just so."""
    fields: dict[FieldDescription, list[str]] = {}
    if section.inside:
        names, about = [*section.names()], "The kind of the group, whose fields depend on it."
        allowed = f"one of {', '.join(names)}"
        yield FieldDescription(group, "kind", "str", names[0], allowed, about)
    for name in section.names():
        cls = section.find(name)
        for field in _described(cls, None, group):
            if field.name != "kind":
                fields.setdefault(field, []).append(name)
    for field, names in sorted(fields.items(), key=lambda item: len(item[1]), reverse=True):
        yield field._replace(selected=f"{section.by}={', '.join(names)}")


def _typed(value: Any) -> str:
    """A value as it is given on a command line."""
    if value is dataclasses.MISSING:
        return ""
    if value is None:
        return "none"
    return value if isinstance(value, str) else str(value)


def _type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    if hint is type(None):
        return "none"
    origin = typing.get_origin(hint) or hint
    if origin is tuple:
        return f"tuple of {_type_name(typing.get_args(hint)[0])}"
    return "dict" if origin is Mapping or dataclasses.is_dataclass(hint) else origin.__name__


@functools.cache
def _sentences(cls: type) -> Mapping[str, str]:
    """The text below each field in a dataclass's source, and in those that it extends."""
    sentences: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            target = node.target if isinstance(node, ast.AnnAssign) else None
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
                sentences[target.id] = " ".join(str(text.value).split())
    return types.MappingProxyType(sentences)
