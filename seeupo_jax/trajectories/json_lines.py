"""JSON on disk: values as it holds them, objects on lines, and files of one value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from seeupo_jax.durable_files import write_atomically
from seeupo_jax.errors import file_errors


def plain(value: Any, *, finite: bool = True) -> Any:
    """A value as JSON holds it; any object of another kind as its text.

    Args:
      finite: strict JSON: null for a number that is not finite. Otherwise Python's NaN and Infinity
        stay, so that a number is read back as it was.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, finite=finite) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), finite=finite)
    if isinstance(value, np.generic):
        value = value.item()  # a longdouble stays one
    if isinstance(value, float):
        return None if finite and not math.isfinite(value) else float(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    try:
        return str(value)
    except Exception:  # of a user's class
        return f"a {type(value).__name__}"


def to_line(value: Mapping[str, Any], *, finite: bool = True) -> bytes:
    """An object on a line of its own; `value` and `finite` are those of `plain`."""
    return json.dumps(value, allow_nan=not finite, separators=(",", ":")).encode() + b"\n"


def read_file(file: Path) -> dict[str, Any] | None:
    """The object that a file holds; None where there is none, or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def write_json(file: Path | None, value: Mapping[str, Any] | list[Any]) -> None:
    """Writes a command's results to a file, if one was asked for; NaN and infinities become null.

    Raises:
      WriteError: it could not be written, and is on the standard output instead.
    """
    if file is None:
        return
    text = json.dumps(plain(value), allow_nan=False, indent=2) + "\n"

    def print_instead(_: object) -> str:
        print(text, end="")
        return "its text is on the standard output instead"

    with file_errors(print_instead):
        write_atomically(file, text.encode())
