"""What a folder tells of its run."""

import json
import os
import shutil

import pytest
import report_cases

from seeupo_jax.reports.run_data import flatten, load_runs, natural


def test_a_finished_run_is_known_as_such(tmp_path):
    (run,) = load_runs([report_cases.write_run(tmp_path / "a", iterations=12)])
    assert (run.name, run.done, run.planned, run.split) == ("a", 12, 12, "test")
    assert run.finished and 0 <= run.age_s < 60


def test_a_run_is_not_finished_before_its_last_evaluation(tmp_path):
    workdir = report_cases.write_run(tmp_path / "a", iterations=11, planned=12)
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 12, "rollout/success_rate": 0.5}) + "\n")
    (run,) = load_runs([workdir])
    assert run.done == 12 and not run.finished


@pytest.mark.parametrize("worse, finished", [(1, False), (2, True), (3, True)])
def test_supervised_fine_tuning_is_over_when_its_patience_is(tmp_path, worse, finished):
    workdir = report_cases.write_run(tmp_path / "a", iterations=3, planned=9, sft={"patience": 2})
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 3, "eval/worse": worse}) + "\n")
    assert load_runs([workdir])[0].finished == finished


def test_the_age_is_that_of_the_last_line(tmp_path):
    workdir = report_cases.write_run(tmp_path / "a")
    os.utime(workdir / "metrics.jsonl", (1_000_000, 1_000_000))
    assert load_runs([workdir])[0].age_s > 1e9


def test_a_torn_last_line_is_left_out(tmp_path):
    workdir = report_cases.write_run(tmp_path / "a", iterations=3, planned=9)
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "rollout/succ')
    assert load_runs([workdir])[0].done == 3


def test_a_run_without_a_record_knows_no_plan_and_no_setting(tmp_path):
    (run,) = load_runs([report_cases.write_run(tmp_path / "a", about=False)])
    assert run.planned is None and run.setting("seed") is None and not run.finished
    assert run.split == "test"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": 3}'])
def test_a_record_that_is_none_counts_as_missing(tmp_path, text):
    workdir = report_cases.write_run(tmp_path / "a", about=False)
    (workdir / "run.json").write_text(text)
    assert load_runs([workdir])[0].setting("seed") is None


def test_runs_have_names_of_their_own(tmp_path):
    for place in ("x/run", "y/run", "z"):
        (tmp_path / place).mkdir(parents=True)
    folders = [tmp_path / place for place in ("x/run", "y/run", "z", "z")]
    assert [run.name for run in load_runs(folders)] == ["x/run", "y/run", "z", "z (2)"]


def test_a_copy_tells_the_same(tmp_path):
    workdir = report_cases.write_run(tmp_path / "a")
    copy = shutil.copytree(workdir, tmp_path / "elsewhere" / "a")
    first, second = load_runs([workdir])[0], load_runs([copy])[0]
    assert first.lines == second.lines and first.name == second.name


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(ValueError, match="--workdir: got .*nowhere; allowed: the folder of a run"):
        load_runs([tmp_path / "nowhere"])


def test_a_series_has_only_finite_numbers(tmp_path):
    lines = [{"iteration": 1, "x": 2}, {"iteration": 2, "x": None}, {"iteration": 3, "x": "no"}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 4, "x": NaN}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    (run,) = load_runs([tmp_path])
    assert run.series("x") == [(1, 2.0)]
    assert run.recorded("x") == [(1, 2.0), (2, None)] and run.recorded("y") == []


def test_numbers_in_names_are_sorted_as_numbers():
    assert sorted(["turns=10", "turns=9", "a"], key=natural) == ["a", "turns=9", "turns=10"]
    numbers = ["-10", "-2", "1e-05", "0.25", "0.5", "9", "10"]
    assert sorted(sorted(numbers), key=natural) == numbers


def test_nested_values_become_dotted_names():
    nested = {"a": {"b": 1, "c": {"d": [2]}}, "e": {}}
    assert dict(flatten(nested)) == {"a.b": 1, "a.c.d": [2], "e": {}}
