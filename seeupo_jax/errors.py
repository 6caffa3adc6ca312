"""A user's mistake as one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Generator

_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# C0 and C1, among them the beginnings of escape sequences.
_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\t\n"}


class NotLearning(Exception):
    """The run was ended because it does not learn; the text is a sentence that says why."""


class NameTaken(ValueError):
    """A reward function has the name of another reward; the text is a sentence that says which."""


class DataChanged(ValueError):
    """Conversations are not what they were when the run first read them; the text is a sentence."""

    exit_code = 2


class WriteError(OSError):
    """What a run needs could not be written; the text is a sentence that says what is left."""

    @property
    def exit_code(self) -> int:
        """2 where there is no room, which another try does not change; else 1."""
        return 2 if is_full(self) else 1


def printable(text: str) -> str:
    """A text for a terminal: characters that control one as escapes, but new lines and tabs."""
    return text.translate(_CONTROLS)


def is_full(error: BaseException) -> bool:
    """Whether an error of the system, or of a library that quotes it, says that there is no room.

    Room is that of the disk, of a quota, or of one file (`ulimit -f`).
    """
    return any(text in str(error) for text in _FULL)


@contextlib.contextmanager
def no_room_errors() -> Generator[None]:
    """Ends the command with one sentence and 2 where there is no room for what it writes."""
    try:
        yield
    except Exception as error:  # libraries have errors of their own for it
        if not is_full(error):
            raise
        place = getattr(error, "filename", None) or "a file"
        why = getattr(error, "strerror", None) or error
        print(
            f"error: {place} could not be written: {why}; what is finished is kept: make room and"
            " rerun the command.",
            file=sys.stderr,
        )
        sys.exit(2)


@contextlib.contextmanager
def sentence_errors(
    kind: type[Exception] | tuple[type[Exception], ...] = ValueError, code: int = 2
) -> Generator[None]:
    """Ends the command with an error of these kinds as one sentence instead of a traceback.

    A user's mistake is a ValueError, and ends with 2. An error that has an `exit_code` of its own
    ends with that.
    """
    try:
        yield
    except kind as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", code))
