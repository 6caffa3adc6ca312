"""Answers to multiple-choice questions."""

import random
import re

import pytest

from seeupo_jax.envs.checkers import make_checker


@pytest.mark.parametrize(
    "answer, chosen",
    [
        ("The answer is (B).", "B"),
        ("the answer is B", "B"),
        ("The correct answer is: B", "B"),
        ("Answer: **B**", "B"),
        ("**Answer: B**", "B"),
        ("**Answer:** B", "B"),
        ("**Answer**: B", "B"),
        ("The answer is B, because A is too large.", "B"),
        ("The answer is A. No: the answer is B.", "B"),
        ("The answer is \\text{B}", "B"),
        ("The final answer is $\\boxed{B}$.", "B"),
        ("so \\boxed{\\text{B}}", "B"),
        ("\\boxed{(B) Paris}", "B"),
        ("\\boxed{AB}", None),
        ("\\boxed{A}, or rather: the answer is B", "B"),
        ("The answer is A, or rather \\boxed{B}", "B"),
        ("B", "B"),
        (" (B)\n", "B"),
        ("I think about A first.\nB.", "B"),
        ("B) Paris", "B"),
        ("(B) Paris", "B"),
        ("A) London\nB) Paris", None),
        ("The answer is A or B.", None),
        ("Answer: A, B", None),
        ("Answer: B and B", "B"),
        ("The answer is A/B", None),
        ("The answer is not B.", None),
        ("The answer is a mystery.", None),
        ("The answer is Berlin.", None),
        ("answer is E", None),
        ("", None),
    ],
)
def test_the_chosen_letter_is_read(answer, chosen):
    checker = make_checker("choice", {}, "a")
    right = {letter for letter in "ABCD" if checker.check(answer, {"a": letter}).score == 1}
    assert right == ({chosen} if chosen else set())


def simple_evals(text):
    """The expression of simple-evals for multiple choice; the first match counts there."""
    found = re.search(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?", text)
    return found and found[1]


def mmlu_pro(text):
    """The extraction of MMLU-Pro's first step."""
    found = re.search(r"answer is \(?([A-J])\)?", text)
    return found and found[1]


def test_answers_of_the_usual_forms_are_read_as_by_simple_evals_and_mmlu_pro():
    draw = random.Random(0)
    checker = make_checker("choice", {"letters": "ABCDEFGHIJ"}, "a")
    for _ in range(200):
        letter = draw.choice("ABCD")
        start = draw.choice(["", "Both A and C look right. ", "(A) x\n(B) y\n"])
        form = draw.choice(["Answer: {}", "Answer: ${}$", "The answer is ({}).", "So answer is {}"])
        text = start + form.format(letter)
        twin = simple_evals(text) or mmlu_pro(text)
        assert twin == letter
        assert checker.check(text, {"a": twin}).score == 1
        assert checker.check(text, {"a": "ABCD"["BCDA".index(letter)]}).score == 0


@pytest.mark.parametrize("expected", ["C", "(C)", "C.", "C)", 2])
def test_the_expected_letter_may_have_marks_or_be_a_position(expected):
    assert make_checker("choice", {}, "a").check("C", {"a": expected}).score == 1


def test_letters_may_be_digits_as_in_arc():
    checker = make_checker("choice", {"letters": "1234"}, "a")
    assert checker.check("The answer is 3.", {"a": "3"}).score == 1


def test_an_answer_without_a_letter_is_told_the_form():
    result = make_checker("choice", {"letters": "ABC"}, "a").check("Paris", {"a": "A"})
    assert result.message.endswith("'The answer is X', X being A, B or C.")
