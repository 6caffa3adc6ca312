"""Mathematical expressions, compared by math-verify in processes."""

import os
import subprocess
import sys
import threading

import math_verify
import pytest
from places import ROOT

from seeupo_jax.envs.checkers import make_checker

# Of math-verify's README and its own tests, and of the data sets MATH and AIME.
CASES = (
    (r"${1,3} \cup {2,4}$", r"${1,2,3,4}$", True),
    (r"$\frac{1}{2}$", "so it is 0.5", True),
    (r"$1/3$", r"$0.333333$", True),
    (r"$x^2+2x+1$", r"$(x+1)^2$", True),
    (r"$(0,1)$", r"$[0,1]$", False),
    (r"$\{1,2\}$", r"$\{2,1\}$", True),
    (r"$1 < x < 2$", r"$x \in (1, 2)$", True),
    (r"\boxed{\sqrt{8}}", r"thus \boxed{2\sqrt{2}}.", True),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"$\begin{pmatrix}1\\2\end{pmatrix}$", True),
    (r"$10\%$", r"$0.1$", True),
    (r"$x=3$", r"$3$", True),
    (r"\boxed{204}", r"The answer is $\boxed{204}$", True),
    (r"\boxed{204}", r"The answer is $\boxed{205}$", False),
    (r"$\pi$", r"$3.14$", False),
)


@pytest.fixture(scope="module")
def verdicts():
    """Of the checker, all asked at the same time by threads other than the main one."""
    found = {}
    checker = make_checker("math", {}, "a")

    def ask(number, gold, answer):
        found[number] = checker.check(answer, {"a": gold})

    threads = [threading.Thread(target=ask, args=(n, *case[:2])) for n, case in enumerate(CASES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("number", range(len(CASES)))
def test_verdicts_in_threads_are_those_of_math_verify_in_the_main_thread(verdicts, number):
    gold, answer, equal = CASES[number]
    assert math_verify.verify(math_verify.parse(gold), math_verify.parse(answer)) == equal
    assert verdicts[number].score == equal
    assert (verdicts[number].message == "") == equal


@pytest.mark.parametrize(
    "gold, answer, score",
    [
        (r"\frac{1}{2}", r"$\frac{2}{4}$", 1),  # bare LaTeX, as in data sets
        (r"\left( 3, \frac{\pi}{2} \right)", r"$(3, \pi/2)$", 1),
        ("72", "It is 72.", 1),
        (72, "It is 71.", 0),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
        (0.5, r"\boxed{\frac12}", 1),
    ],
)
def test_an_expected_text_may_be_bare_latex_or_a_number(gold, answer, score):
    result = make_checker("math", {}, "a").check(answer, {"a": gold})
    assert result.score == score and str(gold) not in result.message


def test_an_answer_without_an_expression_is_told_so():
    result = make_checker("math", {}, "a").check("I do not know.", {"a": "1"})
    assert result == (0.0, "Your answer has no expression that can be read; put it in \\boxed{}.")


def test_an_expected_text_without_an_expression_is_an_error():
    with pytest.raises(ValueError, match="answer: got '\\$\\$' in the column 'a'"):
        make_checker("math", {}, "a").check("1", {"a": "$$"})


@pytest.mark.parametrize("answer", [r"$9^{9^{9^{9^9}}}$", r"$99999999!$"])
def test_an_expression_that_takes_too_long_scores_0_and_the_next_one_is_compared(answer, caplog):
    checker = make_checker("math", {"timeout_s": 1.0}, "a")
    assert checker.check(answer, {"a": "4"}).score == 0
    assert "an answer scores 0, by" in caplog.text
    assert make_checker("math", {}, "a").check("$4$", {"a": "4"}).score == 1


@pytest.mark.parametrize(
    "text", ["", "\0", "\ud800", "9" * 10**5, "$" * 10**4, "{" * 10**4, "\\frac" * 10**4]
)
def test_hostile_text_scores_0(text):
    assert make_checker("math", {"timeout_s": 2.0}, "a").check(text, {"a": "4"}).score == 0


def test_a_missing_package_is_one_sentence():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from seeupo_jax.envs.checkers import make_checker\nmake_checker('math', {}, 'a')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", program]  # without any installed package
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (
        done.stderr.strip()
        .rpartition("\n")[2]
        .endswith("check: 'math' needs the package math-verify: pip install 'seeupo_jax[math]'.")
    )
