"""What is known of a piece: one JSON file, written anew after every measurement."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# How a piece ended. running: its process was killed with the command; stopped: by the command's
# budget. skipped: it cannot run here. Only what is done is not tried again.
DONE, RUNNING, STOPPED = "done", "running", "stopped"
FAILED, TIMEOUT, SKIPPED = "failed", "timeout", "skipped"


class NotHere(Exception):
    """A piece needs something that this machine lacks; the message says what."""


@dataclass(frozen=True)
class Record:
    """The file of a piece.

    values: `piece`, `status`, and as far as they are known `error` (a sentence), `seconds`,
      `attempts`, `size` (words), `notes` (sentences), `checks` and `figures`.
    """

    path: Path
    values: dict[str, Any]

    @classmethod
    def begin(cls, path: Path, **values: Any) -> Record:
        """A file that says that the piece is running."""
        record = cls(path, {"piece": path.stem, "status": RUNNING, "notes": [], "checks": []})
        record.put(**values)
        return record

    def put(self, **values: Any) -> None:
        """Adds or replaces values, and writes the file: whole, or not at all."""
        self.values.update(values)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.values, indent=1) + "\n")
        os.replace(new, self.path)

    def note(self, sentence: str) -> None:
        """Something that a reader of the figures must know."""
        self.put(notes=[*self.values["notes"], sentence])

    def check(self, name: str, found: Mapping[str, tuple[float, float]], **about: Any) -> None:
        """A comparison: of each quantity the greatest difference and the bound that it must keep.

        Args:
          about: plain values that describe it, such as `shape` and `dtype`.
        """
        differences = {key: {"difference": d, "bound": b} for key, (d, b) in found.items()}
        passed = all(d <= b for d, b in found.values())  # NaN passes nothing
        one = {"name": name, **about, "differences": differences, "passed": passed}
        self.put(checks=[*self.values["checks"], one])

    def broken(self, name: str, error: Exception, **about: Any) -> None:
        """A comparison that could not be made."""
        traceback.print_exception(error)
        one = {"name": name, **about, "differences": {}, "passed": False, "error": sentence(error)}
        self.put(checks=[*self.values["checks"], one])


def read(path: Path) -> dict[str, Any] | None:
    """The values of a record; None where there is no file, or a damaged one."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and "status" in values else None


def sentence(error: BaseException) -> str:
    """An error as one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
