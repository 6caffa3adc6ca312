"""A study: its cells, what is chosen and compared, its page, and its runs killed and resumed."""

import contextlib
import dataclasses
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import loaded_python
import numpy as np
import pytest
from places import CONFIGS, SUPPORT
from process_cases import environment
from run_cases import save_policy
from study_cases import RATE, done, finished, study_of

from seeupo_jax.compare import main
from seeupo_jax.instruments.study import study_runs
from seeupo_jax.instruments.study.cell_results import (
    add_result,
    by_key,
    changed_cells,
    compact_records,
    read_results,
)
from seeupo_jax.instruments.study.study import STAGES, grid_points, read_study
from seeupo_jax.instruments.study.study_page import write_page
from seeupo_jax.instruments.study.study_runs import Places, choose, train_study, tuning_scores
from seeupo_jax.instruments.study.tables import (
    costs,
)

STUDY = SUPPORT / "study_config.py"


def test_cells_are_what_the_study_says(tmp_path):
    study = study_of(tmp_path)
    tuning = study.cells("tuning", {})
    assert [str(cell) for cell in tuning] == [
        "tuning seeupo learning_rate=0.001 seed 100",
        "tuning seeupo learning_rate=0.01 seed 100",
        "tuning grpo learning_rate=0.001 seed 100",
        "tuning grpo learning_rate=0.01 seed 100",
    ]
    assert [cell.config.optimizer.learning_rate for cell in tuning] == [1e-3, 1e-2] * 2
    assert [cell.config.algorithm.minibatches_per_turn for cell in tuning] == [1, 1, 2, 2]
    tuned = {"seeupo": {RATE: 1e-2}, "grpo": {RATE: 1e-3}}
    assert [cell.name for cell in study.cells("final", tuned)] == [
        "seeupo learning_rate=0.01 seed 0",
        "grpo learning_rate=0.001 seed 0",
        "seeupo learning_rate=0.01 seed 1",
        "grpo learning_rate=0.001 seed 1",
    ]
    (ablation, _) = study.cells("ablation", tuned)
    assert ablation.config.algorithm.weight_clip is None
    assert ablation.config.optimizer.learning_rate == 1e-2
    assert {cell.variant for cell in study.cells("final", {"grpo": {RATE: 1e-3}})} == {"grpo"}


def test_fields_that_are_tuned_together_are_one_axis(tmp_path):
    study = study_of(
        tmp_path,
        "study['tuning']['grid'] = {('algorithm.clip_low', 'algorithm.clip_high'):"
        " ((0.2, 0.2), (3e-4, 4e-4))}",
    )
    (axis,) = study.tuning["grpo"]
    assert axis.label == "clip_low, clip_high"
    last = study.cells("tuning", {})[-1]
    assert axis.value_of(last.point) == "0.0003, 0.0004"
    assert (last.config.algorithm.clip_low, last.config.algorithm.clip_high) == (3e-4, 4e-4)


def test_a_cell_is_the_same_whatever_changes_no_result(tmp_path):
    cell = study_of(tmp_path).cells("tuning", {})[0]
    other = study_of(tmp_path, overrides=["checkpoint.every=3", "telemetry.entropy=False"])
    assert other.cells("tuning", {})[0].key == cell.key
    longer = study_of(tmp_path, overrides=["iterations=2"])
    assert longer.cells("tuning", {})[0].key != cell.key
    given_none = study_of(tmp_path, overrides=["env.options={'limit': None}"])
    assert given_none.cells("tuning", {})[0].definition()["env.options.limit"] is None
    # A field that has its default is not part of it, and so neither is a new field.
    assert "optimizer.name" not in cell.definition()
    assert cell.definition()["seed"] == 100 and cell.definition()["env.name"].endswith("Echo")


def test_runs_that_two_stages_have_are_trained_once(tmp_path):
    study = study_of(tmp_path)
    results = finished(study.cells("tuning", {}))
    assert all(cell.key in results for cell in study.cells("stability", choose(study, results)))
    left = {cost.stage: (cost.cells, cost.finished, cost.iterations) for cost in costs(study, {})}
    assert left["tuning"] == (4, 0, 4) and left["stability"] == (4, 0, 0)


