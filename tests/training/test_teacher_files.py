"""A run resumes with the teachers that it began with, wherever their files lie, and no others."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from places import ROOT

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io.teachers import check_teachers
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
    folder = tmp_path / "silent"
    shutil.copytree(DESK, folder)
    for file in ("tokenizer.model", "chat.json"):
        Path(folder / file).unlink()
    with pytest.raises(ValueError, match="silent, which has no tokenizer; allowed: one that has"):
        checked(config(path=str(folder)), tokenizer)
