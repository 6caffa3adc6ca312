"""Conversion of values from a user's classes to plain JSON values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from seeupo_jax.configuration.user_code import escaped, text_of

# Counted as written: a value that is referenced twice counts twice. An array counts as one value.
MAX_VALUES = 250_000
_DEEPEST = 32  # levels of lists and dicts
_INT64 = 2**63  # trackers and many JSON readers support no larger integers


class TooManyValues(ValueError):
    """There are more than `MAX_VALUES` values; the text continues "got"."""

    def __init__(self) -> None:
        super().__init__(
            f"more than {MAX_VALUES:,} values; allowed: fewer, so no lists and dicts that contain "
            "each other: each reference is written out again."
        )


class PlainDict(dict[str, Any]):
    """A dict that `plain` has already converted in another process; it is not counted again."""


def plain(value: Any) -> Any:
    """Converts a value to plain JSON.

    Values that JSON cannot hold become texts; lists and dicts that are nested too deep "[...]".

    Raises:
      TooManyValues: it has too many values.
    """
    if isinstance(value, PlainDict):
        return value
    return _plain(value, 0, itertools.count())


def _plain(value: Any, depth: int, counter: Iterator[int]) -> Any:
    if next(counter) == MAX_VALUES:
        raise TooManyValues
    if isinstance(value, str):
        return escaped(str.__str__(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float | np.floating) and math.isfinite(value):
        return float(value)
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return value
    if isinstance(value, Mapping | list | tuple) and depth >= _DEEPEST:
        return "[...]"  # its text may be exponentially long
    if isinstance(value, Mapping):
        return {text_of(key): _plain(item, depth + 1, counter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1, counter) for item in value]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        inner, uncounted = value.tolist(), itertools.repeat(0)
        if not isinstance(inner, complex | np.generic):  # a long double's is itself
            return _plain(inner, depth + 1, uncounted)
    return text_of(value)
