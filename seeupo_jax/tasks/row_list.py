"""Rows by number, and those that are kept in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from seeupo_jax.configuration.user_code import shortened

Row = dict[str, Any]
_SHOWN = 60  # characters of a value in an error


class Records(Protocol):
    """Rows by number; several threads may read them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """A row, the caller's own; ValueError: it is none, or (DataChanged) another one now."""
        ...

    def where(self, index: int) -> str:
        """The field that named the source, the source, and the row's place in it, for errors."""
        ...


class RowList:
    """Rows in memory, which a source has returned all at once.

    Args:
      places: of each row in the source. source, field: for errors.

    Raises:
      ValueError: a row is no object with texts as keys.
    """

    def __init__(self, rows: Sequence[Any], places: Sequence[str], source: str, field: str):
        self._rows, self._places = rows, places
        self._source, self._field = source, field
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
                raise ValueError(
                    f"{self.where(index)}: got {short(row)}; allowed: an object, whose keys are the"
                    " columns."
                )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self._rows[index])

    def where(self, index: int) -> str:
        return f"{self._field}: {self._source}, {self._places[index]}"


def short(value: Any) -> str:
    """A text, or another value's `repr`, in short."""
    return shortened(value if isinstance(value, str) else repr(value), _SHOWN)


def unreadable(field: str, source: str, reason: str, allowed: str) -> ValueError:
    """The error for a source that is not there, or no file of its kind."""
    return ValueError(
        f"{field}: got {source!r}, which cannot be read ({reason}); allowed: {allowed}."
    )
