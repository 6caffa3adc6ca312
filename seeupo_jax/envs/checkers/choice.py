"""Answers to multiple-choice questions: a letter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from seeupo_jax.envs.checkers.boxed import last_boxed
from seeupo_jax.envs.checkers.checker import (
    RIGHT,
    Checker,
    CheckResult,
    check_option,
    expected_value,
    is_count,
    needed_column,
    refused_value,
    wrong,
)


class Choice(Checker):
    """Whether the letter that an answer chooses is the expected one.

    It is the last of what `\\boxed{B}` or `\\boxed{B) Paris}` holds and what "answer is B" or
    "answer: B" says, if there is one. Else it is the last line that is only a letter. Else it is
    the letter that starts a line as in "B) Paris", if only one does. A statement such as "answer is
    A or B" chooses none.

    Args:
      answer_column: of the letter, or of its position: 0 is the first of `letters`.
      letters: those that may be chosen.
    """

    def __init__(self, answer_column: str | None, *, letters: str = "ABCD"):
        self._column = needed_column("choice", answer_column)
        check_option("letters", letters, "two or more different letters or digits", _are_letters)
        self._letters = letters
        one = f"([{letters}])"
        # Bounded runs of marks: an unbounded one before a letter that never comes costs its square.
        opened, closed = r"[\s*_$({\[\"'`]{0,12}", r"(?![A-Za-z0-9])[)}\]*_$.\"'`]{0,12}"
        marked = rf"{opened}(?:\\(?:text|mathrm|textbf|mathbf)\{{\(?)?{one}{closed}"
        self._others = re.compile(
            rf"\s{{0,9}}(?:,|/|&|\bor\b|\band\b)\s{{0,9}}{opened}{one}{closed}"
        )
        # Only its words in any case: "answer is a mystery" chooses no A.
        self._stated = re.compile(
            rf"\b(?:[Aa]nswer|ANSWER)(?:[*_]{{0,3}}\s{{0,3}}:|\s{{1,3}}(?:is|IS)\b\s{{0,3}}:?){marked}"
        )
        self._boxed = re.compile(rf"\s*{marked}\s*")
        self._line = re.compile(rf"^[ \t]{{0,20}}{marked}[ \t]{{0,20}}$", re.MULTILINE)
        self._begun = re.compile(rf"^[ \t]{{0,20}}[*_(\[]{{0,4}}{one}[)\].:]", re.MULTILINE)

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        expected, letter = self._expected(row), self._chosen(answer_text)
        if letter is None:
            end = f"{', '.join(self._letters[:-1])} or {self._letters[-1]}"
            return wrong(
                f"Your answer chooses no letter; end it with 'The answer is X', X being {end}."
            )
        return RIGHT if letter == expected else wrong(f"Your answer {letter} is wrong.")

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._expected(row)

    def _expected(self, row: Mapping[str, Any]) -> str:
        value = expected_value(row, self._column)
        if is_count(value) and value < len(self._letters):
            return self._letters[value]
        letter = re.fullmatch(r"\(?(.)[).]?", value.strip()) if isinstance(value, str) else None
        if letter is None or letter[1] not in self._letters:
            allowed = f"one of {self._letters}, or its position from 0"
            raise refused_value(self._column, value, allowed)
        return letter[1]

    def _chosen(self, text: str) -> str | None:
        """The letter that an answer chooses; None: none, or several."""
        stated = [*self._stated.finditer(text)]
        box = last_boxed(text)
        inside = None
        if box is not None:
            inside = self._boxed.fullmatch(box.content) or self._begun.match(box.content)
        if stated and (inside is None or box is None or stated[-1].start() > box.start):
            last = stated[-1]
            other = self._others.match(text, last.end())
            return last[1] if other is None or other[1] == last[1] else None
        if inside is not None:
            return inside[1]
        if lines := self._line.findall(text):
            return lines[-1]
        begun = {*self._begun.findall(text)}
        return begun.pop() if len(begun) == 1 else None


def _are_letters(value: Any) -> bool:
    return (
        isinstance(value, str)
        and value.isascii()
        and value.isalnum()
        and len({*value}) == len(value) >= 2
    )
