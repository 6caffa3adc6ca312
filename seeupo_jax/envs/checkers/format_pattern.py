"""Answers whose whole text has to match a regular expression."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import regex

from seeupo_jax.envs.checkers.checker import (
    RIGHT,
    Checker,
    CheckResult,
    check_option,
    is_number,
    wrong,
)

_LOGGER = logging.getLogger(__name__)


class FormatPattern(Checker):
    """Whether the whole text, thoughts included, matches a regular expression.

    White space around the text does not count, and `.` matches line breaks. The syntax is that of
    the package `regex`, which can stop a match that takes too long; such a text scores 0.

    Args:
      answer_column: not read.
      pattern: the regular expression.
      timeout_s: of one match, in seconds.
    """

    reads_thoughts = True

    def __init__(self, answer_column: str | None, *, pattern: str, timeout_s: float = 1.0):
        del answer_column
        check_option("pattern", pattern, "a regular expression", lambda p: isinstance(p, str))
        check_option("timeout_s", timeout_s, "a number > 0", lambda t: is_number(t) and t > 0)
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL | regex.VERSION0)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"check_options.pattern: got {pattern!r}, which cannot be read ({error});"
                " allowed: a regular expression."
            ) from None
        self._timeout_s = timeout_s

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        try:
            # concurrent: other threads continue during a long match.
            match = self._pattern.fullmatch(
                answer_text.strip(), timeout=self._timeout_s, concurrent=True
            )
        except (TimeoutError, MemoryError):
            _LOGGER.warning(
                "check format: a text of %d characters was not matched in %g s and scores 0.",
                len(answer_text),
                self._timeout_s,
            )
            match = None
        return RIGHT if match else wrong("Your answer does not have the required format.")