def test_a_cell_of_another_definition_is_said_and_does_not_count(tmp_path):
    cells = study_of(tmp_path).cells("tuning", {})
    results = [done(cell) for cell in cells]
    longer = study_of(tmp_path, overrides=["iterations=3"]).cells("tuning", {})
    assert not any(cell.key in by_key(results) for cell in longer)
    assert changed_cells(cells, results) == []
    sentence = changed_cells(longer, results)[0]
    assert sentence.startswith(f"{cells[0]} was trained with config.iterations=1, which is 3 now:")
    for result in (*results, done(longer[0])):
        add_result(tmp_path / "results", result)
    kept = read_results(tmp_path / "results")
    assert len(kept) == 4 and longer[0].key in by_key(kept) and cells[0].key not in by_key(kept)


@pytest.mark.parametrize(
    "field, value, was, now",
    [
        ("algorithm.weight_clip", None, "its default", "None"),
        ("env.options", {"tasks": 2}, "2.0", "2"),
    ],
)
def test_a_change_from_none_or_of_a_numbers_kind_is_said_too(tmp_path, field, value, was, now):
    text = "study['recipes']['seeupo'][{!r}] = {!r}".format
    before = "" if value is None else text(field, {"tasks": 2.0})
    (old, new) = (
        study_of(tmp_path, t).cells("tuning", {})[:1] for t in (before, text(field, value))
    )
    (sentence,) = changed_cells(new, [done(old[0])])
    assert f"was trained with config.{field}" in sentence
    assert f"={was}, which is {now} now:" in sentence
    (sentence,) = changed_cells(old, [done(new[0])])
    assert f"={now}, which is {was} now:" in sentence


def test_the_point_with_the_largest_mean_is_chosen_and_the_first_of_equals(tmp_path):
    study = study_of(tmp_path, "study['tuning']['seeds'] = (100, 101)")
    cells = study.cells("tuning", {})
    rates = {"seeupo": ((0.2, 0.4), (0.6, 0.1)), "grpo": ((0.5, 0.3), (0.4, 0.4))}
    results = []
    for cell in cells:
        at = (cell.point[RATE] == 1e-2, cell.seed == 101)
        rate = rates[cell.variant][at[0]][at[1]]
        results.append(done(cell, (rate, rate)))
    assert choose(study, by_key(results)) == {"seeupo": {RATE: 1e-2}, "grpo": {RATE: 1e-3}}
    assert choose(study, by_key(results[:-1])) == {"seeupo": {RATE: 1e-2}}
    by_final = study_of(
        tmp_path, "study['tuning']['seeds'] = (100, 101); study['choose_by'] = 'final'"
    )
    last = {
        cell.key: done(cell, (0.9, 0.9), after=float(cell.point[RATE] == 1e-2)) for cell in cells
    }
    assert choose(by_final, last)["grpo"] == {RATE: 1e-2}


def test_areas_that_decide_are_up_to_the_tokens_that_all_runs_have_got_to(tmp_path):
    """A run that samples more tokens is not credited with what it reaches by them."""
    study = study_of(tmp_path)
    first, second = cells = study.cells("tuning", {})[:2]
    results = by_key([done(first, (0.2, 0.4, 0.6)), done(second, (0.1, 0.5, 0.9), tokens=300)])
    # 200 tokens: means of 0.2 to 0.6, and of 0.1 to 0.1 + 0.4 * 200 / 300; in all 0.4 and 0.5.
    scores = [score for _, score in tuning_scores(study, results)["seeupo"]]
    assert scores == pytest.approx([0.4, (0.1 + 0.1 + 0.8 / 3) / 2])
    assert choose(study, results) == {"seeupo": cells[0].point}


@pytest.mark.parametrize(
    "chosen, mark", [(0, ", edge of learning_rate"), (1, ""), (2, ", edge of learning_rate")]
)
def test_a_chosen_value_at_either_end_of_an_axis_is_marked(tmp_path, chosen, mark):
    study = study_of(
        tmp_path, "study['tuning']['grid'] = {'optimizer.learning_rate': (1e-3, 3e-3, 1e-2)}"
    )
    rates = [0.5 if i % 3 == chosen else 0.25 for i in range(6)]
    cells = zip(study.cells("tuning", {}), rates, strict=True)
    results = by_key([done(cell, (rate, rate)) for cell, rate in cells])
    text = write_page(study, results, tmp_path / "study").read_text()
    assert text.count(f"| 0.500 | chosen{mark} |") == 2


