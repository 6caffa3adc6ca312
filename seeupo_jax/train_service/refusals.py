"""Why a request is not done: one sentence for its client."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class RequestRefused(ValueError):
    """A mistake of the client: what was got and what is allowed.

    status: of HTTP, where the request itself is refused and not its result.
    """

    def __init__(self, sentence: str, status: int = 400):
        super().__init__(sentence)
        self.status = status


def refuse_unknown(name: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """RequestRefused: a field of JSON that is not known here, and is more than none, 0 or false."""
    if unknown := [field for field, value in fields.items() if value and field not in known]:
        raise RequestRefused(f"{name}: got {unknown[0]!r:.60}; allowed: {', '.join(known)}.")
