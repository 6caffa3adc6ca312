"""Answers that have to be one of some texts."""

import pytest

from seeupo_jax.envs.checkers import make_checker


@pytest.mark.parametrize(
    "answer, expected, options, score",
    [
        (" Paris\n", "Paris", {}, 1),
        ("paris", "Paris", {}, 0),
        ("PARIS", "paris", {"ignore_case": True}, 1),
        ("STRASSE", "straße", {"ignore_case": True}, 1),
        ("New  York\n City", "New York City", {}, 0),
        ("New  York\n City", "New York City", {"ignore_space": True}, 1),
        ("NewYork", "New York", {"ignore_space": True}, 0),
        ("caf\u00e9", "cafe\u0301", {}, 1),
        ("lift", ["elevator", "lift"], {}, 1),
        ("stairs", ("elevator", "lift"), {}, 0),
        ("3", 3, {}, 1),
        ("0.5", 0.5, {}, 1),
        ("", "x", {}, 0),
    ],
)
def test_an_answer_is_right_if_it_is_an_expected_text(answer, expected, options, score):
    result = make_checker("exact", options, "a").check(answer, {"a": expected})
    assert result.score == score


def test_the_message_repeats_the_answer_in_short():
    result = make_checker("exact", {}, "a").check("x\n" + "y" * 1000, {"a": "z"})
    assert result.message.startswith("Your answer 'x\\nyyy") and len(result.message) < 200
