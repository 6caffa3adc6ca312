"""The contents of `\\boxed{}` in a model's text."""

from __future__ import annotations

import re
from typing import NamedTuple

_PARTS = re.compile(r"(?P<box>\\(?:boxed|fbox)\s{0,9}\{)|\\[\\{}]|(?P<brace>[{}])")


class Boxed(NamedTuple):
    """The content of a box, and the position in the text at which the box starts."""

    content: str
    start: int


def last_boxed(text: str) -> Boxed | None:
    """The last `\\boxed{}` or `\\fbox{}` whose braces are paired; None: there is none."""
    last: Boxed | None = None
    unclosed: list[tuple[int, int | None]] = []  # after the brace; the start of a box
    for part in _PARTS.finditer(text):
        if part["box"]:
            unclosed.append((part.end(), part.start()))
        elif part["brace"] == "{":
            unclosed.append((part.end(), None))
        elif part["brace"] and unclosed:
            begin, start = unclosed.pop()
            if start is not None and (last is None or start > last.start):
                last = Boxed(text[begin : part.start()], start)
    return last
