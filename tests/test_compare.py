"""Comparing recipes: what is trained, what is skipped, how it stops, and what is drawn of it."""

import fcntl
import io
import json
import math
import re
import signal
import subprocess
import sys
import time

import loaded_python
import numpy as np
import pytest
import run_cases
from places import ROOT, TINY
from process_cases import environment
from rich.console import Console
from run_cases import iterations, save_policy

from seeupo_jax import compare as compare_command
from seeupo_jax.compare import main
from seeupo_jax.comparison import figures
from seeupo_jax.comparison.runs import RunFailed, plan, train, train_all, updates_at_once
from seeupo_jax.comparison.seed_statistics import seed_interval
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.metrics.statistics import Estimate
from seeupo_jax.parallel.stop_signal import StopRequest

ORDER_DESK = ROOT / "configs" / "compare_order_desk.py"


def planned(folder, *overrides, recipes=("seeupo", "grpo"), seeds=2, equal_steps=True, config=TINY):
    return plan(config, overrides, folder, recipes=recipes, seeds=seeds, equal_steps=equal_steps)


def record(run, success, *, tokens=100, before=0.25, after=None):
    """Writes the metrics of a run with these success rates, and its last evaluation if it has."""
    lines = [{"iteration": 0, run.metric: before}]
    for number, rate in enumerate(success, 1):
        values = {"rollout/success_rate": rate, "rollout/action_tokens": tokens, "sweep/steps": 6}
        lines.append({"iteration": number, **values})
    if after is not None:
        lines.append({"iteration": len(success), run.metric: after})
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def replaced(run, program):
    """The run with another program in place of the training."""
    return type(run)(run.variant, run.seed, run.folder, run.config, [sys.executable, "-c", program])


def test_every_recipe_has_its_run_with_one_seed_before_any_has_the_next(tmp_path):
    runs = planned(tmp_path, "iterations=7")
    assert [str(run) for run in runs] == [
        "seeupo seed 0",
        "grpo seed 0",
        "seeupo seed 1",
        "grpo seed 1",
    ]
    assert [run.config.seed for run in runs] == [0, 0, 1, 1]
    assert [run.config.recipe for run in runs] == ["seeupo", "grpo", "seeupo", "grpo"]
    assert {run.config.iterations for run in runs} == {7}
    assert len({run.folder for run in runs}) == 4


def test_recipes_that_update_all_turns_at_once_make_as_many_steps_as_there_are_turns(tmp_path):
    recipes = ("seeupo", "seeupo_forward", "grpo", "parallel")
    at_once = [r.config for r in planned(tmp_path, recipes=recipes, seeds=1)]
    assert [c.algorithm.minibatches_per_turn for c in at_once] == [1, 1, 6, 6]
    two = planned(tmp_path, "algorithm.minibatches_per_turn=2", recipes=recipes, seeds=1)
    assert [r.config.algorithm.minibatches_per_turn for r in two] == [2, 2, 12, 12]
    own = planned(tmp_path, recipes=recipes, seeds=1, equal_steps=False)
    assert {r.config.algorithm.minibatches_per_turn for r in own} == {1}
    assert not updates_at_once(Algorithm(turns_per_update=2))


def test_a_command_says_all_that_its_run_was_planned_with(tmp_path):
    run = planned(tmp_path, "optimizer.name=lion", recipes=["grpo"], seeds=1)[0]
    assert run.command[1:] == [
        "-m",
        "seeupo_jax.train",
        f"--config={TINY}",
        f"--workdir={tmp_path / 'grpo' / 'seed0'}",
        "--config.stop_after_idle=none",
        "--config.optimizer.name=lion",
        "--config.recipe=grpo",
        "--config.seed=0",
        "--config.algorithm.minibatches_per_turn=6",
    ]


