"""Checkers of answers, by name: each compares a model's answer with a task's row. No jax."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.user_code import check_arguments, import_attribute, shown
from seeupo_jax.envs.checkers.checker import Checker, CheckResult
from seeupo_jax.envs.checkers.weighted import Weighted

# The class of each checker by name; imported on first use, since some need extra packages.
CHECKERS = {
    "exact": "seeupo_jax.envs.checkers.exact:Exact",
    "choice": "seeupo_jax.envs.checkers.choice:Choice",
    "number": "seeupo_jax.envs.checkers.number:Number",
    "math": "seeupo_jax.envs.checkers.math_expression:MathExpression",
    "code": "seeupo_jax.envs.checkers.code:Code",
    "json": "seeupo_jax.envs.checkers.json_schema:JsonSchema",
    "format": "seeupo_jax.envs.checkers.format_pattern:FormatPattern",
    "length": "seeupo_jax.envs.checkers.length:Length",
}


def make_checker(
    name: str | Mapping[str, float], options: Mapping[str, Any], answer_column: str | None
) -> Checker:
    """Makes a checker by its name, or several with weights; `close` it.

    Args:
      name: one of `CHECKERS`, or a weight for each of several: the score is the weighted sum.
      options: keyword arguments of the checker; of several, a mapping of these by checker.
      answer_column: the column of a row with what the checker compares with; None: there is none.

    Raises:
      ValueError: a name, weight or option is unknown or wrong, the checker needs a column or a
        package; one sentence with what was got and what is allowed.
    """
    if isinstance(name, Mapping):
        return _make_weighted(name, options, answer_column)
    if name not in CHECKERS:
        raise ValueError(f"check: got {shown(name)}; allowed: {', '.join(CHECKERS)}.")
    kind = import_attribute(CHECKERS[name], "check", "class", callable)
    try:
        check_arguments(inspect.signature(kind), (answer_column,), options)
    except TypeError as error:
        allowed = [*inspect.signature(kind).parameters][1:]
        raise ValueError(
            f"check_options: {name} refused {shown(dict(options))} ({error}); allowed:"
            f" {', '.join(allowed)}."
        ) from None
    return kind(answer_column, **options)


def _make_weighted(
    weights: Mapping[str, Any], options: Mapping[str, Any], answer_column: str | None
) -> Checker:
    if unknown := [name for name in options if name not in weights]:
        raise ValueError(
            f"check_options: got {shown(unknown[0])}; allowed with several checks: options by the"
            f" name of a check, {', '.join(weights)}."
        )
    checkers = {name: make_checker(name, options.get(name, {}), answer_column) for name in weights}
    return Weighted(checkers, weights)


__all__ = ["CHECKERS", "CheckResult", "Checker", "make_checker"]
