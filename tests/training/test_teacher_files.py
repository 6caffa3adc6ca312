"""A run resumes with the teachers that it began with, wherever their files lie, and no others."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import run_cases
from places import ROOT, TINY

from seeupo_jax.configuration.loading import from_dict, load_config
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io.teachers import check_teachers
from seeupo_jax.train import train
from seeupo_jax.training.teacher_files import check_same_teachers, teachers_note

DESK = ROOT / "seeupo_jax" / "assets" / "order_desk"


def config(**teacher):
    return from_dict({"model": {"path": str(DESK)}, "teacher": teacher})


def test_a_teacher_that_was_moved_is_the_same_and_one_with_other_files_is_not(tmp_path):
    noted = teachers_note(config(path=str(DESK)))
    assert noted[""]["model.safetensors"] and len(noted[""]) == 4
    moved = tmp_path / "moved"
    shutil.copytree(DESK, moved)
    check_same_teachers(config(path=str(moved)), noted)
    weights = moved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="config.teacher.path: got .*moved; allowed for this work"):
        check_same_teachers(config(path=str(moved)), noted)
    with pytest.raises(ValueError, match="config.teacher.path: got None; allowed for this workdir"):
        check_same_teachers(config(), noted)
    with pytest.raises(
        ValueError, match=r"config.teacher.by_task\[env=a\]: got .*order_desk; allo"
    ):
        check_same_teachers(config(by_task={"env=a": str(DESK)}), None)
    check_same_teachers(config(), None)


def checked(given, tokenizer=None, **rest):
    check_teachers(dataclasses.replace(given, **rest), make_mesh(given.mesh), tokenizer)


def test_teachers_are_checked_before_a_run(tmp_path):
    tokenizer = read_tokenizer(DESK)
    checked(config(path="package:order_desk_level2"), tokenizer)
    with pytest.raises(ValueError, match="config.teacher.path=.*nowhere: model path: got"):
        checked(config(path=str(tmp_path / "nowhere")), tokenizer)
    long = {"hint": "Look up the order first. " * 2000, "path": "policy"}
    with pytest.raises(
        ValueError, match="config.teacher.hint: got a text of .* tokens, .*; allowe"
    ):
        checked(config(**long), tokenizer)
    alone = from_dict({"model": {"path": str(DESK)}, "recipe": "opd"})
    with pytest.raises(
        ValueError, match="config.teacher.path: got None and coef=1 with algorithm.a"
    ):
        checked(alone, tokenizer)
    few = config(path=str(DESK), top_k=4096)
    with pytest.raises(
        ValueError, match=r"config.teacher.top_k: got 4096 with a policy of \d+ tokens; allowed: 1"
    ):
        checked(few, tokenizer)
    folder = tmp_path / "silent"
    shutil.copytree(DESK, folder)
    for file in ("tokenizer.model", "chat.json"):
        Path(folder / file).unlink()
    with pytest.raises(ValueError, match="silent, which has no tokenizer; allowed: one that has"):
        checked(config(path=str(folder)), tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return run_cases.save_policy(tmp_path_factory.mktemp("taught") / "model")


@pytest.mark.parametrize("top_k", ["none", "4"])
@pytest.mark.usefixtures("one_device")
def test_a_taught_run_that_was_stopped_resumes_to_the_same_bits(tmp_path, model, top_k):
    options = [text.removeprefix("--config.") for text in run_cases.CHOICES]
    options += [f"model.path={model}", "recipe=opd", f"teacher.path={DESK}"]
    options += [f"teacher.top_k={top_k}", "algorithm.minibatches_per_turn=2", "rollout.tasks=2"]
    options += ["evaluation.every=0", "optimizer.learning_rate=1e-2"]

    def trained(workdir, iterations):
        train(load_config(TINY, [*options, f"iterations={iterations}"]), workdir)
        lines = [line for line in read_metrics(workdir) if "sweep/teacher_kl" in line]
        return [(line["sweep/teacher_kl"], line["state/checksum"]) for line in lines]

    whole = trained(tmp_path / "whole", 3)
    assert trained(tmp_path / "parts", 1) == whole[:1]
    assert trained(tmp_path / "parts", 3) == whole
    assert len({checksum for _, checksum in whole}) == 3