def test_a_run_that_collapses_is_trained_to_its_end_unless_the_user_says_when_it_ends(tmp_path):
    assert planned(tmp_path)[0].config.stop_after_idle is None
    for own in ("10", "3"):
        assert planned(tmp_path, f"stop_after_idle={own}")[0].config.stop_after_idle == int(own)
    runs = swept(tmp_path, "stop_after_idle=10,3", seeds=1)
    assert [run.config.stop_after_idle for run in runs] == [10, 3]
    file = tmp_path / "own.py"
    file.write_text("def get_config():\n    return {'stop_after_idle': 3}\n")
    assert planned(tmp_path, config=file)[0].config.stop_after_idle == 3


@pytest.mark.parametrize("recipes", [["seeupo", "sepo"], ["seeupo", "seeupo"]])
def test_an_unknown_or_repeated_recipe_is_refused_with_those_there_are(tmp_path, recipes):
    with pytest.raises(ValueError, match=f"--recipes: got '{recipes[1]}'; allowed.*grpo"):
        planned(tmp_path, recipes=recipes)


@pytest.mark.parametrize("override", ["recipe=grpo", "seed=3"])
def test_what_each_run_has_of_its_own_is_refused_for_all(tmp_path, override):
    with pytest.raises(ValueError, match=f"--config.{override.partition('=')[0]}: each run has"):
        planned(tmp_path, override)


def test_runs_without_evaluations_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="^config.evaluation.tasks: got 0; allowed in a comparison"
    ):
        planned(tmp_path, "evaluation.tasks=0")


def swept(folder, *sweep, recipes=None, **more):
    return plan(TINY, (), folder, recipes=recipes, equal_steps=True, sweep=sweep, **more)


def test_swept_fields_are_trained_in_every_combination_with_names_that_say_them(tmp_path):
    runs = swept(tmp_path, "optimizer.learning_rate=1e-4,2e-4", "optimizer.name=lion", seeds=2)
    assert [str(run) for run in runs] == [
        "seeupo optimizer.learning_rate=1e-4 optimizer.name=lion seed 0",
        "seeupo optimizer.learning_rate=2e-4 optimizer.name=lion seed 0",
        "seeupo optimizer.learning_rate=1e-4 optimizer.name=lion seed 1",
        "seeupo optimizer.learning_rate=2e-4 optimizer.name=lion seed 1",
    ]
    assert [run.config.optimizer.learning_rate for run in runs] == [1e-4, 2e-4] * 2
    folder = tmp_path / "seeupo/optimizer.learning_rate=1e-4/optimizer.name=lion/seed0"
    assert runs[0].folder == folder
    assert "--config.optimizer.learning_rate=1e-4" in runs[0].command
    assert not [text for text in runs[0].command if text.startswith("--config.recipe")]


def test_a_sweep_goes_with_every_recipe_and_of_any_value(tmp_path):
    runs = swept(tmp_path, "batching.buckets=(64,128),(128,)", recipes=["grpo", "rloo"], seeds=1)
    assert [(run.config.recipe, run.config.batching.buckets) for run in runs] == [
        ("grpo", (64, 128)),
        ("grpo", (128,)),
        ("rloo", (64, 128)),
        ("rloo", (128,)),
    ]
    assert len({run.folder for run in runs}) == 4
    assert all(
        set(run.folder.parent.name) <= set("batching.buckets=_0123456789abcdef-") for run in runs
    )
    same_name = swept(tmp_path, "env.options.x='a b','a/b','a_b'", seeds=1)
    assert len({run.folder for run in same_name}) == 3


