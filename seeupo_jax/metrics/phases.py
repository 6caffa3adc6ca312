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
_TIMED = ("rollout", "sweep", "sft", "evaluation", "checkpoint")
_COMPILING = ("rollout", "sweep", "sft", "evaluation")  # whose time holds that of compiling
_OF_ROLLOUT = ("decode", "prefill", "environment")


def total_time(line: Mapping[str, Any]) -> float:
    """Seconds that a line of metrics accounts for: all of its phases."""
    return sum(_seconds(line, phase) for phase in _TIMED)


def split_time(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase, in the order of `PHASES`, without those that took no time.

    They add up to `total_time`. Compiling happens inside the other phases and is subtracted from
    them: from each its share of the compiled programs. A rollout's own times are scaled down if
    they exceed the time that the iteration waited, as with `rollout.max_lag`, where most of a
    rollout runs during sweeps.

    Args:
      line: metrics of an iteration or of an evaluation; a missing time counts as 0.
    """
    totals = {phase: _seconds(line, phase) for phase in _TIMED}
    compiling = _compiling(line, totals)
    remaining = {phase: totals[phase] - compiling.get(phase, 0.0) for phase in _TIMED}
    parts = {part: _seconds(line, part) for part in _OF_ROLLOUT}
    measured = sum(parts.values())
    scale = min(1.0, remaining["rollout"] / measured) if measured else 1.0
    times = {f"rollout: {part}": seconds * scale for part, seconds in parts.items()}
    times["rollout: rest"] = max(0.0, remaining.pop("rollout") - sum(times.values()))
    times |= remaining | {"compile": sum(compiling.values())}
    return {phase: times[phase] for phase in PHASES if times[phase] > 0}


def _compiling(line: Mapping[str, Any], totals: Mapping[str, float]) -> dict[str, float]:
    """Seconds of compiling inside each phase; no phase holds more than it took."""
    total = min(_seconds(line, "compile"), sum(totals[phase] for phase in _COMPILING))
    shares = {phase: _number(line, f"{phase}/programs_compiled") for phase in _COMPILING}
    if not sum(shares.values()):
        shares = {phase: totals[phase] for phase in _COMPILING}
    if not total:
        return {}
    # Programs are compiled ahead, so a rollout's own times contain little of it.
    measured = sum(_seconds(line, part) for part in _OF_ROLLOUT)
    room = {**totals, "rollout": max(0.0, totals["rollout"] - measured)}
    inside = {
        phase: min(room[phase], total * share / sum(shares.values()))
        for phase, share in shares.items()
    }
    for limits in (room, totals):  # the excess goes to phases with room for it
        for phase in _COMPILING:
            inside[phase] += min(total - sum(inside.values()), limits[phase] - inside[phase])
    return inside


def _seconds(line: Mapping[str, Any], name: str) -> float:
    return _number(line, f"time/{name}_s")


def _number(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    usable = isinstance(value, int | float) and math.isfinite(value)
    return max(0.0, float(value)) if usable else 0.0
