"""JSON files of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
      ValueError: it is something else, or nested deeper than Python reads.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: got a {type(values).__name__}; allowed: a JSON object.")
    return values
