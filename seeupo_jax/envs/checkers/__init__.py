"""Checkers of answers, by name: each compares a model's answer with a task's row. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CheckResult:
    """A checked answer. score: in [0, 1], 1 is right. message: for the policy, if it may retry."""

    score: float
    message: str


class Checker(Protocol):
    """Checks answers to the tasks of a run; several threads may have one each."""

    def check(self, answer_text: str, row: Mapping[str, object]) -> CheckResult:
        """Checks an answer, given without thoughts, to the task of a row."""
        ...


class Exact:
    """Whether an answer is the expected text; white space around either does not count."""

    def __init__(self, options: Mapping[str, object], answer_column: str | None):
        if options:
            raise ValueError(f"check_options: got {dict(options)!r} for exact; allowed: none.")
        if answer_column is None:
            raise ValueError(
                "check: got 'exact' without an answer; allowed: with env.options.answer."
            )
        self._column = answer_column

    def check(self, answer_text: str, row: Mapping[str, object]) -> CheckResult:
        if answer_text.strip() == str(row[self._column]).strip():
            return CheckResult(1.0, "Right.")
        return CheckResult(0.0, "This is not the expected answer.")


CHECKERS = {"exact": Exact}


def make_checker(name: str, options: Mapping[str, object], answer_column: str | None) -> Checker:
    """Makes a checker by its name.

    Raises:
      ValueError: the name or an option is unknown, or the checker needs an answer column.
    """
    if name not in CHECKERS:
        raise ValueError(f"check: got {name!r}; allowed: {', '.join(CHECKERS)}.")
    return CHECKERS[name](options, answer_column)
