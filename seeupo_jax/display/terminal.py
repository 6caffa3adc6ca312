"""Writing to a terminal that may be gone, and short forms of rates and times."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Generator, Iterable
from typing import Any, TextIO

from seeupo_jax.errors import WriteError, sentence_errors

_UNABLE = ("", "dumb", "unknown")  # values of TERM that cannot move the cursor


class SafeStream:
    """A text stream whose failures never reach the caller: output is lost, the run continues.

    Args:
      stream: where to write; None takes the standard output, if there is one.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stdout if stream is None else stream

    @property
    def encoding(self) -> str:
        encoding = getattr(self._stream, "encoding", None)
        return "utf-8" if encoding is None else encoding

    @property
    def unicode(self) -> bool:
        return self.encoding.lower().startswith("utf")

    def write(self, text: str) -> int:
        with self._guard():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        with self._guard():
            self._stream.flush()

    def isatty(self) -> bool:
        with self._guard():
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    @contextlib.contextmanager
    def _guard(self):
        try:
            yield
        except BrokenPipeError:
            self._discard_from_now_on()
        except (OSError, ValueError, AttributeError):
            # Full disk, hung-up terminal, closed file, no standard output at all: in this order.
            pass

    def _discard_from_now_on(self) -> None:
        """Points the descriptor at nothing, so that the interpreter's last flush does not fail."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _Unwritten(WriteError):
    """The standard output could not be written, for another reason than that its reader left."""


class _Output(SafeStream):
    """A command's standard output: that stream itself, but it has no reader that can leave."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """The last flush, after which the interpreter's does not fail."""
        try:
            self.flush()
        except _Unwritten:
            self._discard_from_now_on()
            raise

    @contextlib.contextmanager
    def _guard(self):
        try:
            yield
        except OSError as error:
            if not self._reader_left(error):
                reason = f"standard output could not be written: {error.strerror}."
                raise _Unwritten(reason) from error
            self._discard_from_now_on()

    def _reader_left(self, error: OSError) -> bool:
        """Whether a pipe is closed or a terminal, which is a character device, is hung up."""
        if error.errno != errno.EIO:
            return isinstance(error, BrokenPipeError)
        return stat.S_ISCHR(os.fstat(self.fileno()).st_mode)


@contextlib.contextmanager
def safe_output() -> Generator[None]:
    """Around a command whose reader (`| head`, a terminal) may leave: it continues, unread.

    Where its output cannot be written for another reason, it ends with one sentence.
    """
    if sys.stdout is None:
        yield
        return
    output = _Output()
    with sentence_errors(_Unwritten), contextlib.redirect_stdout(output):
        try:
            yield
        except BaseException as end:
            failed = getattr(end, "code", 1)  # then its own error is the one to report
            with contextlib.suppress(_Unwritten) if failed else contextlib.nullcontext():
                output.finish()
            raise
        output.finish()


def can_redraw(stream: SafeStream) -> bool:
    """Whether the stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in _UNABLE


def format_count(number: float) -> str:
    """Three digits at most: 850, 5.1k, 12k, 1.2M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        scaled = number / size
        if scaled >= 0.9995:
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """The two largest units: 45s, 1m55s, 2h05m, 3d04h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s" if minutes else f"{second}s"
