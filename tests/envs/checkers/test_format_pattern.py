"""Answers whose whole text has to match a regular expression."""

import threading
import time

import pytest

from seeupo_jax.envs.checkers import make_checker

R1 = r"<think>(?:(?!</think>).)*</think>\s*<answer>.*</answer>"


@pytest.mark.parametrize(
    "text, score",
    [
        ("<think>\na\n</think>\n<answer>1</answer>\n", 1),
        ("<think>a</think> <answer>1</answer> more", 0),
        ("<think>a</think></think><answer>1</answer>", 0),
        ("<answer>1</answer>", 0),
        ("", 0),
    ],
)
def test_the_whole_text_has_to_match(text, score):
    checker = make_checker("format", {"pattern": R1}, None)
    assert checker.reads_thoughts
    assert checker.check(text, {}).score == score


def test_a_match_that_takes_too_long_scores_0_and_lets_other_threads_run(caplog):
    checker = make_checker("format", {"pattern": r"(x+x+)+\1y", "timeout_s": 1.0}, None)
    results = []
    matcher = threading.Thread(target=lambda: results.append(checker.check("x" * 1000, {})))
    matcher.start()
    steps = 0
    while not results:
        time.sleep(0.01)
        steps += 1
    matcher.join()
    assert steps > 3  # the interpreter's lock was free
    assert results[0] == (0.0, "Your answer does not have the required format.")
    assert "a text of 1000 characters was not matched in 1 s and scores 0" in caplog.text