@pytest.mark.parametrize(
    "sweep, sentence",
    [
        (["optimizer.lr=1"], "config.optimizer.lr: no such field;.* allowed: name, learning_rate"),
        (["optimizer.learning_rate=1e-4,fast"], "config.optimizer.learning_rate: got 'fast'"),
        (["optimizer.learning_rate=1e-4,-1"], "config.optimizer.learning_rate: got -1.*> 0"),
        (["optimizer.learning_rate"], "--sweep: got 'optimizer.learning_rate'; allowed: FIELD="),
        (["iterations=1,,2"], "--sweep: got 'iterations=1,,2'; allowed: FIELD="),
        (["iterations=1,1"], "--sweep: got 'iterations=1,1'; allowed: .* each value once"),
        (["iterations=1", "iterations=2"], "--sweep: got the field 'iterations'; allowed: each"),
        (["seed=1,2"], "--sweep: got the field 'seed'; allowed: .* --recipes, --seeds"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_before_anything_does(tmp_path, sweep, sentence):
    with pytest.raises(ValueError, match=sentence):
        swept(tmp_path, *sweep, seeds=1)
    assert not any(tmp_path.iterdir())


def test_a_sweep_is_a_row_per_combination(tmp_path):
    runs = swept(tmp_path, "optimizer.learning_rate=1e-4,2e-4", seeds=1)
    record(runs[0], [0.25, 0.5], after=0.75)
    lines = figures.read_lines(runs)
    names = ["seeupo optimizer.learning_rate=1e-4", "seeupo optimizer.learning_rate=2e-4"]
    assert [line.variant for line in lines] == names
    assert list(figures.figures(lines)["recipes"]) == names


def test_runs_with_other_numbers_of_evaluation_episodes_have_one_head_for_all(tmp_path, capsys):
    given = [f"--config={TINY}", f"--workdir={tmp_path}", "--seeds=1", "--draw_only"]
    for values, head in (("2,8", "avg@k before"), ("8", "avg@8 before")):
        main(["compare", *given, f"--sweep=evaluation.k={values}"])
        assert head in capsys.readouterr().out


def test_the_plot_and_the_table_tell_the_variants_of_a_sweep_apart(tmp_path):
    sweep = ("optimizer.learning_rate=1e-4,2e-4", "algorithm.advantage_clip=3,none")
    for number, run in enumerate(swept(tmp_path, *sweep, seeds=1)):
        record(run, [0.1 * number, 0.5], after=0.75)
    lines = figures.read_lines(swept(tmp_path, *sweep, seeds=1))
    plot = tmp_path / "plot.svg"
    figures.draw(figures.success_chart(lines), plot)
    texts = re.findall(r">([^<>]*)</text>", plot.read_text())
    assert [text for text in texts if "advantage_clip" in text] == [
        f"learning_rate={rate} advantage_clip={clip} (1 run, not finished)"
        for rate in ("1e-4", "2e-4")
        for clip in ("3", "none")
    ]
    ends = [text for text in texts if "…" in text and "e-4" in text]
    assert len(set(ends)) == 4 == len(ends)
    printed = io.StringIO()
    Console(width=80, file=printed).print(figures.table(lines, k=[2]))
    first = "".join(line[2:].split("  ")[0].strip() for line in printed.getvalue().splitlines())
    assert all(line.variant.replace(" ", "") in first.replace(" ", "") for line in lines)


@pytest.mark.parametrize(
    "variants, names",
    [
        (["seeupo", "grpo"], ["seeupo", "grpo"]),
        (["seeupo"], ["seeupo"]),
        (["grpo a.x=1 b.y=2", "rloo a.x=1 b.y=2"], ["grpo", "rloo"]),
        (["grpo a.x=1", "rloo a.x=2"], ["grpo x=1", "rloo x=2"]),
        (["grpo a.x=1 b.x=2", "grpo a.x=2 b.x=1"], ["a.x=1 b.x=2", "a.x=2 b.x=1"]),
        (["grpo a.x='b c=1'", "grpo a.x=2"], ["grpo a.x='b c=1'", "grpo a.x=2"]),
    ],
)
def test_a_lines_name_is_what_its_variant_alone_has(variants, names):
    point = [0.5, 0.5]
    history = figures.RunCurve(0, True, *(np.array(point),) * 3, Estimate(0.5, 0.5, 0.5), 0.5, 1, 1)
    lines = [figures.Line(variant, 1, (history,)) for variant in variants]
    rows = figures.success_chart(lines).spec["datasets"]["rows"]
    assert list(dict.fromkeys(row["series"] for row in rows)) == [f"{n} (1 run)" for n in names]


def test_the_order_desk_is_compared_on_one_budget(tmp_path):
    recipes = ("seeupo", "grpo", "gspo", "rloo", "seeupo_forward")
    configs = [r.config for r in planned(tmp_path, recipes=recipes, seeds=1, config=ORDER_DESK)]
    assert len({(c.rollout, c.iterations, c.optimizer.learning_rate) for c in configs}) == 1
    assert [c.algorithm.minibatches_per_turn for c in configs] == [1, 6, 6, 6, 1]


def test_finished_runs_are_not_started_and_a_failed_one_does_not_stop_the_others(tmp_path, capsys):
    runs = planned(tmp_path, "iterations=2", seeds=1, recipes=("seeupo", "grpo", "gspo"))
    record(runs[0], [0.5, 0.5], after=0.75)
    record(runs[1], [0.5, 0.5])
    leaves = "open({!r}, 'w').close()".format
    programs = [
        leaves(str(tmp_path / "first")),
        "print('early', flush=True); raise SystemExit('out of luck')",
        leaves(str(tmp_path / "third")),
    ]
    assert train_all([replaced(*pair) for pair in zip(runs, programs, strict=True)]) == 2
    printed = capsys.readouterr().out
    assert "[1/3] seeupo seed 0: success 0.25 -> 0.75, finished before\n" in printed
    log = runs[1].folder / "log.txt"
    assert f"[2/3] grpo seed 0: failed with exit code 1; {log} ends with\n" in printed
    assert "    early\n    out of luck\n" in printed
    # It ended well, but without a last evaluation.
    assert "[3/3] gspo seed 0: failed with exit code 0" in printed
    assert not (tmp_path / "first").exists() and (tmp_path / "third").exists()


def test_only_the_last_evaluation_finishes_a_run(tmp_path):
    run = planned(tmp_path, "iterations=3", seeds=1)[0]
    record(run, [0.5, 0.5], after=0.75)
    assert not figures.finished(run, read_metrics(run.folder))


def test_the_log_of_an_earlier_try_is_kept_and_not_told_again(tmp_path):
    run = replaced(planned(tmp_path, seeds=1)[0], "print('second')")
    run.folder.mkdir(parents=True)
    (run.folder / "log.txt").write_text("first\n")
    with StopRequest() as request, pytest.raises(RunFailed) as failed:
        train(run, request)
    assert "second" in str(failed.value) and "first" not in str(failed.value)
    assert (run.folder / "log.txt").read_text() == "first\nsecond\n"


def test_a_run_is_in_a_session_of_its_own_and_of_no_tracked_run_of_before(tmp_path, monkeypatch):
    """Else Ctrl-C would reach it twice, and every run would be written into one of W&B's."""
    monkeypatch.setenv("WANDB_RUN_ID", "earlier")
    monkeypatch.setenv("WANDB_PROJECT", "desk")
    text = "import os; print(os.getsid(0) == os.getpid(), *map(os.getenv, {}))"
    program = text.format(("WANDB_RUN_ID", "WANDB_PROJECT"))
    with StopRequest() as request, pytest.raises(RunFailed, match="    True None desk$"):
        train(replaced(planned(tmp_path, seeds=1)[0], program), request)


def test_two_comparisons_do_not_train_one_run(tmp_path):
    run = replaced(planned(tmp_path, seeds=1)[0], "")
    run.folder.mkdir(parents=True)
    with (run.folder / "log.txt").open("ab") as log, StopRequest() as request:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(RunFailed, match="another process trains it"):
            train(run, request)


def test_a_folder_with_another_configuration_is_refused(tmp_path):
    run = replaced(planned(tmp_path, seeds=1)[0], "")
    with StopRequest() as request, pytest.raises(RunFailed):
        train(run, request)
    longer = planned(
        tmp_path,
        "iterations=9",
        "checkpoint.every=3",
        "telemetry.display=rich",
        "stop_after_idle=9",
    )
    assert longer[0].config.iterations == 9 and longer[0].folder == run.folder
    with pytest.raises(ValueError, match=r"config.optimizer.learning_rate: got 0.1; allowed for"):
        planned(tmp_path, "optimizer.learning_rate=0.1")
    with pytest.raises(ValueError, match=r"config.evaluation.k: got 3; allowed for"):
        planned(tmp_path, "evaluation.k=3")


@pytest.mark.parametrize(
    "now",
    [
        "log_checksum=True",
        "evaluation.extra_splits=('validation',)",
        "env.workers=3",
        "env.isolation=process",
        "rollout.slots=8",
        "rollout.mesh={'data': 2}",
        "mesh.data=2",
        "batching.share_prefixes=False",
        "model.remat=full",
        "offload.optimizer=True",
        "agent.port=8123",
        "rewards=({'name': 'env', 'concurrency': 3},)",
    ],
)
def test_what_docs_checkpoints_lets_a_resumed_run_change_may_change(tmp_path, now):
    before = ["rewards=({'name': 'env'},)"]
    run = planned(tmp_path, *before, seeds=1)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(to_dict(run.config)))
    assert planned(tmp_path, *before, now, seeds=1)[0].folder == run.folder
    with pytest.raises(ValueError, match=r"config.rewards: got .*2.*; allowed for"):
        planned(tmp_path, now, "rewards=({'name': 'env', 'weight': 2.0},)", seeds=1)


COSINE = "optimizer.schedule=cosine"


@pytest.mark.parametrize(
    "before, now, sentence",
    [
        ([], ["env.options.x=2"], "config.env.options: got .*'x': 2.*; allowed .* with it: "),
        (["env.options.x=2"], [], "config.env.options: got .*; allowed .* with it: .*'x': 2"),
        (["optimizer.kwargs={'b1': 1}"], [], "config.optimizer.kwargs: got {}; .* it: {'b1': 1}"),
        ([], ["chat.template_kwargs={'x': {}}"], "chat.template_kwargs: got {'x': {}}; .* it: {}"),
        # After 4 iterations a cosine over 9 is far from its end.
        *(
            ([COSINE, f"iterations={a}"], [COSINE, f"iterations={b}"], f"iterations: got {b} with")
            for a, b in ((9, 4), (4, 9))
        ),
    ],
)
def test_values_of_free_form_and_the_length_of_a_decay_are_the_runs_own(
    tmp_path, before, now, sentence
):
    run = planned(tmp_path, *before, seeds=1)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(to_dict(run.config)))
    assert planned(tmp_path, *before, seeds=1)[0] == run
    with pytest.raises(ValueError, match=sentence):
        planned(tmp_path, *now, seeds=1)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "\0"], ids=range(4))
