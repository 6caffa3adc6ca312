"""A run whose evaluations no longer improve ends, names its best checkpoint, and stays ended."""

import contextlib
import io
import json
import math

import jax
import pytest
import run_cases as cases
from metric_names import checked
from places import TINY

from seeupo_jax.comparison.runs import check_evaluated
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.metrics.run_manifest import read_run_manifest
from seeupo_jax.metrics.statistics import evaluation_prefix
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.reports.run_data import load_runs
from seeupo_jax.train import iterate
from seeupo_jax.training import run as run_module
from seeupo_jax.training.checks import check_config
from seeupo_jax.training.early_stopping import Progress
from seeupo_jax.training.run import begin_run

SCORES = {0: 0.9, 1: 0.25, 2: 0.5, 3: 0.25, 4: 0.375, 5: 0.75, 6: 0.5}  # by iteration
END = {"reason": "iterations", "best": 2}
OPTIONS = (
    *("rollout.tasks=2", "rollout.max_turns=2", "checkpoint.every=1", "evaluation.every=1"),
    *("evaluation.k=1", "evaluation.patience=2", "checkpoint.keep_best=1", "checkpoint.keep=1"),
)


@pytest.mark.parametrize(
    "scores, wanted",
    [
        ((), Progress()),
        ((0.0,), Progress(0.0, 0)),
        ((0.5, 0.5), Progress(0.5, 1)),
        ((0.5, 0.25, 0.75), Progress(0.75, 0)),
        ((math.nan, 0.5, math.nan), Progress(0.5, 1)),
        ((math.nan,), Progress(None, 1)),
    ],
)
def test_only_a_score_above_all_before_is_an_improvement(scores, wanted):
    progress = Progress()
    for score in scores:
        progress = progress.after(score)
    assert progress == wanted


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("early") / "model")


@pytest.fixture
def live(model, tmp_path, monkeypatch):
    """One life of a run, whose evaluations have the scores above: what it evaluated, and said."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    options = [text.removeprefix("--config.") for text in cases.CHOICES]
    played = []

    def play(*_, split, k, iteration, **others):
        played.append((iteration, split))
        return {f"{evaluation_prefix('test', split)}/avg@{k}": SCORES[iteration]}

    monkeypatch.setattr(run_module, "evaluate_split", play)

    def live(*more):
        config = load_config(TINY, [*options, *OPTIONS, f"model.path={model}", *more])
        stream = io.StringIO()
        progress = ProgressDisplay(config.iterations, "plain", stream=stream)
        policy, params = build.load_policy(config, str(model))
        played.clear()
        with progress, jax.set_mesh(policy.mesh), contextlib.ExitStack() as opened:
            begun = begin_run(config, tmp_path / "run", progress, StopRequest(), policy, params)
            assert iterate(opened.enter_context(begun[0]), begun[1])
        return [*played], stream.getvalue()

    return live


def test_a_run_ends_when_evaluations_improve_no_more_and_counts_over_restarts(live, tmp_path):
    folder = tmp_path / "run"
    live("iterations=3")
    assert read_run_manifest(folder)["ended"] == END | {"iteration": 3}

    # The fourth evaluation is better than the third, and not than the second.
    more = ("iterations=6", "evaluation.extra_splits=train")
    played, said = live(*more)
    assert played == [(4, "test"), (4, "train")]
    assert (
        "ended after iteration 4 of 6: 2 evaluations in a row were no better than 0.5"
        " (config.evaluation.patience=2); the best checkpoint is 2"
    ) in said
    assert read_run_manifest(folder)["ended"] == END | {"iteration": 4, "reason": "patience"}
    worse = [line["eval/worse"] for line in checked(read_metrics(folder)) if "eval/worse" in line]
    assert worse == [0, 0, 1, 2]
    saved = {place.name.partition(".")[0] for place in (folder / "checkpoints").glob("[0-9]*")}
    assert saved == {"2", "4"}
    (run,) = load_runs([folder])
    assert run.finished and run.done == 4

    before = (folder / "metrics.jsonl").read_text()
    assert live(*more)[0] == []  # the same command finds nothing left to do
    assert (folder / "metrics.jsonl").read_text() == before
    assert json.loads((folder / "run.json").read_text())["ended"]["reason"] == "patience"

    played, said = live(*more, "evaluation.patience=3")
    assert [at for at, split in played if split == "test"] == [5, 6]
    assert "ended after" not in said
    assert read_run_manifest(folder)["ended"] == END | {"iteration": 6, "best": 5}


@pytest.mark.parametrize(
    "field", ["evaluation.tasks", "evaluation.every", "checkpoint.every", "checkpoint.keep_best"]
)
def test_patience_without_anything_to_compare_is_refused(model, field):
    choices = [text.removeprefix("--config.") for text in cases.CHOICES]
    config = load_config(TINY, [*choices, *OPTIONS, f"model.path={model}", f"{field}=0"])
    with pytest.raises(ValueError, match=f"evaluation.patience: got 2 with config.{field}=0"):
        check_config(config)


def test_runs_that_are_compared_have_equally_many_iterations():
    with pytest.raises(ValueError, match="patience: got 2; allowed in comparisons: none"):
        check_evaluated(load_config(TINY, ["evaluation.patience=2"]))
