"""What of a run's progress is shown, in words."""

from seeupo_jax.display.view import Moment, State, phase_line, rows, sparkline, time_parts
from seeupo_jax.rollout.watch import Activity


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
