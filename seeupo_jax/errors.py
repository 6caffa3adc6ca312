"""A user's mistake as one sentence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def sentence_errors() -> Iterator[None]:
    """Ends the command with a user's mistake as one sentence instead of a traceback."""
    try:
        yield
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
