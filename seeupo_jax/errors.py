"""A user's mistake as one sentence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


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
