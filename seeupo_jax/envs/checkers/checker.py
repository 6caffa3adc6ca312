"""The interface of checkers, and the values of a row that they read."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from seeupo_jax.configuration.user_code import shown


class CheckResult(NamedTuple):
    """A checked answer. score: in [0, 1], 1 is right. message: for the policy, if it may retry.

    The message never contains the expected answer; it is empty for a score of 1.
    """

    score: float
    message: str


RIGHT = CheckResult(1.0, "")


def wrong(message: str) -> CheckResult:
    """The result of an answer without any credit."""
    return CheckResult(0.0, message)


class Checker(abc.ABC):
    """Checks answers to tasks; several threads may use one at the same time.

    reads_thoughts: `check` takes the whole text. Otherwise it takes the text after the thoughts.
    """

    reads_thoughts = False

    @abc.abstractmethod
    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        """Checks an answer to the task of a row; hostile text neither raises nor hangs.

        Raises:
          ValueError: as `check_row`.
        """

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks before the run that answers to a row's task can be checked.

        Raises:
          ValueError: the row lacks the column, or its value is none that the checker reads; one
            sentence.
        """
        return None

    def close(self) -> None:
        """Ends what the checker has started."""
        return None


def needed_column(check: str, column: str | None) -> str:
    """The column of a checker that needs one. Raises: ValueError, there is none."""
    if column is None:
        raise ValueError(f"check: got {check!r} without an answer; allowed: with a column of rows.")
    return column


def expected_value(row: Mapping[str, Any], column: str) -> Any:
    """The value of a row that an answer is compared with. Raises: ValueError, there is none."""
    if row.get(column) is None:
        names = ", ".join(map(str, row)) or "none"
        raise ValueError(f"answer: got a row without {column!r}; its columns: {names}.")
    return row[column]


def refused_value(column: str, value: Any, allowed: str) -> ValueError:
    """The error of a row's value that a checker cannot read."""
    return ValueError(f"answer: got {shown(value)} in the column {column!r}; allowed: {allowed}.")


def check_option(option: str, value: Any, allowed: str, fits: Callable[[Any], bool]) -> None:
    """Raises ValueError if an option does not fit; `allowed` describes in words what does."""
    if not fits(value):
        raise ValueError(f"check_options.{option}: got {shown(value)}; allowed: {allowed}.")


def check_flags(**options: Any) -> None:
    """Raises ValueError if one of these options is neither True nor False."""
    for option, value in options.items():
        check_option(option, value, "true or false", lambda each: isinstance(each, bool))


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    """Whether a value is an integer >= 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
