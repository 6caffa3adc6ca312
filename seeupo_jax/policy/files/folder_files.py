"""Files of model folders: JSON, and files whose content is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_POINTER = b"version https://git-lfs.github.com/spec/"


def check_content(file: Path) -> None:
    """Whether a file that is there can have its content.

    Raises:
      ValueError: it is empty, as a power cut leaves files, or a pointer that Git LFS has left.
      OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        start = opened.read(len(_POINTER))
    if not start:
        raise ValueError(f"{file} is empty; allowed: the whole file, downloaded or copied again.")
    if start == _POINTER:
        raise ValueError(
            f"{file} is a pointer of Git LFS, not the file itself; allowed: the file, which `git"
            " lfs pull` fetches in its folder."
        )


def read_json_object(file: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
      ValueError: it is something else, or nested deeper than Python reads.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from None
    check_content(file)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: got a {type(values).__name__}; allowed: a JSON object.")
    return values
