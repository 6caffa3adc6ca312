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
    checker = make_checker(
        "format", {"pattern": r"(?:a|a?)+(?:b|c)+\1?(x+x+)+y", "timeout_s": 0.5}, None
    )
    longest, done = 0.0, threading.Event()

    def watch():
        nonlocal longest
        while not done.is_set():
            start = time.monotonic()
            time.sleep(0.01)
            longest = max(longest, time.monotonic() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    result = checker.check("a" * 40 + "c" + "x" * 5000, {})
    took = time.monotonic() - start
    done.set()
    watcher.join()
    assert result.score == 0 and took < 5
    assert took < 0.5 or longest < 0.4
    assert took < 0.5 or "was not matched in 0.5 s and scores 0" in caplog.text
