"""A policy is written whole, through links; what cannot be written ends the run everywhere."""

import json
from pathlib import Path

import learner_cases
import numpy as np
import pytest
from process_cases import run_processes
from safetensors.numpy import load_file

from seeupo_jax.configuration.schema import Config, Mesh
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy.files.weights import from_pretrained
from seeupo_jax.runtime.build import Policy
from seeupo_jax.runtime.policy_folder import check_output, write_policy


def test_what_cannot_be_written_is_an_error_of_all_processes(tmp_path):
    reported = run_processes("policy_folder_process.py", 2, 2, tmp_path, tmp_path, read=json.loads)
    first, second = reported
    assert (first["written"], first["no folder"]) == ("", "Not a directory")
    assert "File too large" in first["no room"] and first["written again"] == ""
    assert second["no room"] in first["no room"]
    assert second | {"no room": ""} == first | {"no room": ""}
    folder = tmp_path / "policy"
    model, _ = from_pretrained(folder, dtype="float32")
    assert model.arch.width == learner_cases.ARCH.width
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedding, learner_cases.policy()[1]["embedding"])


@pytest.mark.parametrize("target", ["empty", "policy", "new"])
def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path, target):
    folder = tmp_path / "disk" / "policy"
    (tmp_path / "disk" if target == "new" else folder).mkdir(parents=True)
    if target == "policy":
        (folder / "of_before.safetensors").write_text("")
    (tmp_path / "link").symlink_to(folder)
    if target != "policy":
        check_output(tmp_path / "link")
    network, params = learner_cases.policy()
    write_policy(Config(), Policy(network, None, make_mesh(Mesh())), params, tmp_path / "link")
    assert (tmp_path / "link").readlink() == folder
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert sorted(p.name for p in tmp_path.rglob("*") if p.parent != folder) == [
        "disk",
        "link",
        "policy",
    ]


def test_a_link_to_itself_is_no_folder_for_a_policy(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match="--output: got .*loop, which is there; allowed: a new or"):
        check_output(tmp_path / "loop")


def test_one_policy_or_the_other_is_whole_whenever_writing_ends(tmp_path, monkeypatch):
    network, params = learner_cases.policy()
    policy, rename = Policy(network, None, make_mesh(Mesh())), Path.rename

    def killed(self, target):
        if self.suffix == ".unfinished":
            raise KeyboardInterrupt
        return rename(self, target)

    write_policy(Config(), policy, params, tmp_path / "policy")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        write_policy(Config(), policy, params, tmp_path / "policy")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "policy.before",
        "policy.unfinished",
    ]
    for folder in tmp_path.iterdir():
        from_pretrained(folder)
    write_policy(Config(), policy, params, tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
