"""Answers whose length has to lie between two bounds."""

import pytest

from seeupo_jax.envs.checkers import make_checker


@pytest.mark.parametrize(
    "options, text, score",
    [
        ({"max": 4}, "a b c d", 1),
        ({"max": 4}, "a b c d e", 0.75),
        ({"max": 4}, "a " * 8, 0),
        ({"max": 4}, "a " * 99, 0),
        ({"max": 4, "margin": 2}, "a b c d e", 0.5),
        ({"min": 4}, "a b c", 0.75),
        ({"min": 4}, "", 0),
        ({"min": 4, "margin": 2}, "a b", 0),
        ({"min": 2, "max": 3, "unit": "characters"}, "abcd", 1 - 1 / 3),
        ({"min": 2, "max": 3, "unit": "characters"}, " a", 1),
    ],
)
def test_the_score_falls_linearly_outside_of_the_bounds(options, text, score):
    result = make_checker("length", options, None).check(text, {})
    assert result.score == pytest.approx(score, abs=1e-12)


def test_thoughts_count_if_the_option_says_so():
    assert not make_checker("length", {"max": 1}, None).reads_thoughts
    assert make_checker("length", {"max": 1, "thoughts": True}, None).reads_thoughts
