"""Stored trajectories: one JSON object a line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = -1  # the turn of tokens that nobody sampled
FAILED = ("env_error", "timeout")
STOPS = ("done", "max_turns", "max_tokens", *FAILED)


@dataclass(frozen=True)
class Segment:
    """Tokens in order, and for each of them the turn that sampled it, or `CONTEXT`."""

    tokens: np.ndarray
    turn: np.ndarray


@dataclass(frozen=True)
class Trajectory:
    """One episode; it has several segments where its context was rewritten between turns."""

    segments: tuple[Segment, ...]
    reward: float
    group: int
    stop: str = "done"

    @property
    def turns(self) -> int:
        """One more than the last turn."""
        return 1 + max(int(segment.turn.max(initial=CONTEXT)) for segment in self.segments)


def learnable(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Which trajectories are learned from: those that did not fail and are not alone: bool [N]."""
    sound = [t.stop not in FAILED for t in trajectories]
    left = Counter(t.group for t, ok in zip(trajectories, sound, strict=True) if ok)
    pairs = zip(trajectories, sound, strict=True)
    return np.array([ok and left[t.group] > 1 for t, ok in pairs], bool)


def read(path: str | Path) -> list[Trajectory]:
    """The trajectories of a file, in order.

    Raises:
      ValueError: no such file, or a line that is no trajectory.
    """
    if not Path(path).is_file():
        raise ValueError(f"--trajectories: no file {path}.")
    lines = Path(path).read_bytes().splitlines()
    found = [parse(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path}: got no trajectory; allowed: one JSON object a line.")
    return found


def parse(line: str | bytes, place: str) -> Trajectory:
    """One line's trajectory.

    Args:
      place: names the line in errors.

    Raises:
      ValueError: not JSON, a missing or a wrong value.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON: {error}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: got a {type(record).__name__}; allowed: a JSON object.")
    missing = [name for name in ("tokens", "turn", "reward", "group") if name not in record]
    if missing:
        raise ValueError(f"{place}: got no {missing[0]!r}; allowed: tokens, turn, reward, group.")
    reward, group, stop = record["reward"], record["group"], record.get("stop", "done")
    if not _is_number(reward):
        raise ValueError(f"{place}: reward: got {reward!r}; allowed: a finite number.")
    if isinstance(group, bool) or not isinstance(group, int):
        raise ValueError(f"{place}: group: got {group!r}; allowed: a whole number.")
    if stop not in STOPS:
        raise ValueError(f"{place}: stop: got {stop!r}; allowed: {', '.join(STOPS)}.")
    return Trajectory(_segments(record, place), float(reward), group, stop)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _segments(record: Mapping[str, Any], place: str) -> tuple[Segment, ...]:
    parts = {name: record[name] for name in ("tokens", "turn", "logp") if name in record}
    nested = bool(record["tokens"]) and isinstance(record["tokens"][0], list)
    parts = {name: part if nested else [part] for name, part in parts.items()}
    lengths = {name: [len(piece) for piece in part] for name, part in parts.items()}
    if any(other != lengths["tokens"] for other in lengths.values()):
        raise ValueError(f"{place}: got lengths {lengths}; allowed: the same for each.")
    pairs = zip(parts["tokens"], parts["turn"], strict=True)
    segments = tuple(
        Segment(_whole(tokens, "tokens", 0, place), _whole(turn, "turn", CONTEXT, place))
        for tokens, turn in pairs
    )
    _check_turns(segments, place)
    return segments


def _whole(values: Sequence[Any], name: str, least: int, place: str) -> np.ndarray:
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int) or v < least]
    if wrong:
        raise ValueError(f"{place}: {name}: got {wrong[0]!r}; allowed: whole numbers >= {least}.")
    return np.array(values, np.int64)


def _check_turns(segments: Sequence[Segment], place: str) -> None:
    """Every turn lies in one segment, and something stands before its first token."""
    owners = Counter(turn for s in segments for turn in set(s.turn[s.turn >= 0].tolist()))
    shared = [turn for turn, count in owners.items() if count > 1]
    if shared:
        raise ValueError(f"{place}: turn {shared[0]} is in two segments; allowed: in one.")
    if any(s.turn[:1].tolist() not in ([], [CONTEXT]) for s in segments):
        raise ValueError(f"{place}: the first token is sampled; allowed: a context before it.")
