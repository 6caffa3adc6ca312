"""What the policy came to, from records whose numbers are worked out by hand."""

import json

import pytest

from seeupo_jax.reports.curves import first_and_last, kinds_section
from seeupo_jax.reports.run_data import RunData, load_runs


def a_run(workdir, *lines):
    workdir.mkdir(exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = load_runs([workdir])
    return run


def rows(chart):
    return chart.spec["datasets"]["rows"]


@pytest.mark.parametrize(
    "lines, measure, values",
    [
        ([{"eval/avg@4": 0.4}, {"eval/avg@4": 0.85}, {"eval/avg@8": 0.1}], "test avg@8", [0.1]),
        (
            [{"eval/avg@4": 0.4, "eval/tasks": 64}, {"eval/avg@4": 0.5, "eval/tasks": 4}],
            "test avg@4",
            [0.5],
        ),
        (
            [{"eval/avg@4": 0.4, "eval/tasks": 4}, {"eval/avg@4": 0.5, "eval/tasks": 4}],
            "test avg@4",
            [0.4, 0.5],
        ),
        # Where no episode of the reported split counts, the last figure is the one before.
        ([{"eval/avg@4": 0.4}, {"eval/avg@4": None, "eval_dev/avg@4": 0.9}], "test avg@4", [0.4]),
    ],
)
def test_success_now_is_of_the_last_evaluation_and_at_first_of_the_same_measure(
    tmp_path, lines, measure, values
):
    """Where evaluation.k or evaluation.tasks was another before, there is none at first."""
    run = a_run(tmp_path, *({"iteration": 10 * i} | line for i, line in enumerate(lines)))
    name, ends = first_and_last(run)
    assert (name, [end.value for end in ends]) == (measure, values)


def by_turns(iterations, scale):
    """Success in two turns that rises by 1 / scale an iteration."""
    for i in range(1, iterations + 1):
        success = {"rollout/success_rate/turns=2": i / scale}
        yield {"iteration": i, "rollout/success_rate": 0.5, **success}


def test_the_first_and_the_last_fifth_of_the_iterations_are_compared(tmp_path):
    (chart,) = kinds_section([a_run(tmp_path, *by_turns(20, 20))]).wanted[
        "Success by number of turns"
    ]
    assert {row["series"]: row["value"] for row in rows(chart)} == {
        "iterations 1 to 4": pytest.approx((1 + 2 + 3 + 4) / 4 / 20),
        "iterations 17 to 20": pytest.approx((17 + 18 + 19 + 20) / 4 / 20),
    }


def test_of_several_runs_the_last_fifth_of_each_is_compared(tmp_path):
    runs = [a_run(tmp_path / name, *by_turns(10, scale)) for name, scale in (("a", 10), ("b", 20))]
    (chart,) = kinds_section(runs).wanted["Success by number of turns"]
    ends = {row["series"]: row["value"] for row in rows(chart)}
    assert ends == {"a": pytest.approx(0.95), "b": pytest.approx(0.475)}


def test_shares_of_turns_are_of_the_trajectories_of_their_iteration(tmp_path):
    counts = ((1, 1, 3), (2, 4, 4))
    lines = (
        {"iteration": i, "rollout/trajectories/turns=1": one, "rollout/trajectories/turns=2": two}
        for i, one, two in counts
    )
    (chart,) = kinds_section([a_run(tmp_path, *lines)]).wanted["Trajectories by number of turns"]
    shares = {(row["from"] + 0.5, row["part"]): row["value"] for row in rows(chart)}
    assert shares == {
        (1, "1 turn"): 0.25,
        (1, "2 turns"): 0.75,
        (2, "1 turn"): 0.5,
        (2, "2 turns"): 0.5,
    }


class CountedLine(dict):
    """A line that counts how often all of its names are gone through."""

    scans = 0

    def __iter__(self):
        self.scans += 1
        return super().__iter__()


def test_the_names_of_a_line_are_read_as_often_for_many_kinds_as_for_one(tmp_path):
    scans = []
    for kinds in (1, 9):
        values = {f"eval/avg@4/repo={i}": i / 10 for i in range(kinds)}
        line = CountedLine({"iteration": 1, "eval/avg@4": 0.5} | values)
        section = kinds_section([RunData("a", tmp_path, [line], {"config": {}}, 0.0)])
        (chart,) = section.charts
        assert [row["value"] for row in rows(chart)] == [*values.values()]
        scans.append(line.scans)
    assert scans[0] == scans[1] > 0
