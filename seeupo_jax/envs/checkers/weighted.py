"""Several checks of one answer, whose scores are added up with weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.envs.checkers.checker import Checker, CheckResult, is_number
from seeupo_jax.envs.thoughts import thoughts_end


class Weighted(Checker):
    """The weighted sum of several checkers' scores.

    Args:
      checkers: at least one, by name.
      weights: of each, above 0; together 1.
    """

    reads_thoughts = True  # each checker gets its part

    def __init__(self, checkers: Mapping[str, Checker], weights: Mapping[str, Any]):
        fit = all(is_number(weight) and weight > 0 for weight in weights.values())
        if not fit or not math.isclose(sum(weights.values()), 1.0, abs_tol=1e-9):
            raise ValueError(
                f"check: got {shown(dict(weights))}; allowed: a name, or names with weights above 0"
                " that add up to 1."
            )
        self._checkers = [(checkers[name], float(weight)) for name, weight in weights.items()]

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        answer = answer_text[thoughts_end(answer_text) :]
        texts = [answer_text if each.reads_thoughts else answer for each, _ in self._checkers]
        results = [
            each.check(text, row) for (each, _), text in zip(self._checkers, texts, strict=True)
        ]
        if all(result.score == 1 for result in results):
            return CheckResult(1.0, "")  # the weights may add up to 0.9999999999
        weights = [weight for _, weight in self._checkers]
        score = sum(w * result.score for w, result in zip(weights, results, strict=True))
        return CheckResult(score, " ".join(each.message for each in results if each.message))

    def check_row(self, row: Mapping[str, Any]) -> None:
        for checker, _ in self._checkers:
            checker.check_row(row)

    def close(self) -> None:
        for checker, _ in self._checkers:
            checker.close()
