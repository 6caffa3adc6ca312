"""Texts with the names of columns in braces."""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.tasks.row_list import short


@dataclass(frozen=True)
class RowTemplate:
    """A text such as "{question}\\nAnswer:", filled from a row; `{{` and `}}` are braces.

    field: names it in errors.

    Raises:
      ValueError: a brace stands alone, or there is something else than a name within braces.
    """

    text: str
    field: str

    def __post_init__(self) -> None:
        _ = self._parts

    @functools.cached_property
    def _parts(self) -> list[tuple[str, str | None]]:
        """Literal texts, and the column after each."""
        try:
            parts = list(string.Formatter().parse(self.text))
        except ValueError as error:
            got = f"{short(self.text)} ({error})"
            raise ValueError(f"{self.field}: got {got}; allowed: {_ALLOWED}.") from None
        for _, name, form, conversion in parts:
            if name == "" or form or conversion:
                got = (
                    f"{{{name or ''}{'!' + conversion if conversion else ''}{form and ':' + form}}}"
                )
                raise ValueError(f"{self.field}: got {got}; allowed: {_ALLOWED}.")
        return [(literal, name) for literal, name, _, _ in parts]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it names, each once."""
        return tuple(dict.fromkeys(name for _, name in self._parts if name is not None))

    def fill(self, row: Mapping[str, Any], where: str) -> str:
        """The text with a row's values. Raises ValueError: one is neither text nor number."""
        return "".join(
            literal + ("" if name is None else _text(value_of(row, name), f"{where}: {name}"))
            for literal, name in self._parts
        )


_ALLOWED = "names of columns in braces, with {{ and }} for braces themselves"


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """A column's value; `a.b` is the entry b of the column a. None: there is none."""
    if column in row or "." not in column:
        return row.get(column)
    name, _, rest = column.partition(".")
    inner = row.get(name)
    return value_of(inner, rest) if isinstance(inner, Mapping) else None


def _text(value: Any, where: str) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"{where}: got {short(value)}; allowed in a template: a text or a number.")
