"""A run whose turns are segments of their own is described with its figures."""

import math

import pytest

from seeupo_jax.metrics.rewritten_turns import rewritten_turns


def line(turns, segments, **more):
    return {"rollout/turns_mean": turns, "rollout/segments_mean": segments} | more


@pytest.mark.parametrize(
    "newest, figures",
    [
        (line(4.0, 4.0), "4.0 segments per trajectory at 4.0 turns: "),
        (
            line(5.0, 3.25),
            "3.2 segments per trajectory at 5.0 turns: ",
        ),  # 2.25 of 4 turns begin one
        (line(5.0, 3.0), None),
        (line(1.0, 1.0), None),
        (line(4.0, 1.0), None),
        (line(4.0, 4.0, **{"rollout/lineages_mean": 2.0}), None),  # an agent's conversations
        (line(4.0, 4.0, **{"rollout/lineages_mean": 1.0}), "4.0 segments"),
        (line(math.nan, math.nan), None),
        (line(None, 4.0), None),
        ({"rollout/turns_mean": 4.0}, None),
    ],
)
def test_most_turns_have_to_begin_a_segment(newest, figures):
    lines = [{"iteration": 0, "eval/avg@4": 0.5}, newest, {"iteration": 1, "eval/avg@4": 0.5}]
    found = rewritten_turns(lines)
    assert (found is None) == (figures is None)
    assert figures is None or found.startswith(figures)
    assert found is None or "docs/models.md, Training templates" in found


def test_the_newest_iteration_counts():
    assert rewritten_turns([line(4.0, 4.0), line(4.0, 1.0)]) is None
    assert rewritten_turns([line(4.0, 1.0), line(4.0, 4.0)]) is not None
    assert rewritten_turns([]) is None
