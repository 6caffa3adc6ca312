"""The package as an application uses it: one process, several runs, callbacks, and figures."""

import dataclasses
import functools
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import run_cases as cases
from ml_collections import ConfigDict
from places import TINY
from process_cases import run_processes
from safetensors.numpy import load_file

from seeupo_jax import (
    Callback,
    Config,
    Server,
    evaluate,
    load_config,
    read_trajectories,
    report,
    sft,
    telemetry,
    train,
)
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.metrics.history import read_history
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.planning.explain.explain_training import explain_training
from seeupo_jax.policy_io.hub import model_card
from seeupo_jax.reports.html_report import render
from seeupo_jax.reports.run_data import load_runs

OVERRIDES = [text.removeprefix("--config.") for text in cases.CHOICES]


class Recorder(Callback):
    """Notes what it hears; at one moment it does something."""

    def __init__(self, moment=None, action=None):
        self.events, self.metrics, self.trajectories, self.steps = [], {}, {}, {}
        self.moment, self.action = moment, action

    def note(self, run, *moment):
        self.events.append(moment)
        if moment == self.moment:
            self.action(run)

    def on_start(self, run, iteration):
        self.note(run, "start", iteration)

    def on_trajectories(self, run, iteration, split, trajectories):
        self.trajectories[iteration, split] = trajectories
        self.note(run, "trajectories", iteration, split)

    def on_step(self, run, iteration, step, steps):
        self.steps[iteration] = step, steps
        self.note(run, "step", iteration, step)

    def on_iteration(self, run, iteration, metrics):
        self.metrics[iteration] = metrics
        self.note(run, "iteration", iteration)

    def on_evaluation(self, run, iteration, metrics):
        self.note(run, "evaluation", iteration)

    def on_end(self, run, error):
        self.note(run, "end", type(error).__name__, run.stopping)


@pytest.fixture(scope="module")
def config(tmp_path_factory, one_device):
    model = cases.save_policy(tmp_path_factory.mktemp("api") / "model")
    own = [f"model.path={model}", "iterations=2", "rollout.tasks=2", "rollout.group_size=4"]
    return load_config(TINY, [*OVERRIDES, *own, "evaluation.tasks=2"])


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory):
    """A run in a thread, where Python allows no signal handlers: what it gave and was heard of."""
    recorder, results = Recorder(), []
    workdir = tmp_path_factory.mktemp("undisturbed")
    thread = threading.Thread(target=lambda: results.append(train(config, workdir, [recorder])))
    thread.start()
    thread.join()
    return results[0], recorder


def test_a_run_gives_its_policy_its_metrics_and_its_best_iteration(undisturbed):
    result, _ = undisturbed
    assert result.stopped is None and result.policy == result.workdir / "policy"
    assert (result.policy / "model.safetensors").is_file()
    assert result.metrics["iteration"] == [0, 1, 2]  # evaluated before training and after the last
    checksums = zip((1, 2), result.metrics["state/checksum"][1:], strict=True)
    assert list(checksums) == cases.checksums(result.workdir)
    values = result.metrics["eval/avg@2"]
    assert values[1] is None and None not in (values[0], values[2])
    assert result.best_iteration == 2
    with pytest.raises(KeyError, match="no such metric; there are: iteration, "):
        result.metrics["succes"]


def test_callbacks_hear_everything_in_its_order(undisturbed, config):
    result, recorder = undisturbed
    received = [moment for moment in recorder.events if moment[0] != "step"]
    split = config.evaluation.split
    assert received == [
        ("start", 0),
        ("trajectories", 0, split),
        ("evaluation", 0),
        ("trajectories", 1, "train"),
        ("iteration", 1),
        ("trajectories", 2, "train"),
        ("iteration", 2),
        ("trajectories", 2, split),
        ("evaluation", 2),
        ("end", "NoneType", None),
    ]
    assert {("step", 2, 1), ("step", 2, 2)} <= set(recorder.events)
    turns = {i: recorder.metrics[i]["sweep/turns"] for i in (1, 2)}
    assert recorder.steps == {i: (turns[i], turns[i]) for i in (1, 2)}  # the last of an iteration
    assert len(recorder.trajectories[1, "train"]) == 2 * 4
    reward = recorder.metrics[1]["rollout/reward_mean"]
    assert reward == result.metrics[1]["rollout/reward_mean"]
    kept = list(read_trajectories(result.workdir, split="train", iterations=[1]))
    assert [t.reward for t in recorder.trajectories[1, "train"]] == [t["reward"] for t in kept]


