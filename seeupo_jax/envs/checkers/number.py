"""Answers that are a number."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from seeupo_jax.configuration.user_code import shortened
from seeupo_jax.envs.checkers.boxed import last_boxed
from seeupo_jax.envs.checkers.checker import (
    RIGHT,
    Checker,
    CheckResult,
    check_flags,
    check_option,
    expected_value,
    is_number,
    needed_column,
    refused_value,
    wrong,
)

_LONGEST = 1000  # digits of a number, and its largest exponent
_MARK = "####"  # of GSM8K
# A comma or narrow space groups thousands; LaTeX writes {,} and \, for them.
_GROUP = r"(?:,|\{,\}|\\,|[\u00a0\u2009\u202f])"
_PLAIN = rf"(?:\d{{1,3}}(?:{_GROUP}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"10\s?\^\s?(?:\{\s?(?P<braced>[+\-\u2212]?\d+)\s?\}|(?P<bare>[+\-\u2212]?\d+))"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}.])[+\-\u2212])?
    (?:\\?[$€£¥]\s?)?
    (?P<later_sign>(?<=[$€£¥])[+\-\u2212])?
    (?:
      (?<![\w\\.]) \\[dt]?frac\s?\{{\s?(?P<over>\d+)\s?\}}\s?\{{\s?(?P<under>\d+)\s?\}}
    | (?<![\w.]) {_POWER}
    | (?<![A-Za-z_\d])
      (?P<plain>{_PLAIN})
      (?: [eE](?P<exponent>[+\-]?\d+)(?!\w)
        | \s?(?:\\times|\\cdot|[×*x])\s?{_POWER.replace("braced", "b2").replace("bare", "b1")}
        | \s?/\s?(?P<denominator>\d+)(?![\d/])
      )?
    )
    (?P<percent>\s?\\?%)?
    """,
    re.VERBOSE | re.ASCII,
)


class _Read(NamedTuple):
    """A number in a text. shown: as it is written."""

    value: Fraction
    percent: bool
    shown: str


class Number(Checker):
    """Whether the number in an answer equals the expected one.

    The number of an answer is the first one after its last `####`, or in its last `\\boxed{}`,
    whichever starts later; without these it is its last number. Fractions, thousands separators,
    currency signs, percent signs and powers of ten are read exactly, without rounding.

    Args:
      answer_column: of a number, or a text whose number is read as that of an answer.
      tolerance: the largest difference from the expected number.
      relative_tolerance: the same, as a share of the expected number; the larger of both counts.
      marked_only: whether an answer without `####` and `\\boxed{}` is wrong.
    """

    def __init__(
        self,
        answer_column: str | None,
        *,
        tolerance: float = 0.0,
        relative_tolerance: float = 0.0,
        marked_only: bool = False,
    ):
        self._column = needed_column("number", answer_column)
        for name, value in (("tolerance", tolerance), ("relative_tolerance", relative_tolerance)):
            check_option(name, value, "a number >= 0", lambda each: is_number(each) and each >= 0)
        check_flags(marked_only=marked_only)
        # As they are written: 0.1 is a tenth.
        self._tolerance = Fraction(str(tolerance))
        self._relative = Fraction(str(relative_tolerance))
        self._marked_only = marked_only

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        expected = self._expected(row)
        answer = read_number(answer_text, self._marked_only)
        if answer is None:
            where = "after '####' or in \\boxed{}" if self._marked_only else "in it"
            return wrong(f"Your answer has no number that can be read {where}.")
        room = max(self._tolerance, self._relative * abs(expected.value))
        if any(abs(value - expected.value) <= room for value in _readings(answer, expected)):
            return RIGHT
        return wrong(f"Your answer {shortened(answer.shown, 40)} is wrong.")

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._expected(row)

    def _expected(self, row: Mapping[str, Any]) -> _Read:
        value = expected_value(row, self._column)
        number = read_number(value) if isinstance(value, str) else None
        if is_number(value):
            number = _Read(Fraction(str(value)), False, str(value))
        if number is None:
            raise refused_value(self._column, value, "a number, or a text with one")
        return number


def _readings(answer: _Read, expected: _Read) -> list[Fraction]:
    """Values of an answer: with a percent sign on one side only, 50% is 50 and 0.5."""
    if answer.percent == expected.percent:
        return [answer.value]
    return [answer.value, answer.value / 100 if answer.percent else answer.value * 100]


def read_number(text: str, marked_only: bool = False) -> _Read | None:
    """The number of an answer; None: it has none, or one of more than 1000 digits."""
    mark, box = text.rfind(_MARK), last_boxed(text)
    if mark >= 0 and (box is None or mark > box.start):
        found = _NUMBER.search(text, mark + len(_MARK))
    elif box is not None:
        found = _NUMBER.search(box.content)
    elif marked_only:
        return None
    else:
        every = deque(_NUMBER.finditer(text), maxlen=1)
        found = every.pop() if every else None
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> _Read | None:
    sign = -1 if (found["sign"] or found["later_sign"] or "+") in "-\u2212" else 1
    exponent = next(filter(None, (found[name] for name in _EXPONENTS)), "0").replace("\u2212", "-")
    over = re.sub(_GROUP, "", found["plain"] or "") or found["over"] or "1"
    under = found["denominator"] or found["under"] or "1"
    if (
        max(map(len, (over, under))) > _LONGEST
        or len(exponent) > 5
        or abs(int(exponent)) > _LONGEST
    ):
        return None
    if int(under) == 0:
        return None
    value = sign * Fraction(over) / int(under) * Fraction(10) ** int(exponent)
    return _Read(value, found["percent"] is not None, found.group().strip())


_EXPONENTS = ("exponent", "braced", "bare", "b1", "b2")
