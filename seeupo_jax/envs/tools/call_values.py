"""Tool calls as values, and the bounds of what a model may write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import THOUGHT, THOUGHT_END
from seeupo_jax.envs.tools.thoughts import thoughts_end

MAX_DEPTH = 64  # of nested lists and dicts; Python's own writers and readers fail near 1000
MAX_DIGITS = 1000  # of an integer; Python writes at most 4300, and takes quadratic time for it

_TOO_LARGE = 10**MAX_DIGITS


class ToolCallError(ValueError):
    """A response without a readable tool call; the text, for the model, says why."""


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments by name.

    positional: arguments without a name, which only the Python form has; they come first.
    """

    name: str
    arguments: Mapping[str, Any]
    positional: tuple[Any, ...] = ()


def skip_thoughts(text: str) -> str:
    """A text behind its thoughts."""
    if text.lstrip().startswith(THOUGHT) and THOUGHT_END not in text:
        raise ToolCallError("<think> needs its </think>")
    return text[thoughts_end(text) :]


def no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of pairs whose keys differ."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ToolCallError("a key or an argument occurs twice")
    return result


def within_bounds(call: ToolCall) -> ToolCall:
    """The call, if its values are not too large."""
    for value in (*call.positional, *call.arguments.values()):
        _check_bounds(value, depth=0)
    return call


def _check_bounds(value: Any, depth: int) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolCallError("a number must be finite")
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        raise ToolCallError(f"an integer may have at most {MAX_DIGITS} digits")
    if not isinstance(value, dict | list | tuple):
        return
    if depth == MAX_DEPTH:
        raise ToolCallError(f"values may be nested at most {MAX_DEPTH} deep")
    for part in (*value, *value.values()) if isinstance(value, dict) else value:
        _check_bounds(part, depth + 1)
