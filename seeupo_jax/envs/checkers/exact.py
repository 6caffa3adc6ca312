"""Answers that have to be one of some texts."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.envs.checkers.checker import (
    RIGHT,
    Checker,
    CheckResult,
    check_flags,
    expected_value,
    needed_column,
    refused_value,
    wrong,
)


class Exact(Checker):
    """Whether an answer is an expected text; white space around either does not count.

    Letters with accents are compared in Unicode's normal form NFC.

    Args:
      answer_column: of the expected text or number, or of a list of these: each is right.
      ignore_case: whether `Paris` equals `PARIS`.
      ignore_space: whether any run of white space equals one space.
    """

    def __init__(
        self, answer_column: str | None, *, ignore_case: bool = False, ignore_space: bool = False
    ):
        self._column = needed_column("exact", answer_column)
        check_flags(ignore_case=ignore_case, ignore_space=ignore_space)
        self._ignore_case, self._ignore_space = ignore_case, ignore_space

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        allowed = self._expected(row)
        if self._normal(answer_text) in allowed:
            return RIGHT
        answer = shown(answer_text.strip(), 100)
        return wrong(f"Your answer {answer} is not the expected text.")

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._expected(row)

    def _expected(self, row: Mapping[str, Any]) -> set[str]:
        value = expected_value(row, self._column)
        texts = value if isinstance(value, list | tuple) else [value]
        if not texts or not all(isinstance(text, str | int | float) for text in texts):
            raise refused_value(self._column, value, "a text or number, or a list of these")
        return {self._normal(str(text)) for text in texts}

    def _normal(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text.strip())
        if self._ignore_case:
            text = text.casefold()
        return " ".join(text.split()) if self._ignore_space else text