@pytest.mark.parametrize("name", ["study_order_desk", "study_bfcl_worlds"])
def test_recipes_of_a_shipped_study_have_equal_tokens_steps_and_tuning(name):
    study = read_study(str(CONFIGS / f"{name}.py"), ())
    first = {recipe: grid_points(grid)[0] for recipe, grid in study.tuning.items()}
    tuning = Counter(cell.variant for cell in study.cells("tuning", {}))
    assert tuning.keys() == study.recipes.keys() and len({*tuning.values()}) == 1
    budgets = set()
    for cell in study.cells("final", first):
        rollout, algorithm = cell.config.rollout, cell.config.algorithm
        budgets.add((rollout.tasks, rollout.group_size, cell.config.iterations))
        at_once = algorithm.turns_per_update is None or algorithm.order == "parallel"
        parts = algorithm.minibatches_per_turn if at_once else rollout.max_turns
        assert parts == rollout.max_turns
    assert len(budgets) == 1


def test_the_page_is_of_the_results_alone(tmp_path):
    study = read_study(str(CONFIGS / "study_order_desk.py"), ())
    results = {}
    for stage in STAGES:
        cells = study.cells(stage, choose(study, results))
        results |= finished(cells, success=np.linspace(0.2, 0.9, 32))
    page = write_page(study, results, tmp_path / "study")
    text = page.read_text()
    assert "By success after the last iteration, seeupo is undecided against seeupo_unw" in text
    assert "| grpo | 8 of 8 | 128 | 3.2k | 0.25 [0.25, 0.25] |" in text
    for picture in ("success_tokens", "success_steps", "stability"):
        assert f"(study/{picture}.svg)" in text
        assert (tmp_path / "study" / f"{picture}.svg").stat().st_size < 150_000
    # The first of three rates and the first of two clip ranges were chosen.
    assert "the first or last of an axis of more than two values" in text
    assert "| grpo | learning_rate=3e-05 clip_low=0.2 clip_high=0.2 |" in text
    assert text.count("| chosen, edge of learning_rate |") == 6


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("del study['seeds']", "study.seeds: got none; allowed: see"),
        ("study['seed'] = 1", "study.seed: no such field; allowed: recipes, reference"),
        ("study['seeds'] = (1, 1)", r"study.seeds: got \(1, 1\); allowed: whole numbers, each"),
        ("study['seeds'] = (100,)", "study.seeds: got 100, which tuning or stability has too"),
        ("study['recipes'] = {}", "study.recipes: got none; allowed: at least one name"),
        ("study['recipes']['grpo'] = 3", "study.recipes.grpo: got 3; allowed: a dict of fields"),
        ("study['reference'] = 'gspo'", "study.reference: got 'gspo'; allowed: seeupo, grpo."),
        ("study['tuning']['grid'] = {}", "study.tuning: the grid of seeupo: got {}; allowed: a"),
        ("study['tuning']['grid'] = {'seed': 3}", "seeupo: got 3 for 'seed'; allowed: a dict"),
        ("study['tuning']['grid'] = {('seed', 'recipe'): (1, 2)}", "seeupo: got .* for .*seed"),
        ("study['tuning']['grid'] = {'optimizer.kwargs': ({}, {})}", "got .* for 'optimizer.k"),
        (
            "study['tuning']['grids'] = {'grpo': {'optimizer.learning_rate': (1e-3,)}}",
            "study.tuning.grids.grpo: got 1 points; allowed: as many as seeupo has, 2: one budget",
        ),
        ("study['tuning']['grids'] = {'rloo': {}}", "grids.rloo: no such field; allowed: seeupo"),
        ("study['tuning']['grids'] = 3", "study.tuning.grids: got 3; allowed: a dict whose keys"),
        ("study['tuning']['grids'] = ['seeupo']", r"tuning.grids: got \['seeupo'\]; allowed: a d"),
        ("study['recipes'][3] = {}", "study.recipes: got {.*; allowed: a dict whose keys are nam"),
        ("study['ablations']['not_clipped']['of'] = ['x']", r"of: got \['x'\]; allowed: one of"),
        (
            "grid = study['stability']['grid']; study['stability']['grids'] ="
            " {'grpo': dict(reversed(grid.items()))}",
            "study.stability: got algorithm.inner_epochs as the first axis of grpo; allowed:"
            " optimizer.learning_rate, as of seeupo",
        ),
        ("study['ablations']['not_clipped']['of'] = 'x'", "not_clipped.of: got 'x'; allowed: one"),
        ("del study['stability']['grid']['algorithm.inner_epochs']", "other than two axes"),
        ("study['recipes']['grpo'] = {'recipe': 'grop'}", "config.recipe: got 'grop'"),
        ("study['exploring'] = {'stop_after_idle': 3}", "stop_after_idle: got 3; allowed in a st"),
        (
            "study['exploring'] = {'evaluation.tasks': 0}",
            "^config.evaluation.tasks: got 0; allowed",
        ),
        ("study['exploring'] = {'optimizer.rate': 3}", "config.optimizer.rate: no such field"),
    ],
)
def test_a_study_that_cannot_run_is_one_sentence(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        study_of(tmp_path, text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("optimizer.learning_rate=5", "the grid of seeupo in study.tuning sets optimizer.learning"),
        ("algorithm.inner_epochs=3", "the grid of seeupo in study.stability sets algorithm.inner"),
        ("algorithm.minibatches_per_turn=3", "study.recipes.grpo sets algorithm.minibatches_per"),
        ("algorithm.weight_clip=1", "study.ablations.not_clipped sets algorithm.weight_clip."),
        ("iterations=3", "study.exploring sets iterations."),
        ("optimizer.kwargs.b1=0.5", "study.exploring sets optimizer.kwargs."),
        ("optimizer={'name':'lion'}", "study.exploring sets optimizer.kwargs."),
    ],
)
def test_a_field_that_the_study_sets_is_refused_in_the_command(tmp_path, override, sentence):
    exploring = "study['exploring'] = {'iterations': 2, 'optimizer.kwargs': {'b1': 0.1}}"
    field, _, value = override.partition("=")
    with pytest.raises(ValueError) as refused:
        study_of(tmp_path, exploring, overrides=[override])
    begins = f"--config.{field}: got {value}; allowed: none with this study, since {sentence}"
    assert str(refused.value).startswith(begins)
    study_of(tmp_path, exploring, overrides=["optimizer.name=lion", "algorithm.clip_low=0.1"])


