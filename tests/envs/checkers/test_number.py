"""Answers that are a number."""

import random
import re
from fractions import Fraction

import pytest

from seeupo_jax.envs.checkers import make_checker
from seeupo_jax.envs.checkers.boxed import last_boxed
from seeupo_jax.envs.checkers.number import read_number


@pytest.mark.parametrize(
    "text, value",
    [
        # GSM8K's own form, with a calculator's annotation.
        ("She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", 72),
        ("#### 72 dollars for 3 people", 72),
        ("#### -1,234.50", Fraction("-1234.5")),
        ("#### $18", 18),
        ("####\n5", 5),
        ("#### none", None),
        ("It costs 3 + 4 = 7.", 7),
        ("The total is $1,234,567.89!", Fraction("1234567.89")),
        ("1{,}000", 1000),
        ("1\\,000", 1000),
        ("1\u202f000", 1000),
        ("1,2", 2),
        ("1,23", 23),
        ("x = -5.", -5),
        ("x=\u22125", -5),
        ("-$5", -5),
        ("$-5$", -5),
        ("\\$5", 5),
        ("10 - 5", 5),
        ("10-5", 5),
        ("(3)-4", 4),
        ("+7", 7),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("1/0", None),
        ("1.5e3", 1500),
        ("2E-2", Fraction("0.02")),
        ("1.5 \\times 10^{3}", 1500),
        ("2×10^-2", Fraction("0.02")),
        ("10^{-3}", Fraction("0.001")),
        (".5", Fraction("0.5")),
        ("0.1", Fraction("0.1")),
        ("\\boxed{\\frac{1}{2}} since 3 < 4", Fraction(1, 2)),
        ("\\boxed{5 \\text{ cm}^2}", 5),
        ("\\boxed{x = {12}}", 12),
        ("#### 1, so \\boxed{2}", 2),
        ("\\boxed{2}\n#### 1", 1),
        ("**72**", 72),
        ("1 and H2O", 1),
        ("NaN", None),
        ("infinity", None),
        ("1e999999999", None),
        ("1" * 1001, None),
        ("1" * 1000, int("1" * 1000)),
        ("٣", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer_is_read_exactly(text, value):
    number = read_number(text)
    assert (number and number.value) == value


@pytest.mark.parametrize(
    "text, content",
    [
        ("\\boxed{1}\\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\fbox {4}", "4"),
        ("} \\boxed{5}", "5"),
        ("{ \\boxed{6}", "6"),
        ("\\boxed 7", None),
    ],
)
def test_the_last_closed_box_is_read_with_its_braces(text, content):
    box = last_boxed(text)
    assert (box and box.content) == content


def verl_gsm8k(text, method):
    """verl's extraction for GSM8K (verl/utils/reward_score/gsm8k.py), as published."""
    if method == "strict":
        found = re.findall(r"#### (\-?[0-9\.\,]+)", text)
        return found[-1].replace(",", "").replace("$", "") if found else None
    numbers = [n for n in re.findall(r"(\-?[0-9\.\,]+)", text) if n not in ("", ".")]
    return numbers[-1] if numbers else None


def lm_eval_gsm8k(text):
    """The filter `flexible-extract` of lm-eval's gsm8k task, with its ignored characters."""
    found = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)
    last = next(filter(None, found[-1]), "") if found else ""
    return re.sub(r",|\$|\.$", "", last)


def test_gsm8k_answers_are_judged_as_by_verl_and_lm_eval():
    draw = random.Random(1)
    for _ in range(300):
        number, other = draw.randint(-9999, 99999), draw.randint(0, 500)
        written = draw.choice([str(number), f"{number:,}"])
        expected = f"{other} * 2 = <<{other}*2={2 * other}>>{2 * other}.\n#### {number}"
        strict = f"First {other} apples.\n#### {written}"
        flexible = f"We have {other} apples, so the answer is {written}"
        right = draw.choice([number, number + 1])
        for text, twin in (
            (strict, verl_gsm8k(strict, "strict")),
            (flexible, lm_eval_gsm8k(flexible)),
        ):
            wanted = float(twin) == right
            row = {"a": expected if right == number else right}
            assert make_checker("number", {}, "a").check(text, row).score == wanted


def test_without_marks_an_answer_is_wrong_where_they_are_required():
    strict = make_checker("number", {"marked_only": True}, "a")
    assert verl_gsm8k("It is 72.", "strict") is None
    assert strict.check("It is 72.", {"a": 72}).score == 0
    assert strict.check("It is \\boxed{72}.", {"a": 72}).score == 1
    assert strict.check("#### 72", {"a": "#### 72"}).score == 1


@pytest.mark.parametrize(
    "answer, expected, score",
    [("50%", 50, 1), ("50%", 0.5, 1), ("50%", "50%", 1), ("0.5", "50%", 1), ("50", "50\\%", 1)]
    + [("0.5%", "50%", 0), ("0.5", 50, 0), ("5%", 0.5, 0)],
)
def test_a_percent_sign_on_one_side_only_gives_two_readings(answer, expected, score):
    assert make_checker("number", {}, "a").check(answer, {"a": expected}).score == score


@pytest.mark.parametrize(
    "options, answer, expected, score",
    [
        ({}, "0.333", "1/3", 0),
        ({"tolerance": 0.001}, "0.333", "1/3", 1),
        ({"tolerance": 0.5}, "10.5", 10, 1),
        ({"tolerance": 0.5}, "10.51", 10, 0),
        ({"relative_tolerance": 0.25}, "75", 100, 1),
        ({"relative_tolerance": 0.25}, "-75", -100, 1),
        ({"relative_tolerance": 0.25}, "74", 100, 0),
        ({"relative_tolerance": 0.25}, "0.1", 0, 0),
        ({"tolerance": 1, "relative_tolerance": 0.25}, "1", 0, 1),
        ({}, "9007199254740993", 9007199254740992, 0),
    ],
)
def test_tolerances_are_distances_from_the_expected_number(options, answer, expected, score):
    assert make_checker("number", options, "a").check(answer, {"a": expected}).score == score
