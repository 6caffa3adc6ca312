"""JSON on disk: values as it holds them, lines of objects, and files written whole."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from seeupo_jax.configuration.user_code import shortened

_SHOWN = 60  # characters of what was got


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


def read_object(line: bytes, where: str, allowed: str) -> dict[str, Any]:
    """The object on a line; ValueError with `where` the line is and what is `allowed`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        got = short(line.decode(errors="replace"))
        raise ValueError(f"{where}: got {got}, which is not JSON; allowed: {allowed}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {short(value)}; allowed: {allowed}.")
    return value


def read_file(file: Path) -> dict[str, Any] | None:
    """The object that a file holds; None where there is none, or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def short(value: Any) -> str:
    """A text, or another value's `repr`, in short."""
    return shortened(value if isinstance(value, str) else repr(value), _SHOWN)


def write_json(file: Path | None, value: Mapping[str, Any] | list[Any]) -> None:
    """Writes what a command found, where a file was asked for; null for what is no number."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps(plain(value), allow_nan=False, indent=2) + "\n", encoding="utf-8"
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file, and its folder: all of it or nothing, also where the machine stops.

    A link stays, and what it points to is written. What is no file, such as a pipe or /dev/null,
    stays too, and is written to. Of several processes that write one file the last one's stays;
    a killed one may leave PATH.*.tmp.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
