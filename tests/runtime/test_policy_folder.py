"""A policy is written whole, through links; what cannot be written ends the run everywhere."""

import importlib
import json
from pathlib import Path

import jax.numpy as jnp
import learner_cases
import numpy as np
import pytest
from process_cases import run_processes
from safetensors.numpy import load_file

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.loading import from_dict, load_config, to_dict
from seeupo_jax.configuration.schema import Config, Mesh
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy.files.weights import from_pretrained
from seeupo_jax.runtime.build import Policy
from seeupo_jax.runtime.policy_folder import (
    check_output,
    check_trained,
    find_step,
    write_policy,
)


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


def a_checkpoint(workdir, config, **notes):
    """A run's folder, of which only the notes of its checkpoint are read."""
    checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
    checkpoints.save(3, {"params": jnp.zeros(2)}, {"config": to_dict(config), **notes})
    checkpoints.close()
    return workdir


@pytest.mark.parametrize("command", ["evaluate", "export", "serve"])
def test_no_command_makes_another_policy_of_a_checkpoint_than_the_run_did(
    tmp_path, capsys, command
):
    own = load_config("package:quickstart", ["lora.path=somewhere"])
    a_checkpoint(tmp_path, own, adapters={"rank": 4, "alpha": 64.0})
    line = [command, "--config=package:quickstart", f"--workdir={tmp_path}", "--config.lora.rank=4"]
    more = {"serve": ["--port=0"], "export": [f"--output={tmp_path / 'out'}"]}.get(command, [])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"seeupo_jax.{command}").main([*line, *more])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "error: config.lora.alpha: got 32.0; allowed for this workdir" in error
    assert error.endswith(" adapters of it: 64.0.\n")  # a new workdir would be no help


def test_the_best_checkpoint_is_best_among_scores_that_were_measured_alike(tmp_path):
    """Also where a version wrote them that noted no more than its configuration."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=9)
    for step, (tasks, score) in enumerate([(1, 1.0), (24, 0.4), (24, 0.3)]):
        config = to_dict(from_dict({"evaluation": {"tasks": tasks}}))
        checkpoints.save(step, {"params": jnp.zeros(2)}, {"config": config}, score)
    checkpoints.close()
    assert find_step(Config(), tmp_path, "best") == 1


def test_which_policy_a_checkpoint_is_of_is_what_its_run_says(tmp_path, caplog):
    path = {"model": {"path": "one"}}
    ran = {name: path | part for name, part in {
        "adapters": {"lora": {"rank": 4}},
        "frozen": {"optimizer": {"groups": [{"pattern": "*", "frozen": True}]}},
        "average": {"optimizer": {"ema": 0.9}},
    }.items()}  # fmt: skip
    run = {name: a_checkpoint(tmp_path / name, from_dict(ran[name])) for name in ran}
    other = {"model": {"path": "two"}}
    moved = "^config.model.path: got two; .*: one, or what .* moved, a link at its old place.$"
    for name, given, weights, sentence in (
        ("adapters", ran["adapters"] | other, None, moved),
        ("frozen", ran["frozen"] | other, None, moved),
        ("average", path, None, "^config.optimizer.ema: got none; .*: 0.9, or --weights=trained"),
        ("average", path, "trained", None),
        ("average", ran["average"] | other, None, None),
        ("average", path | {"optimizer": {"ema": 0.5}}, "ema", None),
    ):
        if sentence is None:
            assert check_trained(from_dict(given), run[name], None, weights)[0] == 3
            continue
        with pytest.raises(ValueError, match=sentence):
            check_trained(from_dict(given), run[name], None, weights)
    assert not caplog.records
