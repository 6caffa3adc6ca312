"""Requests to a server about what it serves, beside its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple


class Control(NamedTuple):
    """A request about what is served, with the server's key.

    answer: makes the status and the JSON of its answer, of the query's fields and of the body's;
      raises CallRefused.
    """

    method: str
    path: str
    answer: Callable[[Mapping[str, str], Mapping[str, Any]], Awaitable[tuple[int, Any]]]
