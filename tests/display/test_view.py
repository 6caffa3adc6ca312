"""What of a run's progress is shown, in words."""

import re

import pytest
from places import ROOT

from seeupo_jax.display.view import (
    Moment,
    State,
    iteration_line,
    part_done,
    phase_line,
    rows,
    sparkline,
    time_parts,
)
from seeupo_jax.rollout.watch import Activity


def test_the_rows_are_those_of_the_example_in_the_documentation():
    state = State(
        8,
        4,
        "rollout",
        began=0.0,
        phase_began=21.8,
        metrics={
            "rollout/reward_mean": 0.79,
            "rollout/turns_mean": 4.3,
            "sweep/kl": 0.027,
            "rollout/tokens_per_second": 6300,
            "sweep/tokens_per_second": 35000,
        },
        seconds=1.3,
        successes=(0.43, 0.57, 0.71, 0.79),
        ends=(17.9, 19.2, 20.5, 21.8),  # 4 iterations of 1.3 s are left, and 0.2 s of one are over
        evaluation="after 0  avg@4 0.37 [0.30, 0.44]  pass@4 0.75 [0.64, 0.86]",
    )
    seen = Activity(128, 41, 12, 87, 3, 0, slowest=("order_desk/train/4711", 35.0))
    drawn = []
    for label, (first, *parts), bar, trend in rows(state, Moment(22.0, seen, 5200, 1.0)):
        done = 0 if bar is None else round(24 * bar)
        graph = trend if bar is None else "━" * done + "─" * (24 - done)
        drawn.append(f"{label:11}" + "  ".join(filter(None, (first, graph, *parts))))
    page = (ROOT / "docs" / "launch.md").read_text()
    (example,) = re.findall(r"```\n(iteration .*?)\n```", page, re.DOTALL)
    assert drawn == example.splitlines()


@pytest.mark.parametrize("seconds, parts", [(0.9, []), (1.0, ["1s in desk/7"])])
def test_a_call_of_an_environment_is_named_from_a_second_on(seconds, parts):
    seen = Activity(8, 3, 1, 5, 0, 100, slowest=("desk/7", seconds))
    shown = rows(State(0, 0, "rollout", began=0, phase_began=0), Moment(1.0, seen))
    assert [part for row in shown if row.label == "slowest" for part in row.parts] == parts


@pytest.mark.parametrize(
    "phase, step, part",
    [
        ("rollout", (0, 0, ""), 0.25),  # of its trajectories
        ("sweep", (0, 0, ""), None),  # the trajectories are those of the next rollout
        ("sweep", (3, 4, ""), 0.75),  # of its turns
        ("evaluation", (1, 2, ""), 0.5),
    ],
)
def test_how_much_of_a_phase_is_done_is_counted_in_its_own_steps(phase, step, part):
    state = State(8, 4, phase, began=0, phase_began=0, step=step)
    assert part_done(state, Activity(128, 41, 12, 32, 3, 5000)) == part
    assert part_done(state, None) == (step[0] / step[1] if step[1] else None)


def test_a_sparkline_has_a_fixed_scale():
    assert sparkline([0.0, 0.5, 1.0, 1.7, -2]) == "▁▅██▁"
    assert sparkline([0.50, 0.51, 0.52]) == "▅▅▅"
    assert sparkline([0.0, 1.0], unicode=False) == ".#"


def test_what_is_left_counts_down_within_an_iteration_and_not_into_the_next():
    # The last two iterations ended 5 s apart, and two are left.
    ended = {"began": 0.0, "phase_began": 10.0, "seconds": 4.0, "ends": (5.0, 10.0)}
    state = State(4, 2, "rollout", **ended)
    assert time_parts(state) == ["left 10s", "4.0 s/it"]
    assert [time_parts(state, now)[0] for now in (10.0, 12.0, 99.0)] == [
        "left 10s", "left 8s", "left 5s",
    ]  # fmt: skip


def test_a_tasks_name_neither_moves_the_cursor_nor_ends_a_line():
    seen = Activity(8, 3, 1, 5, 0, 100, slowest=("a\x1b[2Jb\x9b2K\r\nc\u2028d", 35.0))
    state = State(0, 0, "rollout", began=0, phase_began=0)
    shown = {row.label: row.parts for row in rows(state, Moment(1.0, seen))}
    assert shown["slowest"] == ["35s in a\\x1b[2Jb\\x9b2K  c d"]
    assert phase_line(state, Moment(1.0, seen)).endswith("slowest 35s in a\\x1b[2Jb\\x9b2K  c d")


def test_the_line_of_an_iteration_has_the_exact_value_where_there_is_one():
    metrics = {"rollout/reward_mean": 0.35, "exact/value": 0.36625}
    state = State(3, 1, "rollout", began=0.0, phase_began=0.0, metrics=metrics)
    assert iteration_line(state) == "iteration 1/3  reward 0.35  exact 0.366"