def test_a_run_of_a_padded_model_samples_and_trains_tokens_alone(config, tmp_path):
    """Of 960 ids 64 have no token: with them some 200 tokens would have a dozen of them."""
    model = cases.save_policy(tmp_path / "model", padding=64)
    padded = dataclasses.replace(config.model, path=str(model))
    recorder = Recorder()
    result = train(dataclasses.replace(config, model=padded), tmp_path / "run", [recorder])
    segments = [s for each in recorder.trajectories.values() for t in each for s in t.segments]
    sampled = np.concatenate([s.tokens_L[s.turn_L >= 0] for s in segments])
    assert len(sampled) > 200 and sampled.max() < 896
    assert max(result.metrics["logp/sampler_trainer_gap"][1:]) < 2e-5
    before, after = (
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        for folder in (model, result.policy)
    )
    assert before.shape == after.shape == (960, 32)
    np.testing.assert_array_equal(after[896:], before[896:])
    assert np.abs(after[:896] - before[:896]).max() > 0
    evaluated = evaluate(dataclasses.replace(config, model=padded), tmp_path / "run")
    assert evaluated.metrics["eval/tasks"] > 0


def test_a_run_in_which_no_episode_succeeds_says_so_at_its_end_and_in_its_report(
    config, tmp_path, capsys
):
    env = dataclasses.replace(config.env, name="run_environment:Partial")
    result = train(dataclasses.replace(config, env=env), tmp_path)
    low, high = sorted(result.metrics["rollout/reward_mean"][1:])
    sentence = (
        "rollout/success_rate was 0 in all 2 iterations: no episode had a score of 1. The mean"
        f" reward was between {low:.3g} and {high:.3g}. docs/debugging.md has what to look at, in"
        " question 3."
    )
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"warning: {sentence}"
    assert sentence in render(load_runs([tmp_path]), tmp_path)


def test_a_run_that_callbacks_stop_and_break_ends_with_the_same_bits(
    undisturbed, config, tmp_path, capsys
):
    def fail(run):
        raise RuntimeError("mine")

    breaker, other = Recorder(("iteration", 1), fail), Recorder()
    with pytest.raises(RuntimeError, match="mine") as raised:
        train(config, tmp_path, [breaker, other])
    assert raised.traceback[-1].name == "fail"
    assert Checkpoints(tmp_path / "checkpoints", 1).latest() == 1
    end = ("end", "RuntimeError", "Recorder raised RuntimeError")
    assert breaker.events[-2:] == [("iteration", 1), end] and other.events[-1] == end
    assert ("iteration", 1) not in other.events
    stopper = Recorder(("step", 2, 1), lambda run: run.stop("far enough"))
    result = train(config, tmp_path, [stopper])
    assert result.stopped == "far enough" and result.policy is None
    assert result.metrics["iteration"] == [0, 1] and stopper.events[0] == ("start", 1)
    assert stopper.events[-1] == ("end", "NoneType", "far enough")
    assert "in the sweep of iteration 2" in capsys.readouterr().out
    last = Recorder()
    result = train(config, tmp_path, [last])
    assert last.events[0] == ("start", 1) and result.stopped is None
    assert cases.checksums(tmp_path) == cases.checksums(undisturbed[0].workdir)
    assert (tmp_path / "policy" / "model.safetensors").is_file()


