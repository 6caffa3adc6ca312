"""Lock files, for one writer at a time; the lock of a process ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
import textwrap
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

_LOGGER = logging.getLogger(__name__)
_TRIES = 100  # each lost against a holder that removed the file just then
_COMMAND_WIDTH = 300  # characters of a command that are shown


@contextlib.contextmanager
def exclusive(file: Path, got: str) -> Iterator[None]:
    """Holds a lock as long as the context is open, or until the process ends, by SIGKILL too.

    Where the file system has no locks, a warning says so and nothing is held.

    Args:
      file: of the lock; made here, where its folder is there, and removed at the end.
      got: how an error's sentence begins: what the user gave, and what it is.

    Raises:
      ValueError: another holds it; the sentence says which process on which host, and since when.
      OSError: there is no room for it; the error names the file, which is removed.
    """
    held = _acquire(file, got)
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError):  # another process has removed it
                file.unlink()
            held.close()


def try_lock(opened: IO[Any]) -> bool:
    """Locks a file until it is closed, here and where it was inherited; False: another has it.

    Raises:
      OSError: the file system has no locks.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _acquire(file: Path, got: str) -> IO[str] | None:
    for _ in range(_TRIES):
        try:
            opened = file.open("a+", encoding="utf-8")
        except FileNotFoundError:
            return None  # writing to a folder that is not there fails with a sentence of its own
        except OSError as error:
            return _unlocked(file, error)
        try:
            locked = try_lock(opened)
        except OSError as error:
            opened.close()
            return _unlocked(file, error)
        if not locked:
            with opened:
                raise ValueError(
                    f"{got}, in use by {_holder(opened)}; allowed: one process at a time. Wait"
                    " for it, end it, or name another place."
                )
        if _is_there(file, opened):
            _sign(file, opened)
            return opened
        opened.close()
    raise ValueError(f"{got}, in use by one process after the other; allowed: one at a time.")


def _unlocked(file: Path, error: OSError) -> None:
    _LOGGER.warning(
        f"warning: {file} cannot be locked ({error.strerror}): another process could write there"
        " at the same time."
    )


def _is_there(file: Path, opened: IO[str]) -> bool:
    """Whether what was locked is the file still: who held it before has removed it at the end."""
    try:
        return os.path.samestat(os.fstat(opened.fileno()), file.stat())
    except OSError:
        return False


def _sign(file: Path, opened: IO[str]) -> None:
    me = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
    }
    try:
        opened.truncate(0)
        os.write(opened.fileno(), f"{json.dumps(me)}\n".encode())  # nothing is left for `close`
    except OSError as error:
        with opened, contextlib.suppress(OSError):  # a file that cannot be removed is not locked
            file.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from None


def _holder(opened: IO[str]) -> str:
    """Who signed; a holder that has yet to sign, or was made by something else, is not known."""
    opened.seek(0)
    try:
        me = json.loads(opened.read())
        command = textwrap.shorten(str(me["command"]), _COMMAND_WIDTH, placeholder=" ...")
        return f"process {me['process']} on {me['host']} since {me['since']} ({command})"
    except (ValueError, LookupError, TypeError, OSError, RecursionError):
        return "another process"
