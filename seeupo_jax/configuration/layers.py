"""Layers of fields of `config.algorithm`: a recipe's below a file's, and their sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.fields import own_names
from seeupo_jax.options import SECTION, Section

Fields = Mapping[str, Any]
_SECTIONS: dict[str, Section] = {
    field.name: field.metadata[SECTION]
    for field in dataclasses.fields(Algorithm)
    if SECTION in field.metadata
}


def layered(below: Fields, above: Fields) -> dict[str, Any]:
    """The fields of two layers. A section that the upper one selects anew has none of the lower."""
    below, above = (own_names(Algorithm, layer, "config.algorithm") for layer in (below, above))
    fields = {**below, **above}
    for name, value in below.items():
        if not isinstance(value, Mapping):
            continue
        if not _same_selection(name, below, above):
            fields[name] = above.get(name, {})
        elif isinstance(above.get(name), Mapping):
            fields[name] = {**value, **above[name]}
    return fields


def without(fields: Fields, others: Fields, usual: Fields) -> dict[str, Any]:
    """Fields that another layer does not set, without sections that it selects anew.

    Args:
      usual: the layer below these fields, which selects what they do not.
    """
    fields = own_names(Algorithm, fields, "config.algorithm")
    left = {name: value for name, value in fields.items() if name not in others}
    selected = layered(usual, fields)
    for name, value in fields.items():
        if not isinstance(value, Mapping) or not _same_selection(name, selected, others):
            continue
        set_there = others.get(name, {})
        left[name] = {option: x for option, x in value.items() if option not in set_there}
    return {name: value for name, value in left.items() if not _is_dropped(name, selected, others)}


def given_options(names: Fields) -> Iterator[str]:
    """Full names of fields, those of sections too."""
    for name, value in names.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{option}" for option in value)
        else:
            yield name


def differing(value: Any, usual: Any) -> Any:
    """The fields of a dataclass that are not as in another one, nested; of another class, all."""
    if type(value) is not type(usual):
        return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        own, other = getattr(value, field.name), getattr(usual, field.name)
        if own != other:
            nested = dataclasses.is_dataclass(own)
            fields[field.name] = differing(own, other) if nested else own
    return fields


def _is_dropped(name: str, fields: Fields, others: Fields) -> bool:
    return name in _SECTIONS and not _same_selection(name, fields, others)


def _same_selection(name: str, below: Fields, above: Fields) -> bool:
    """Whether a section keeps its class when the upper layer is added to the lower."""
    if (section := _SECTIONS.get(name)) is None:
        return True
    if section.inside:
        below, above = below.get(name, {}), above.get(name, {})
        if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
            return True
    usual = next(iter(section.names())) if section.inside else getattr(Algorithm, section.by)
    lower = below.get(section.by, usual)
    return above.get(section.by, lower) == lower