def test_a_folder_whose_configuration_is_damaged_is_refused(tmp_path, content):
    run = planned(tmp_path, seeds=1)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"got {run.folder}/config.json, which holds no config"):
        planned(tmp_path)


def test_a_folder_of_a_version_without_a_field_goes_on(tmp_path):
    run = planned(tmp_path, seeds=1)[0]
    run.folder.mkdir(parents=True)
    older = {"optimizer": {"name": run.config.optimizer.name}}
    (run.folder / "config.json").write_text(json.dumps(older))
    assert planned(tmp_path, seeds=1)[0] == run
    older["optimizer"]["name"] = "lion"
    (run.folder / "config.json").write_text(json.dumps(older))
    with pytest.raises(ValueError, match=r"config.optimizer.name: got .*: 'lion'"):
        planned(tmp_path)


def test_the_interval_over_seeds_is_students():
    # Mean 0.5, standard deviation 0.1, t(2 degrees, 97.5%) = 4.302653: half a width of 0.248414.
    estimate = seed_interval([0.4, 0.5, 0.6, math.nan])
    np.testing.assert_allclose(
        [estimate.value, estimate.low, estimate.high], [0.5, 0.251586, 0.748414], atol=1e-6
    )
    assert seed_interval([0.0, 1.0]).high == 1.0
    one = seed_interval([0.5])
    assert one.value == 0.5 and math.isnan(one.low)
    assert math.isnan(seed_interval([]).value)


