"""Answers whose length has to lie between two bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seeupo_jax.envs.checkers.checker import (
    RIGHT,
    Checker,
    CheckResult,
    check_flags,
    check_option,
    is_count,
)

_UNITS = {"words": lambda text: len(text.split()), "characters": len}


class Length(Checker):
    """Whether an answer's length lies in [min, max]; outside, the score falls linearly to 0.

    Args:
      answer_column: not read.
      min, max: the bounds; of `max` None is no bound.
      unit: words, which are separated by white space, or characters.
      margin: the distance from a bound at which the score is 0; None: the bound itself, so that
        the score is 0 at the length 0 and at 2 max.
      thoughts: whether thoughts count.
    """

    def __init__(
        self,
        answer_column: str | None,
        *,
        min: int = 0,
        max: int | None = None,
        unit: str = "words",
        margin: int | None = None,
        thoughts: bool = False,
    ):
        del answer_column
        check_option("unit", unit, ", ".join(_UNITS), lambda each: each in _UNITS)
        check_option("min", min, "an integer >= 0", is_count)
        bound = f"an integer >= 1 and >= min ({min}), or none"
        check_option("max", max, bound, lambda n: n is None or is_count(n) and n >= (min or 1))
        allowed = "an integer >= 1, or none"
        check_option("margin", margin, allowed, lambda n: n is None or is_count(n) and n >= 1)
        check_flags(thoughts=thoughts)
        if min == 0 and max is None:
            raise ValueError("check_options: length got neither min nor max; allowed: one or both.")
        self._min, self._max, self._margin, self._unit = min, max, margin, unit
        self.reads_thoughts = thoughts

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        length = _UNITS[self._unit](answer_text)
        if length < self._min:
            bound, allowed = self._min, f"at least {self._min}"
        elif self._max is not None and length > self._max:
            bound, allowed = self._max, f"at most {self._max}"
        else:
            return RIGHT
        fall = abs(length - bound) / (self._margin or bound)
        message = f"Your answer has {length} {self._unit}; allowed: {allowed}."
        return CheckResult(max(0.0, 1 - fall), message)