def test_an_evaluation_gives_its_figures_and_agrees_with_the_run(undisturbed, config, caplog):
    workdir = undisturbed[0].workdir
    result = evaluate(config, workdir)
    row = undisturbed[0].metrics[-1]
    for name, estimate in (("avg", result.avg_at_k), ("pass", result.pass_at_k)):
        names = [f"eval/{name}@2{end}" for end in ("", "_low", "_high")]
        assert [estimate.value, estimate.low, estimate.high] == [row[name] for name in names]
    assert (result.split, result.k, result.policy) == (config.evaluation.split, 2, {"iteration": 2})
    assert len(result.episodes) == 4 and result.file.parent == workdir / "evaluation"
    assert str(result).splitlines()[0].split() == ["tasks", "failed", "avg@2", "pass@2"]
    assert "selected" not in caplog.text
    assert evaluate(config, workdir, step="best").file == result.file
    assert "checkpoint 2 was selected on the split" in caplog.text


def test_without_tasks_a_run_evaluates_nothing_and_learns_the_same(
    undisturbed, config, tmp_path, capsys
):
    off = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, tasks=0))
    recorder = Recorder()
    result = train(off, tmp_path, [recorder])
    heard = [event for event in undisturbed[1].events if "evaluation" not in event]
    heard = [event for event in heard if event[0] != "trajectories" or event[2] == "train"]
    assert recorder.events == heard and result.stopped is None and result.best_iteration is None
    lines = read_metrics(tmp_path)
    assert [line["iteration"] for line in lines] == [1, 2]
    assert not any("eval" in name for line in lines for name in line)
    assert cases.checksums(tmp_path) == cases.checksums(undisturbed[0].workdir)
    assert "config.checkpoint.keep_best=1 has no effect" in capsys.readouterr().out
    sections = dict(explain_training(dataclasses.replace(off, iterations=4), tmp_path))
    assert sections["evaluations"] == ["none (config.evaluation.tasks=0)"]
    assert not any("tested" in line or "test:" in line for line in sections["tasks"])
    assert "best" not in "".join(sections["checkpoints"])
    report.main(["report", f"--workdir={tmp_path}"])
    assert "none was recorded" in model_card(off, tmp_path, 2, "params", "us/policy")
    with pytest.raises(ValueError, match=r"^config\.evaluation\.tasks: got 0, .* number >= 1\.$"):
        evaluate(off, tmp_path)
    resumed = Recorder()
    longer = dataclasses.replace(config, iterations=3)  # evaluated again from here on
    assert train(longer, tmp_path, [resumed]).best_iteration == 3
    assert [e for e in resumed.events if e[0] == "evaluation"] == [("evaluation", 3)]


@pytest.mark.exhaustive
def test_of_two_processes_one_hears_and_both_stop(config, tmp_path):
    def run_pair(how):
        given = tmp_path, config.model.path, tmp_path / how, how
        return run_processes("callback_process.py", 2, 1, *given, read=json.loads)

    assert run_pair("stop") == [
        [[1], "enough", [0, 1]],
        [[], "another process was asked to stop", [0, 1]],
    ]
    first, second = run_pair("raise")
    assert first == "LookupError('enough')"
    assert second.startswith("RuntimeError('callbacks: one of process 0 raised; ")


def test_another_configuration_is_trained_in_the_same_process(config, tmp_path):
    other = load_config(config, ["iterations=1", "algorithm.order=forward", "evaluation.every=0"])
    result = train(other, tmp_path)
    assert result.metrics["iteration"] == [0, 1]


def test_episodes_that_do_not_count_are_not_among_an_evaluations(undisturbed, config):
    whole = evaluate(config, undisturbed[0].workdir)
    fewer = evaluate(load_config(config, ["evaluation.tasks=1"]), undisturbed[0].workdir)
    assert fewer.file == whole.file and fewer.metrics["eval/tasks"] == 1
    assert fewer.episodes == whole.episodes[:2]  # k=2