def test_values_of_a_grid_may_be_dicts(tmp_path):
    study = study_of(
        tmp_path, "study['tuning']['grid'] = {'optimizer.kwargs': ({'b2': 0.9}, {'b2': 0.99})}"
    )
    cells = study.cells("tuning", {})
    assert [cell.config.optimizer.kwargs for cell in cells[:2]] == [{"b2": 0.9}, {"b2": 0.99}]
    results = {
        cell.key: done(cell, (0.9, 0.9), after=cell.config.optimizer.kwargs["b2"]) for cell in cells
    }
    assert choose(study, results)["grpo"] == {"optimizer.kwargs": {"b2": 0.9}}
    assert write_page(study, results, tmp_path / "study").exists()


def called(folder, *more):
    return ["compare", "--study", f"--config={STUDY}", f"--workdir={folder}", *more]


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--recipes=grpo"], "--recipes: got one; allowed without --study, whose file says it."),
        (["--limit_minutes=0"], "--limit_minutes: got '0'; allowed: a number > 0."),
        (["--config.seed=1"], "--config.seed=1: a study says the recipes and seeds of its runs."),
        (
            ["--results=/dev/null"],
            "--results: got /dev/null (File exists); allowed: a folder that can be made and"
            " written to.",
        ),
        (["--study=False", "--results=x"], "--results: got one; allowed with --study."),
        ([f"--config={CONFIGS / 'quickstart.py'}"], "has no function get_study()."),
    ],
)
def test_a_users_mistake_is_one_sentence(tmp_path, capsys, more, sentence):
    with pytest.raises(SystemExit) as refused:
        main(called(tmp_path / "study", *more))
    assert refused.value.code == 2 and not any(tmp_path.iterdir())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.endswith(sentence)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"no gzip",
        lambda data: data[:-9],
        lambda data: gzip.compress(b"[" * 100_000),
        lambda data: gzip.compress(b'{"key": 1}\n'),
    ],
    ids=["other", "cut", "nested", "fields"],
)
def test_damaged_results_are_one_sentence(tmp_path, capsys, damage):
    cell = study_of(tmp_path).cells("tuning", {})[0]
    file = tmp_path / "run" / "results" / "tuning.jsonl.gz"
    add_result(file.parent, done(cell))
    assert read_results(file.parent) == [done(cell)]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SystemExit) as refused:
        main(called(tmp_path / "run", "--draw_only"))
    (line,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and line.startswith(f"error: --results: got {file}, which is d")


def test_results_keep_what_is_read_of_them():
    (record,) = compact_records(
        [{"iteration": 1, "rollout/success_rate": 1 / 3, "time/sweep_s": 2.0, "eval/avg@2/a=b": 1}]
    )
    assert record == {"iteration": 1, "rollout/success_rate": 0.333333}


def run(folder, *more, kill=None):
    """The command in a folder with the policy; with `kill` it is killed once that is true."""
    line = [sys.executable, "-m", "seeupo_jax.compare", *called(folder / "run")[1:]]
    line += [f"--results={folder / 'study'}", *more]
    env, where = environment(), folder.parent
    if kill is None:
        ended = loaded_python.run(line, env=env, cwd=where, timeout=300)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout
    process = loaded_python.LoadedPython(line, env=env, cwd=where, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not kill():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return None


def test_a_study_that_was_killed_and_resumed_gives_the_same_page(tmp_path, monkeypatch):
    save_policy(tmp_path / "policy")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    printed = run(whole)
    trained = [line for line in printed.splitlines() if "CPU s" in line]
    assert len(trained) == 10  # 4 and 4 and 2; the map has those of the tuning
    page = (whole / "study.md").read_text()
    assert "Runs finished: tuning 4 of 4, final 4 of 4, ablation 2 of 2, stability 4 of 4." in page

    final = parted / "study" / "final.jsonl.gz"
    run(parted, kill=final.exists)
    before = {result.key: result for result in read_results(parted / "study")}
    assert 5 <= len(before) < 10
    again = run(parted)
    assert again.count("-> ") == 10 - len(before)
    assert (parted / "study.md").read_text() == page
    after = {result.key: result for result in read_results(parted / "study")}
    assert {key: after[key] for key in before} == before
    for mine, reference in zip(read_results(whole / "study"), after.values(), strict=True):
        same = {"cpu_s": None}
        assert dataclasses.replace(mine, **same) == dataclasses.replace(reference, **same)
    assert not [file for file in (parted / "run").iterdir() if file.is_dir()]

    (parted / "study").rename(tmp_path / "study")  # all that the page needs
    monkeypatch.chdir(tmp_path)
    results = f"--results={tmp_path / 'study'}"
    main(called(tmp_path / "none", results, "--draw_only"))
    assert (tmp_path / "study.md").read_text() == page


def test_a_study_ends_at_its_limit_of_minutes_with_its_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NPROC", "7")
    main(called(tmp_path / "run", "--config.model.path=nowhere", "--limit_minutes=1e-9"))
    assert os.environ["NPROC"] == "1"  # XLA's threads, so that its sums are the same everywhere
    stopped, wrote = capsys.readouterr().out.splitlines()
    first = "tuning seeupo learning_rate=0.001 seed 100"
    assert stopped == f"--limit_minutes: stopped before {first}; rerun to go on"
    assert wrote == f"wrote {tmp_path / 'run' / 'results.md'}"
    assert "finished: tuning 0 of 4" in (tmp_path / "run" / "results.md").read_text()


def test_a_cell_that_another_process_trains_is_waited_for(tmp_path, monkeypatch):
    study = study_of(tmp_path, overrides=["model.path=nowhere"])
    places = Places(tmp_path / "run", tmp_path / "results")
    last, *others = study.cells("tuning", {})
    tuned = {"seeupo": last.point, "grpo": last.point}
    for cell in (*others, *study.cells("final", tuned), *study.cells("ablation", tuned)):
        add_result(places.results, done(cell))
    waits = []

    def finish(seconds):
        waits.append(seconds)
        add_result(places.results, done(last))

    monkeypatch.setattr(study_runs.time, "sleep", finish)
    places.workdir.mkdir()
    with (places.workdir / f"{last.key}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert train_study(study, places, minutes=None) == 0
    assert len(waits) == 1 and not (places.workdir / last.key).exists()


def test_a_cell_that_another_process_has_just_finished_is_not_trained_again(tmp_path, monkeypatch):
    study = study_of(tmp_path)
    places = Places(tmp_path / "run", tmp_path / "results")
    last, *others = study.cells("tuning", {})
    tuned = {"seeupo": last.point, "grpo": last.point}
    for cell in (*others, *study.cells("final", tuned), *study.cells("ablation", tuned)):
        add_result(places.results, done(cell))

    @contextlib.contextmanager
    def lock(folder):  # what had it before ends as it is asked for
        assert folder == places.workdir / last.key
        add_result(places.results, done(last))
        yield True

    monkeypatch.setattr(study_runs, "_alone", lock)
    monkeypatch.setattr(study_runs.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(study_runs.seeupo_jax, "train", lambda *_: pytest.fail("trained again"))
    assert train_study(study, places, minutes=None) == 0


def test_no_other_process_adds_a_result_between_reading_and_writing(tmp_path, monkeypatch):
    """Else the later one of two would write what it read, without the other's."""
    first, second = study_of(tmp_path).cells("tuning", {})[:2]
    add_result(tmp_path, done(first))
    guarded = []

    def watched(function):
        def call(*arguments, **values):
            descriptor = os.open(tmp_path, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
            guarded.append(function.__name__)
            return function(*arguments, **values)

        return call

    for name in ("decompress", "compress"):
        monkeypatch.setattr(gzip, name, watched(getattr(gzip, name)))
    add_result(tmp_path, done(second))
    assert guarded == ["decompress", "compress"]


def test_a_study_says_which_of_its_cells_have_changed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NPROC", "1")  # as the command sets it
    cell = read_study(str(STUDY), ()).cells("tuning", {})[0]
    add_result(tmp_path / "run" / "results", done(cell))
    main(called(tmp_path / "run", "--config.iterations=3", "--draw_only"))
    said, wrote = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{cell} was trained with config.iterations=1, which is 3 now: what it")
    assert wrote.startswith("wrote ")


def test_failed_cells_are_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setenv("NPROC", "1")  # as the command sets it
    with pytest.raises(SystemExit) as failed:
        main(called(tmp_path / "run", "--config.model.path=nowhere"))
    # As a text: exit code 1.
    assert failed.value.code == "error: 4 runs failed; rerun the command to retry them."
    assert (tmp_path / "run" / "results.md").exists()


@pytest.mark.parametrize("rollouts, last", [(0.5, None), (None, 0.5)])
def test_a_run_without_figures_fails_its_cell_which_a_rerun_trains_again(
    rollouts, last, tmp_path, capsys, monkeypatch
):
    study, began = study_of(tmp_path), []
    places = Places(tmp_path / "run", tmp_path / "results")
    metric = study.cells("tuning", {})[0].metric

    def train(config, folder):  # a run of one iteration, whose environment fails in it or after
        began.append((folder / "metrics.jsonl").exists())
        rollout = {"rollout/success_rate": rollouts, "rollout/action_tokens": 10}
        lines = ({"iteration": 1, **rollout}, {"iteration": 1, metric: last})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return SimpleNamespace(stopped=None)

    monkeypatch.setattr(study_runs.seeupo_jax, "train", train)
    for _ in range(2):
        assert train_study(study, places, minutes=None) == 4
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 4 and "seed 100: failed: its last evaluation, or every r" in lines[0]
    assert began == [False] * 8 and not read_results(places.results)


def test_a_cell_that_fails_ends_its_stage_and_is_said(tmp_path, capsys):
    study = study_of(tmp_path, overrides=["model.path=nowhere"])
    assert train_study(study, Places(tmp_path / "run", tmp_path / "results"), minutes=None) == 4
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 4 and "[tuning 1/4] seeupo learning_rate=0.001 seed 100: failed" in lines[0]
    )
    assert not read_results(tmp_path / "results")
