"""Answers that have to be JSON of a schema."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jsonschema.protocols
import jsonschema.validators
import referencing
import referencing.exceptions
import regex

from seeupo_jax.configuration.user_code import escaped, in_one_line, shown
from seeupo_jax.envs.checkers.checker import (
    RIGHT,
    Checker,
    CheckResult,
    expected_value,
    refused_value,
    wrong,
)
from seeupo_jax.envs.checkers.fenced import last_fenced

_PATTERN_S = 1.0  # of one match of a schema's `pattern`


class JsonSchema(Checker):
    """Whether an answer is JSON that a JSON schema allows.

    The JSON is the last block fenced as `json`, or without such a block the whole answer.

    Args:
      answer_column: of the schema, a mapping or its JSON, where there is no option `schema`.
      schema: the schema of every row.
    """

    def __init__(self, answer_column: str | None, *, schema: Mapping[str, Any] | str | None = None):
        if schema is None and answer_column is None:
            raise ValueError(
                "check: got 'json' without a schema; allowed: with check_options.schema, or a"
                " column of rows."
            )
        self._column = answer_column
        self._every: jsonschema.protocols.Validator | None = None
        if schema is not None:
            try:
                self._every = _validator(schema)
            except ValueError as error:
                raise ValueError(
                    f"check_options.schema: got {shown(schema)} ({error}); allowed: a JSON schema."
                ) from None

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        validator = self._of_row(row)
        block = last_fenced(answer_text, ("json",))
        try:
            value = json.loads(
                answer_text if block is None else block, parse_constant=_refuse_constant
            )
        except (ValueError, RecursionError) as error:
            return wrong(f"Your answer is no JSON: {in_one_line(escaped(str(error)), 200)}.")
        try:
            error = next(validator.iter_errors(value), None)
        except TimeoutError:
            return wrong("Your answer has a text that takes too long to compare with a pattern.")
        except (RecursionError, OverflowError):
            return wrong("Your answer is nested too deeply, or has a number that is too large.")
        if error is None:
            return RIGHT
        place = in_one_line(escaped(error.json_path), 100)
        return wrong(f"Your answer breaks the rule {error.validator!r} of the schema at {place}.")

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._of_row(row)

    def _of_row(self, row: Mapping[str, Any]) -> jsonschema.protocols.Validator:
        if self._every is not None:
            return self._every
        value = expected_value(row, self._column or "")
        try:
            return _validator(value)
        except ValueError as error:
            raise refused_value(self._column or "", value, f"a JSON schema ({error})") from None


def _validator(schema: Mapping[str, Any] | str) -> jsonschema.protocols.Validator:
    """The validator of a schema. Raises: ValueError, it is none."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _cached_validator(text)


@functools.lru_cache(maxsize=256)
def _cached_validator(text: str) -> jsonschema.protocols.Validator:
    try:
        schema = json.loads(text)
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, RecursionError, jsonschema.SchemaError) as error:
        raise ValueError(in_one_line(str(getattr(error, "message", error)), 200)) from None
    if not isinstance(schema, dict):
        raise ValueError("it is no JSON object")
    if text.count('"$ref"') and (remote := _remote_reference(schema)):
        raise ValueError(f"its $ref {shown(remote)} leads outside of it")
    limited = jsonschema.validators.extend(kind, {"pattern": _check_pattern})
    return limited(schema, registry=referencing.Registry())  # which fetches nothing


def _remote_reference(schema: Any) -> str | None:
    """A `$ref` of a schema that does not start with `#`; None: it has none."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            reference = part.get("$ref", "#")
            if isinstance(reference, str) and not reference.startswith("#"):
                return reference
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return None


def _check_pattern(
    validator: Any, pattern: str, value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """`pattern` with a time limit: the value is of the policy's. Raises: TimeoutError."""
    if validator.is_type(value, "string") and not regex.search(pattern, value, timeout=_PATTERN_S):
        yield jsonschema.ValidationError("does not match the pattern")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
