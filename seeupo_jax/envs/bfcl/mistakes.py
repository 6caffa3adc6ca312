"""Mistakes of a demonstrator on the official simulators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from seeupo_jax.envs.tool_calls import ToolCall

# The probability of each mistake in a user turn at skill 0; at skill 1 it is 0.
MISTAKES = {
    "omission": 0.4,  # omits a call
    "misreading": 0.6,  # uses another value of the conversation for an argument
    "hurry": 0.8,  # guesses a detail that only the next message gives
}
Calls = Sequence[ToolCall]


def with_mistakes(reference: Sequence[Calls], skill: float, rng: Random) -> Iterator[Calls]:
    """Yields the calls that a demonstrator makes in each user turn.

    Args:
      reference: the calls of the reference solution.
      skill: 1 makes exactly these; 0 makes each mistake with its probability in `MISTAKES`.
      rng: the generator of the mistakes.
    """
    values = [value for turn in reference for call in turn for value in call.arguments.values()]
    for turn, following in zip(reference, (*reference[1:], ()), strict=True):
        made = {name: rng.random() < (1 - skill) * chance for name, chance in MISTAKES.items()}
        calls = [*turn]
        if not turn and made["hurry"]:
            calls = _misread(following, values, rng)
        if turn and made["misreading"]:
            calls = _misread(calls, values, rng)
        if turn and made["omission"]:
            calls.pop(rng.randrange(len(calls)))
        yield calls


def _misread(calls: Calls, values: Sequence[Any], rng: Random) -> list[ToolCall]:
    """The calls with one argument changed, if any can be changed."""
    changes = [
        (index, name, other)
        for index, call in enumerate(calls)
        for name, value in call.arguments.items()
        if (other := _another(value, values, rng)) is not None
    ]
    changed = [*calls]
    if changes:
        index, name, other = rng.choice(changes)
        changed[index] = ToolCall(calls[index].name, {**calls[index].arguments, name: other})
    return changed


def _another(value: Any, values: Sequence[Any], rng: Random) -> Any:
    """Another value of the same type; without one, a number plus 1, or None."""
    others = [other for other in values if type(other) is type(value) and other != value]
    if others:
        return rng.choice(others)
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else None
