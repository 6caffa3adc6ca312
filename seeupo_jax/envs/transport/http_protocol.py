"""Constants of the HTTP protocol of environment servers: status codes, sizes, the token's file."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from seeupo_jax.configuration.user_code import expand_home

# Bounds of a model's response and of an environment's answer (50,000 task ids take 1 MB).
MAX_REQUEST_BYTES = 4 * 2**20
MAX_ANSWER_BYTES = 64 * 2**20

MALFORMED = (400, 422)  # invalid fields of a request; other servers answer with the second
UNAUTHORIZED = 401
OUT_OF_ORDER = 409  # the sequence number is neither the next nor that of a repeated request
UNKNOWN = 404  # unknown operation: the server has another version
GONE = 410  # no such session: it ended, was idle for too long, or the server has restarted
BUSY = 503  # no room for another session or connection
MAY_PASS = (502, BUSY, 504)  # the same request may succeed later


def default_token_file() -> Path:
    """The default token file, for client and server on one machine."""
    return Path.home() / ".config" / "seeupo_jax" / "env_token"


def read_token(path: str | None) -> str:
    """Reads the token from a file.

    Args:
      path: None: `default_token_file()`.

    Raises:
      ValueError: there is no such file, or its text cannot be sent in a header.
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
    """Returns the token file; if it does not exist, makes it with a random token, owner-only."""
    file = default_token_file() if path is None else expand_home(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        return file
    # A server that starts meanwhile finds no file or (with hard links) the complete file.
    token = secrets.token_urlsafe(32) + "\n"
    descriptor, written = tempfile.mkstemp(dir=file.parent)  # for its owner only
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(token)
        try:
            os.link(written, file)
        except OSError:  # the file exists meanwhile, or its file system has no hard links
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