def test_success_lies_at_the_tokens_that_its_policy_was_trained_on(tmp_path):
    runs = planned(tmp_path, "iterations=3", recipes=["seeupo"])
    record(runs[0], [0.2, 0.4, 0.6], after=0.7)
    record(runs[1], [0.4, None, 0.8], after=0.9)  # in one iteration every environment failed
    (line,) = figures.read_lines(runs)
    np.testing.assert_allclose([p.at for p in line.curve()], [0, 100, 200])
    np.testing.assert_allclose([p.value for p in line.curve()], [0.3, 0.5, 0.7])
    assert [h.steps for h in line.histories] == [18, 18]
    assert [h.after for h in line.histories] == [0.7, 0.9]


def test_an_area_begins_before_the_first_rollout_that_succeeded_or_failed(tmp_path):
    run = planned(tmp_path, "iterations=3", seeds=1)[0]
    record(run, [None, 0.4, 0.6], after=0.7)  # first every environment failed
    history = figures.read_history(run)
    # 0.4 for the first 100 tokens, and from there to 200 the mean of 0.4 and 0.6.
    assert history.area("tokens", 200) == pytest.approx(0.45)
    assert history.area("steps", 6) == pytest.approx(0.4) == history.at(0)


def test_a_comparison_of_fewer_iterations_has_only_those_of_its_runs(tmp_path, capsys):
    run = planned(tmp_path, "iterations=2", seeds=1)[0]
    record(run, [0.2, 0.4, 0.6], after=0.9)
    file = run.folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines.insert(3, json.dumps({"iteration": 2, run.metric: 0.5}))
    file.write_text("\n".join(lines) + "\n")
    history = figures.read_history(run)
    assert (history.done, history.after, history.tokens, history.steps) == (True, 0.5, 200, 12)
    np.testing.assert_allclose([history.tokens_I, history.success_I], [[0, 100], [0.2, 0.4]])
    assert train_all([run]) == 0
    assert "success 0.25 -> 0.50, finished before\n" in capsys.readouterr().out


