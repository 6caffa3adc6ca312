"""Where the time of an iteration went: parts that do not overlap and add up to all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# In the order in which they are drawn. All but `rollout: rest` and `compile` are measured.
PHASES = (
    "rollout: decode",
    "rollout: prefill",
    "rollout: environment",
    "rollout: rest",
    "sweep",
    "sft",
    "evaluation",
    "checkpoint",
    "compile",
)
_WHOLES = ("rollout", "sweep", "sft", "evaluation", "checkpoint")
_COMPILING = ("rollout", "sweep", "sft", "evaluation")  # whose time holds that of compiling
_OF_ROLLOUT = ("decode", "prefill", "environment")


def whole_time(line: Mapping[str, Any]) -> float:
    """Seconds that a line of metrics accounts for: all of its phases."""
    return sum(_seconds(line, whole) for whole in _WHOLES)


def split_time(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase, in the order of `PHASES`, without those that took no time.

    They add up to `whole_time`. Compiling happens inside the other phases and is subtracted from
    them: from each its share of the compiled programs. What a rollout measured of itself is scaled
    down where it is more than the iteration waited, as with `rollout_ahead`, when most of it went
    by during a sweep.

    Args:
      line: metrics of an iteration or of an evaluation; a missing time is none.
    """
    wholes = {whole: _seconds(line, whole) for whole in _WHOLES}
    compiling = _compiling(line, wholes)
    left = {whole: wholes[whole] - compiling.get(whole, 0.0) for whole in _WHOLES}
    parts = {part: _seconds(line, part) for part in _OF_ROLLOUT}
    measured = sum(parts.values())
    scale = min(1.0, left["rollout"] / measured) if measured else 1.0
    times = {f"rollout: {part}": seconds * scale for part, seconds in parts.items()}
    times["rollout: rest"] = max(0.0, left.pop("rollout") - sum(times.values()))
    times |= left | {"compile": sum(compiling.values())}
    return {phase: times[phase] for phase in PHASES if times[phase] > 0}


def _compiling(line: Mapping[str, Any], wholes: Mapping[str, float]) -> dict[str, float]:
    """Seconds of compiling inside each phase; no phase holds more than it took."""
    total = min(_seconds(line, "compile"), sum(wholes[whole] for whole in _COMPILING))
    shares = {whole: _number(line, f"{whole}/programs_compiled") for whole in _COMPILING}
    if not sum(shares.values()):
        shares = {whole: wholes[whole] for whole in _COMPILING}
    if not total:
        return {}
    # Programs are compiled ahead, so what a rollout measured of itself holds little of it.
    measured = sum(_seconds(line, part) for part in _OF_ROLLOUT)
    room = {**wholes, "rollout": max(0.0, wholes["rollout"] - measured)}
    inside = {
        whole: min(room[whole], total * share / sum(shares.values()))
        for whole, share in shares.items()
    }
    for limits in (room, wholes):  # what did not fit goes where there is room
        for whole in _COMPILING:
            inside[whole] += min(total - sum(inside.values()), limits[whole] - inside[whole])
    return inside


def _seconds(line: Mapping[str, Any], name: str) -> float:
    return _number(line, f"time/{name}_s")


def _number(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    usable = isinstance(value, int | float) and math.isfinite(value)
    return max(0.0, float(value)) if usable else 0.0
