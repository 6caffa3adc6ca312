"""Answers that have to be JSON of a schema."""

import pytest

from seeupo_jax.envs.checkers import make_checker

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}, "age": {"minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "text, score, message",
    [
        ('{"name": "ann", "age": 3}', 1, ""),
        ('Here:\n```json\n{"name": "ann"}\n```\nDone.', 1, ""),
        ('```json\n{}\n```\n```json\n{"name": "b"}\n```', 1, ""),
        ('```\n{"name": "ann"}\n```', 0, "no JSON"),
        ('{"name": "Ann"}', 0, "breaks the rule 'pattern' of the schema at $.name"),
        ('{"name": "ann", "age": -1}', 0, "breaks the rule 'minimum' of the schema at $.age"),
        ('{"name": "ann", "x": 1}', 0, "breaks the rule 'additionalProperties' of the schema at $"),
        ("{}", 0, "breaks the rule 'required'"),
        ('{"name": "ann", "age": NaN}', 0, "NaN is no JSON number"),
        ('{"name": "ann", "age": ' + "9" * 5000 + "}", 0, "no JSON"),
        ('{"name": "ann"', 0, "no JSON"),
    ],
)
def test_an_answer_is_right_if_the_schema_allows_it(text, score, message):
    result = make_checker("json", {"schema": SCHEMA}, None).check(text, {})
    assert result.score == score and message in result.message


def test_the_schema_may_be_a_column():
    checker = make_checker("json", {}, "schema")
    for schema in (SCHEMA, '{"type": "object", "required": ["name"]}'):
        assert checker.check('{"name": "a"}', {"schema": schema}).score == 1
        assert checker.check("{}", {"schema": schema}).score == 0


def test_deep_values_and_slow_patterns_score_0():
    tree = {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    deep = "[" * 300 + "]" * 300
    assert make_checker("json", {"schema": tree}, None).check(deep, {}).score == 0
    slow = make_checker("json", {"schema": {"pattern": r"^(x+x+)+\1y$"}}, None)
    result = slow.check('"' + "x" * 1000 + '"', {})
    assert result.score == 0
