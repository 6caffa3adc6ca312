"""Contenders take turns; a ratio is that of the medians."""

import pytest

from seeupo_jax.bench.interleave import Timing, alternate, fastest, ratio


def test_contenders_take_turns_and_change_places():
    seen = []

    def contender(name):
        return lambda number: seen.append((number, name)) or float(number)

    timings = alternate({"a": contender("a"), "b": contender("b")}, 3)
    assert seen == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert timings["a"].each == (0.0, 1.0, 2.0)


def test_a_ratio_is_of_medians_with_the_rounds_around_it():
    slow, fast = Timing((4.0, 9.0, 5.0)), Timing((2.0, 3.0, 1.0))
    assert ratio(slow, fast) == {"ratio": 2.5, "ratio_least": 2.0, "ratio_most": 5.0}
    assert slow.as_json() == {
        "median_s": 5.0,
        "least_s": 4.0,
        "most_s": 9.0,
        "each_s": [4.0, 9.0, 5.0],
    }
    assert fastest({"slow": slow, "fast": fast}, ["slow", "fast"]) == "fast"
    assert ratio(slow, slow)["ratio"] == pytest.approx(1)
