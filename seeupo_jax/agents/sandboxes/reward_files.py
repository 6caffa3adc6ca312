"""The reward that a verifier wrote: `reward.txt`, a number, or `reward.json`, numbers by name."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

TEXT, NUMBERS, REWARD = "reward.txt", "reward.json", "reward"
_MOST = 2**16  # bytes of a file
_SHOWN = 80


class RewardError(Exception):
    """A verifier wrote no reward; one sentence with what was got and what is allowed."""


def read_reward(folder: Path) -> dict[str, Any]:
    """Reads the files that a verifier left; reward.txt precedes reward.json, as in Harbor.

    Returns: the fields reward, a finite number, and rewards: the others of reward.json, by name.

    Raises:
      RewardError: there is no such file, or it has no reward.
    """
    if (text := _read(folder / TEXT)) is not None:
        try:
            return {"reward": _number(float(text), TEXT), "rewards": {}}
        except ValueError:
            raise _error(TEXT, text, "a number") from None
    if (text := _read(folder / NUMBERS)) is None:
        raise RewardError(f"it wrote no reward; allowed: /logs/verifier/{TEXT} or {NUMBERS}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    allowed = f"an object of numbers, one of which is {REWARD!r} or the only one"
    if not isinstance(found, dict) or not (REWARD in found or len(found) == 1):
        raise _error(NUMBERS, text, allowed)
    numbers = {str(name): _number(value, NUMBERS) for name, value in found.items()}
    name = REWARD if REWARD in numbers else next(iter(numbers))
    return {"reward": numbers.pop(name), "rewards": numbers}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _error(name, repr(value), "finite numbers")
    return float(value)


def _error(name: str, got: str, allowed: str) -> RewardError:
    return RewardError(f"{name}: got {got.strip()[:_SHOWN]!r}; allowed: {allowed}")


def _read(path: Path) -> str | None:
    """The text of a file; None: there is no regular file. It neither follows a link nor blocks."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        regular = stat.S_ISREG(os.fstat(number).st_mode)
        return os.read(number, _MOST).decode(errors="replace") if regular else None
    finally:
        os.close(number)
