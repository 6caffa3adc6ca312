"""What the policy came to, from records whose numbers are worked out by hand."""

import json

import pytest

from seeupo_jax.reports.curves import first_and_last
from seeupo_jax.reports.run_data import load_runs


def a_run(workdir, *lines):
    workdir.mkdir(exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = load_runs([workdir])
    return run


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