def test_unfinished_runs_count_only_while_their_recipe_has_no_finished_one(tmp_path):
    runs = planned(tmp_path, "iterations=3")
    seeupo0, grpo0, seeupo1, _ = runs
    record(seeupo0, [0.2, 0.4, 0.6], after=0.7)
    record(seeupo1, [0.2])
    record(grpo0, [0.1, 0.3])
    lines = figures.read_lines(runs)
    assert [[h.seed for h in line.histories] for line in lines] == [[0], [0]]
    assert [line.done for line in lines] == [True, False]
    assert figures.token_budget(lines) == 200
    assert figures.token_budget(lines[1:]) == 100


def test_the_table_says_what_there_is_at_equal_token_budgets(tmp_path):
    runs = planned(tmp_path, "iterations=3")
    record(runs[0], [0.2, 0.4, 0.6], after=0.7)
    record(runs[1], [0.1, 0.3, 0.5], tokens=50, after=0.6)
    record(runs[2], [0.4, 0.6, 0.8], after=0.7)
    printed = io.StringIO()
    Console(width=160, file=printed).print(figures.table(figures.read_lines(runs), k=[2]))
    rows = {line.split()[0]: line for line in printed.getvalue().splitlines() if line.strip()}
    heads, seeupo, grpo = rows["recipe"], rows["seeupo"], rows["grpo"]
    for words in ("avg@2 before", "at 25 tokens", "at 50 tokens", "at 100 tokens"):
        assert words in heads
    # Two seeds whose successes differ by 0.2: t(1 degree, 97.5%) is 12.7, and the interval all.
    assert " ".join(seeupo.split()) == (
        "seeupo 2 of 2 18 0.25 [0.25, 0.25] 0.70 [0.70, 0.70]"
        " 0.35 [0.00, 1.00] 0.40 [0.00, 1.00] 0.50 [0.00, 1.00]"
    )
    assert grpo.split() == "grpo 1 of 2 18 0.25 0.60 0.20 0.30 0.50".split()