@pytest.mark.parametrize(
    "given, message",
    [
        ({"k": "4"}, "k: got '4'; allowed: a whole number >= 1."),
        ({"k": 2.0}, "k: got 2.0; allowed: a whole number >= 1."),
        ({"k": True}, "k: got True; allowed: a whole number >= 1."),
        ({"k": 0}, "k: got 0; allowed: a whole number >= 1."),
        ({"server": "http://h:8000"}, "server: got 'http://h:8000'; allowed: a seeupo_jax.Server."),
        ({"split": 5}, "split: got 5; allowed: the name of a split."),
        ({"step": 1.0}, "step: got 1.0; allowed: latest, best, or a number."),
        ({"step": 3, "server": Server("http://h")}, "--step: got '3'; allowed: none with --server"),
        ({"workdir": None}, "workdir: got None; allowed: a folder, such as a bucket that"),
    ],
)
def test_a_wrong_argument_of_an_evaluation_is_a_sentence(config, tmp_path, given, message):
    with pytest.raises(ValueError) as error:
        evaluate(config, **{"workdir": tmp_path / "run"} | given)
    assert str(error.value).startswith(message) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("call", [train, evaluate, functools.partial(sft, data=None)])
def test_a_workdir_in_a_bucket_is_a_sentence_and_no_folder_here(
    config, tmp_path, monkeypatch, call, kind
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^workdir: got 'gs:/.*; allowed: a folder, such as"):
        call(config, workdir=kind("gs://ours/run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [Recorder, print, "callback"])
def test_what_is_no_callback_is_refused_before_anything_is_done(config, tmp_path, wrong):
    with pytest.raises(ValueError, match=r"callbacks\[1\]: got .*; allowed: an object of a class"):
        train(config, tmp_path / "run", [Recorder(), wrong])
    with pytest.raises(ValueError, match=r"callbacks: got .*; allowed: a sequence of callbacks"):
        train(config, tmp_path / "run", Recorder())
    assert not (tmp_path / "run").exists()


def test_a_wrong_configuration_is_an_error_and_no_exit(tmp_path):
    with pytest.raises(ValueError, match="--config: no file .*nowhere.py"):
        train("nowhere.py", tmp_path)


def values():
    return {"iterations": 7}


def wrong_values():
    return 3


def test_configurations_come_from_functions_and_from_configurations(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_configs", sys.modules[__name__])
    config = load_config("my_configs:values", ["recipe=grpo"])
    assert (config.iterations, config.recipe, config.algorithm.scale) == (7, "grpo", "group")
    assert load_config(config) == config
    back = load_config(config, ["recipe=seeupo", "seed=3"])
    assert back == load_config("my_configs:values", ["seed=3"])
    assert back.algorithm == Config().algorithm
    made = ConfigDict({"iterations": 7, "recipe": "cispo"})
    assert load_config(made) == load_config(made.to_dict()) == Config(iterations=7, recipe="cispo")
    with pytest.raises(ValueError, match="my_configs:wrong_values returned 3"):
        load_config("my_configs:wrong_values")
    with pytest.raises(ValueError, match="there is no module 'nowhere'"):
        load_config("nowhere:values")


@pytest.mark.parametrize("before", sorted(RECIPES))
def test_another_recipe_replaces_all_of_the_first_ones_fields_and_none_of_the_users(
    before, monkeypatch
):
    values = {"recipe": before, "algorithm": {"minibatches_per_turn": 2}}
    after = load_config(load_config(values), ["recipe=grpo"])
    assert after == load_config(values, ["recipe=grpo"]) == load_config(values | {"recipe": "grpo"})
    monkeypatch.setitem(
        sys.modules, "my_configs", SimpleNamespace(made=lambda: load_config(values))
    )
    assert load_config("my_configs:made", ["recipe=grpo"]) == after


@pytest.mark.parametrize(
    "given, message",
    [
        ((None,), "config: got None (NoneType); allowed: a file's path, package:NAME, module:func"),
        ((7,), "config: got 7 (int); allowed: a file's path"),
        (({}, "iterations=2"), "overrides: got 'iterations=2'; allowed: a sequence of texts"),
        (({}, None), "overrides: got None; allowed: a sequence of texts"),
        (({}, map(str, ["iterations=2"])), "overrides: got <map object at"),
        (({}, [("iterations", 2)]), "overrides: got [('iterations', 2)]; allowed: a sequence"),
    ],
)
def test_what_is_no_configuration_is_a_sentence(given, message):
    with pytest.raises(ValueError) as error:
        load_config(*given)
    assert str(error.value).startswith(message)


def test_what_a_step_and_its_evaluation_both_took_is_added_up(tmp_path):
    lines = [
        {"iteration": 1, "time/compile_s": 30.0, "sft/loss": 2.0},
        {"iteration": 1, "time/compile_s": 1.5, "eval/loss": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = read_history(tmp_path)
    assert row == {"iteration": 1, "time/compile_s": 31.5, "sft/loss": 2.0, "eval/loss": 3.0}


ORDERS = (
    "import seeupo_jax.train, seeupo_jax",
    "import seeupo_jax; import seeupo_jax.evaluate; seeupo_jax.train; import seeupo_jax.train",
    "from seeupo_jax.train import main; import seeupo_jax",
    "from seeupo_jax import train, evaluate; import seeupo_jax.train",
)


@pytest.mark.parametrize("order", ORDERS)
def test_train_is_the_function_in_every_order_of_imports(order, monkeypatch):
    for name in ("seeupo_jax", "seeupo_jax.train", "seeupo_jax.evaluate"):
        monkeypatch.delitem(sys.modules, name)
    names = {}
    exec(f"{order}\nfrom seeupo_jax.train import train as t\nimport seeupo_jax", names)
    exec("from seeupo_jax import train, evaluate", names)
    package = names["seeupo_jax"]
    assert package is sys.modules["seeupo_jax"]
    assert package.train is names["train"] is names["t"] is sys.modules["seeupo_jax.train"].train
    assert package.evaluate is names["evaluate"] is sys.modules["seeupo_jax.evaluate"].evaluate


@pytest.mark.parametrize("before, after", [("", "10000"), ("gc.set_threshold(0)", "0")])
def test_garbage_is_looked_for_less_often_unless_its_threshold_was_set(before, after):
    program = f"import gc\n{before}\nimport seeupo_jax\nprint(gc.get_threshold()[0])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout == f"{after}\n"


def test_the_former_path_of_read_trajectories_stays():
    assert telemetry.read_trajectories is read_trajectories


def test_the_package_is_imported_without_jax():
    program = (
        "import sys, seeupo_jax\n"
        "from seeupo_jax import Environment, StepResult, load_config, read_trajectories\n"
        "import seeupo_jax.telemetry, seeupo_jax.report\n"
        "assert set(seeupo_jax.__all__) <= set(dir(seeupo_jax))\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(ImportError, match="trayn"):
        exec("from seeupo_jax import trayn")


def test_an_application_may_configure_logging_after_it_has_imported_the_package_and_run(tmp_path):
    source = tmp_path / "logs.py"
    source.write_text(
        "from absl import logging\n\ndef get_config():\n"
        "    logging.info('as Orbax at every save')\n    raise ValueError('no configuration')\n"
    )
    program = (
        "import logging, sys\n"
        "from seeupo_jax import evaluate, sft, train\n"
        "assert not logging.root.handlers, 'after the import'\n"
        "for run, data in ((train, ()), (evaluate, ()), (sft, (None,))):\n"
        "    try:\n        run(sys.argv[1], *data, 'runs')\n"
        "    except ValueError as error:\n        assert 'no configuration' in str(error)\n"
        "    assert not logging.root.handlers, run\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "assert logging.getLogger('seeupo_jax.run').isEnabledFor(logging.INFO)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(source)], check=True)
