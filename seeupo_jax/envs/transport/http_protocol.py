"""Constants of clients and servers of environments: status codes, sizes, and the token's file."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from seeupo_jax.configuration.user_code import expand_home

# A response of a model, and the longest answers of an environment (50,000 task ids take 1 MB).
MAX_REQUEST_BYTES = 4 * 2**20
MAX_ANSWER_BYTES = 64 * 2**20

MALFORMED = (400, 422)  # the fields of a request; the second is what other servers answer
UNAUTHORIZED = 401
OUT_OF_ORDER = 409  # the sequence number is neither the next nor that of a repeated request
UNKNOWN = 404  # the operation: a server of another version
GONE = 410  # no such session: it ended, was idle for too long, or the server has restarted
BUSY = 503  # no room for another session
MAY_PASS = (502, BUSY, 504)  # the same request may be answered later


def default_token_file() -> Path:
    """The default file of the token, for client and server on one machine."""
    return Path.home() / ".config" / "seeupo_jax" / "env_token"


def read_token(path: str | None) -> str:
    """The token in a file.

    Args:
      path: None is `default_token_file()`.

    Raises:
      ValueError: no such file, or no text in it that a header can hold.
    """
    file = default_token_file() if path is None else expand_home(path)
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token_file: got {str(file)!r}, which cannot be read: {error}.") from None
    if not token or not token.isprintable():
        raise ValueError(f"token_file: got {str(file)!r}; allowed: a file with one line of text.")
    return token


def ensure_token(path: str | None) -> Path:
    """The token's file, made with a new random token where there is none, for its owner only."""
    file = default_token_file() if path is None else expand_home(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        return file
    # Another server that begins meanwhile finds no file, or, where there are links, the whole one.
    token = secrets.token_urlsafe(32) + "\n"
    descriptor, written = tempfile.mkstemp(dir=file.parent)  # for its owner only
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(token)
        try:
            os.link(written, file)
        except OSError:  # the file is there meanwhile, or its file system has no hard links
            with (
                contextlib.suppress(FileExistsError),
                open(file, "x", opener=_for_owner, encoding="utf-8") as opened,
            ):
                opened.write(token)
    finally:
        os.unlink(written)
    return file


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