def test_the_plot_shows_the_mean_and_students_interval_at_each_budget(tmp_path):
    runs = planned(tmp_path, "iterations=2", seeds=3)
    assert figures.success_chart(figures.read_lines(runs)) is None
    for run, first in zip(runs[::2], (0.4, 0.5, 0.6), strict=True):
        record(run, [first, 0.9], after=0.9)
    record(runs[1], [0.1, 0.3], tokens=50)
    chart = figures.success_chart(figures.read_lines(runs))
    keys = ("series", "sampled tokens", "value", "low", "high")
    assert [[row.get(key) for key in keys] for row in chart.spec["datasets"]["rows"]] == [
        ["seeupo (3 runs)", 0, 0.5, 0.251586, 0.748414],
        ["seeupo (3 runs)", 100, 0.9, 0.9, 0.9],
        ["grpo (1 run, not finished)", 0, 0.1, None, None],
        ["grpo (1 run, not finished)", 50, 0.3, None, None],
    ]


@pytest.mark.parametrize("suffix", figures.PLOT_SUFFIXES)
def test_the_plot_is_written_in_every_format(tmp_path, suffix):
    runs = planned(tmp_path / "runs", "iterations=2")
    begins = {".svg": b"<svg", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    empty, plot = tmp_path / f"none{suffix}", tmp_path / "new" / f"plot{suffix}"
    figures.draw(figures.success_chart(figures.read_lines(runs)), empty)
    record(runs[0], [0.2, 0.4], after=0.5)
    figures.draw(figures.success_chart(figures.read_lines(runs)), plot)
    assert empty.read_bytes().startswith(begins) and plot.read_bytes().startswith(begins)
    if suffix == ".svg":
        assert "nothing measured yet" in empty.read_text()
        assert "sampled tokens" in plot.read_text()


def test_figures_are_json_without_nan(tmp_path):
    runs = planned(tmp_path, "iterations=2")
    record(runs[0], [0.2, 0.4], after=0.5)
    values = json.loads(json.dumps(figures.figures(figures.read_lines(runs)), allow_nan=False))
    assert values["budget_tokens"] == 100
    seeupo, grpo = values["recipes"]["seeupo"], values["recipes"]["grpo"]
    assert seeupo["success_mean"] == [0.2, 0.4] and seeupo["success_low"] == [None, None]
    assert seeupo["before"] == [0.25] and seeupo["after"] == [0.5] and seeupo["steps"] == [12]
    at = {share: pytest.approx([s]) for share, s in (("0.25", 0.25), ("0.5", 0.3), ("1", 0.4))}
    assert seeupo["success_at_share_of_budget"] == at
    assert grpo["runs_planned"] == 2 and grpo["runs_finished"] == 0 and grpo["tokens"] == []


def command(workdir, model, *arguments):
    own = ("evaluation.tasks=2", "iterations=6", "checkpoint.export=False")
    overrides = [f"--config.{choice}" for choice in own]
    called = run_cases.command(model, workdir, *overrides, module="compare")
    return [*called, "--recipes=seeupo", "--seeds=1", *arguments]


@pytest.mark.exhaustive
def test_a_stopped_comparison_goes_on_with_the_same_command(tmp_path):
    called = command(tmp_path / "runs", save_policy(tmp_path / "policy"))
    first = tmp_path / "runs" / "seeupo" / "seed0"
    process = loaded_python.LoadedPython(
        called, env=environment(), stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not iterations(first):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert printed == "stopped in seeupo seed 0; rerun the command to resume\n"
    assert "stopped" in (first / "log.txt").read_text()

    done = loaded_python.run(
        [*called, f"--json={tmp_path / 'out.json'}"], env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/1] seeupo seed 0: success" in done.stdout
    assert "resuming" in (first / "log.txt").read_text()
    found = json.loads((tmp_path / "out.json").read_text())["recipes"]["seeupo"]
    assert found["runs_finished"] == 1
    lines = iterations(first)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert found["steps"] == [sum(line["sweep/steps"] for line in lines)]
    assert found["tokens"][-1] == sum(line["rollout/action_tokens"] for line in lines[:-1])
    curve = found["success_mean"]
    ends = [lines[i]["rollout/success_rate"] for i in (0, -1)]
    assert len(curve) == 6 and [curve[0], curve[-1]] == ends
    assert (tmp_path / "runs" / "comparison.svg").exists()


def test_a_configuration_is_named_as_in_train_with_its_argument_too(tmp_path, capsys):
    text = "package:qwen3_14b_bfcl:v5p:4x4x4"
    given = [f"--config={text}", f"--workdir={tmp_path}", "--recipes=grpo", "--seeds=1"]
    main(["compare", *given, "--draw_only"])
    assert "0 of 1" in capsys.readouterr().out
    (run,) = planned(tmp_path, recipes=["grpo"], seeds=1, config=text)
    assert f"--config={text}" in run.command


@pytest.mark.parametrize("place", ["w[best]", "u [/old]"])
def test_names_with_brackets_are_printed_as_they_are(tmp_path, monkeypatch, capsys, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / place).mkdir(parents=True)
    given = [f"--config={TINY}", f"--workdir={place}", "--seeds=1", "--draw_only"]
    main(["compare", *given, "--sweep=env.options.x='[red]','[/]'"])
    printed = capsys.readouterr().out
    assert f"wrote {tmp_path / place / 'comparison.svg'}\n" in printed
    assert "seeupo env.options.x='[red]' " in printed and "seeupo env.options.x='[/]' " in printed


def test_failed_runs_are_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_command, "train_all", lambda runs: 2)
    plot = tmp_path / "plot.svg"
    with pytest.raises(SystemExit) as failed:
        main([*command(tmp_path / "runs", "package:order_desk", f"--plot={plot}")[2:], "--seeds=3"])
    # As a text: exit code 1.
    assert failed.value.code == "error: 2 of 3 runs failed; rerun the command to retry them."
    assert plot.exists()


def test_figures_say_what_was_compared(tmp_path):
    file, sweep = tmp_path / "out.json", "optimizer.learning_rate=1e-4,2e-4"
    given = [f"--config={TINY}", f"--workdir={tmp_path}", "--draw_only", f"--json={file}"]
    main(["compare", *given, "--config.iterations=3", f"--sweep={sweep}"])
    found = json.loads(file.read_text())
    assert (found["config"], found["overrides"]) == (str(TINY), ["iterations=3"])
    assert found["sweep"] == [sweep] and len(found["recipes"]) == 2


def test_nothing_is_trained_to_draw_only(tmp_path, capsys):
    called = command(tmp_path / "runs", "package:order_desk", "--draw_only")[2:]
    with pytest.raises(SystemExit) as refused:
        main(called)
    assert refused.value.code == 2 and not (tmp_path / "runs").exists()
    assert "runs, which is not there; allowed with --draw_only: the" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    plot = tmp_path / "plot.png"
    main([*called, f"--plot={plot}"])
    assert "0 of 1" in capsys.readouterr().out and plot.exists()
    assert not (tmp_path / "runs" / "seeupo").exists()


def test_a_comparison_is_drawn_without_a_standard_output(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)  # as Python has it where the descriptor is closed
        main(["compare", f"--config={TINY}", f"--workdir={tmp_path}", "--seeds=1", "--draw_only"])
    assert (tmp_path / "comparison.svg").exists()


def test_the_value_of_a_flag_is_not_taken_for_a_flag(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("results", "explain"):
        (tmp_path / name).mkdir()
        main(["compare", "--config", str(TINY), "--workdir", name, "--draw_only"])
        assert f"wrote {tmp_path / name / 'comparison.svg'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--plot=curve.jpeg", "--plot: got 'curve.jpeg'; allowed"),
        ("--recipes=,", "--recipes: got none; allowed: at least one name."),
    ],
)
def test_a_users_mistake_is_one_sentence(tmp_path, capsys, flag, sentence):
    with pytest.raises(SystemExit) as refused:
        main(command(tmp_path / "runs", "package:order_desk", flag)[2:])
    assert refused.value.code == 2
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1].startswith(f"error: {sentence}")
