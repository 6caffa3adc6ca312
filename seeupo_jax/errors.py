"""Errors as one sentence: a user's mistake, or the system's error on a file."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import textwrap
from collections.abc import Callable, Generator
from typing import NamedTuple


def _codes(*names: str) -> tuple[int, ...]:
    """Those that this system has."""
    return tuple(getattr(errno, name) for name in names if hasattr(errno, name))


_FULL = _codes("ENOSPC", "EDQUOT", "EFBIG")  # the disk, a quota, one file (`ulimit -f`)
_NOT_WRITTEN = (*_FULL, errno.EROFS)  # errors that reading does not have
# Of a disk, a mount or a server of files, whatever a program asks for.
_STORAGE = (*_NOT_WRITTEN, *_codes("EIO", "ESTALE", "EREMOTEIO", "EUCLEAN"))
# Likewise where a file is named: sockets and processes have these errors, too.
_OF_FILES = _codes(
    *("EACCES", "EPERM", "EBUSY", "EMFILE", "ENFILE", "ENODEV", "ENXIO", "ENOLCK", "ENOTCONN"),
    *("ESHUTDOWN", "ETIMEDOUT", "EHOSTDOWN"),
)
# How Rust's libraries, TensorStore and Python quote an error of the system.
_QUOTED = re.compile(r"\(os error (\d+)\)|os_error_code='(\d+)'|\[Errno (\d+)\]")
_QUOTED_FILE = re.compile(r"""["'](/[^"']+)["']""")
_SHOWN = 200  # characters of a library's message
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
    """A file could not be written, or read; the text is a sentence that says what is left."""

    @property
    def exit_code(self) -> int:
        """2 where there is no room, which another try does not change; else 1."""
        return 2 if is_full(self) else 1


class FileError(NamedTuple):
    """An error of the operating system. code: errno. file: its path; None: not known."""

    code: int
    file: str | None = None

    @property
    def reason(self) -> str:
        """The system's message for the code."""
        return os.strerror(self.code)


def printable(text: str) -> str:
    """A text for a terminal: characters that control one as escapes, but new lines and tabs."""
    return text.translate(_CONTROLS)


def terminal_line(text: str) -> str:
    """As `printable`; a value or a library's message with line breaks does not end the line."""
    return printable(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def is_full(error: BaseException) -> bool:
    """Whether an error of the system, or of a library that quotes it, says that there is no room.

    Room is that of the disk, of a quota, or of one file (`ulimit -f`).
    """
    return any(os.strerror(code) in str(error) for code in _FULL)


def system_error(error: BaseException) -> FileError | None:
    """Returns the system's error, with the file that it names; None: another kind of error."""
    if isinstance(error, OSError) and error.errno is not None:
        file = error.filename if error.filename2 is None else error.filename2
        named = isinstance(file, str | bytes)  # not the number of an open file
        return FileError(error.errno, os.fsdecode(file) if named else None)
    text = str(error)
    quoted = _QUOTED.search(text)
    if quoted is None:
        return None
    file = _QUOTED_FILE.search(text)
    return FileError(int(quoted[quoted.lastindex or 0]), None if file is None else file[1])


def file_error(error: BaseException) -> FileError | None:
    """Returns the system's error on a file; None: another error, such as a mistake in the program.

    A ValueError is a message of this package to its user, unless it comes from TensorStore.
    """
    if isinstance(error, ValueError) and "os_error_code=" not in str(error):
        return None
    found = system_error(error)
    if found is None:
        return None
    known = _STORAGE if found.file is None else (*_STORAGE, *_OF_FILES)
    return found if found.code in known else None


def reason(error: BaseException) -> str:
    """Returns a short reason: the system's message if it is the system's error."""
    found = system_error(error)
    if found is not None:
        return found.reason
    text = str(error) or type(error).__name__
    # TensorStore appends its whole specification, addresses and all.
    return textwrap.shorten(text.partition(" [")[0], _SHOWN, placeholder=" ...")


@contextlib.contextmanager
def name_file(file: str | os.PathLike[str]) -> Generator[None]:
    """Raises the system's errors on files in the context as an OSError that names this file.

    Errors of writing to an open file name none; a temporary file has another name.
    """
    try:
        yield
    except Exception as error:  # libraries have errors of their own for it
        found = system_error(error)
        if found is None or found.code not in (*_STORAGE, *_OF_FILES):
            raise
        raise OSError(found.code, found.reason, os.fspath(file)) from error


@contextlib.contextmanager
def file_errors(
    kept: Callable[[FileError], str | None] = lambda _: None,
    place: str | os.PathLike[str] = "a file",
) -> Generator[None]:
    """Raises the system's errors on files as a WriteError; all other errors pass.

    Args:
      kept: what is left, and what to do, as the end of the sentence; None: what a command finished
        is left, and it can be rerun.
      place: what is named where the file is not known.

    Raises:
      WriteError: the file, the reason in the system's words, and what is kept.
    """
    try:
        yield
    except WriteError:
        raise
    except Exception as error:  # libraries have errors of their own for it
        found = file_error(error)
        if found is None:
            raise
        tried = "written" if found.code in _NOT_WRITTEN else "read or written"
        mend = "make room" if found.code in _FULL else "mend that"
        end = kept(found) or f"what is finished is kept: {mend} and rerun the command"
        raise WriteError(
            f"{found.file or os.fspath(place)} could not be {tried}: {found.reason}; {end}."
        ) from error


@contextlib.contextmanager
def file_sentences(
    kept: Callable[[FileError], str | None] = lambda _: None,
) -> Generator[None]:
    """Ends a command with one sentence if the system reports an error on a file.

    The exit code is 2 if there is no room, else 1. `kept` is that of `file_errors`.
    """
    with sentence_errors(WriteError), file_errors(kept):
        yield


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
        if isinstance(error, ValueError) and file_error(error) is not None:
            raise  # a library's: `file_sentences` has the sentence for it
        print(f"error: {terminal_line(str(error))}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", code))
