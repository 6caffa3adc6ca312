"""A user's mistake as one sentence."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator

_LONGEST = 300  # characters of an error's text


@contextlib.contextmanager
def sentence_errors(
    kind: type[Exception] | tuple[type[Exception], ...] = ValueError, code: int = 2
) -> Iterator[None]:
    """Ends the command with an error of these kinds as one sentence instead of a traceback.

    A user's mistake is a ValueError, and ends with 2.
    """
    try:
        yield
    except kind as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(code)


def describe(error: BaseException) -> str:
    """An error's class and text in one line, whatever its class does."""
    try:
        text = textwrap.shorten(str(error), _LONGEST, placeholder=" ...")
    except BaseException:  # of a user's class
        text = "its text cannot be had"
    return f"{type(error).__name__}: {text}".removesuffix(": ").rstrip(".")
