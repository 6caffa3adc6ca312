"""What is exported is the checkpoint's policy, and nothing else of it is read."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from hub_stub import TOKEN, running_hub

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.checkpoint import checkpoints as module
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.export import main
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.lora import load_adapters, merge_adapters
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.policy_folder import export_policy
from seeupo_jax.types import TrainState

BASE = "package:order_desk"


def a_run(workdir, notes=None, **fields):
    """A configuration and its run: checkpoints 1, the best, and 2, and the parameters of each."""
    config = from_dict({"model": {"path": BASE}, **fields})
    made, params = build.load_policy(config, BASE)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=2)
    saved = {}
    for step, score in ((1, 0.9), (2, 0.5)):
        params = jax.tree.map(lambda leaf: leaf + 0.25, params)
        zero = jnp.int32(0)
        state = TrainState(params, optax.adam(1e-3).init(params), zero, zero)
        checkpoints.save(step, state, notes or {}, score)
        saved[step] = made.merged(params)
    checkpoints.close()
    return config, saved


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    return workdir, *a_run(workdir)


@pytest.mark.parametrize("step, wanted", [("latest", 2), ("best", 1), ("1", 1)])
def test_the_folder_holds_the_policy_of_the_step(run, tmp_path, step, wanted):
    workdir, config, saved = run
    assert export_policy(config, workdir, step, tmp_path / "out") == wanted
    model, tokenizer = from_pretrained(str(tmp_path / "out"))
    assert checksum(split_model(model)[1]) == checksum(saved[wanted])
    assert tokenizer is not None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_it_is_said_where_the_best_was_chosen_on_the_reported_split(run, tmp_path, caplog):
    workdir, config, _ = run
    export_policy(config, workdir, "latest", tmp_path / "latest")
    assert "selected" not in caplog.text
    export_policy(config, workdir, "best", tmp_path / "best")
    assert "checkpoint 1 was selected on the split 'test'" in caplog.text
    caplog.clear()
    for name, notes in (("other", {"selected_on": "validation"}), ("supervised", {"sft": {}})):
        config, _ = a_run(tmp_path / name, notes)
        export_policy(config, tmp_path / name, "best", tmp_path / f"{name}_best")
        assert "selected" not in caplog.text


def test_only_parameters_are_read_and_they_are_cut_over_all_devices(run, tmp_path, monkeypatch):
    workdir, config, _ = run
    asked = {}
    load = module.ocp.load
    monkeypatch.setattr(
        module.ocp, "load", lambda path, leaves: asked.update(leaves) or load(path, leaves)
    )
    monkeypatch.setattr(build, "load_policy", lambda *_: pytest.fail("weights were read"))
    export_policy(config, workdir, "latest", tmp_path / "out")
    assert asked and all(name.startswith("params/") for name in asked)
    embedding = asked["params/embedding"]
    assert (
        embedding.sharding.shard_shape(embedding.shape)[1]
        == embedding.shape[1] // jax.device_count()
    )


def test_the_command_pushes_the_policy_with_its_card(run, tmp_path, monkeypatch, capsys):
    workdir, _, _ = run
    out = tmp_path / "out"
    line = ["--config=package:quickstart", f"--workdir={workdir}", f"--output={out}"]
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        main(["export", *line, "--push_to_hub=team/agent", "--private"])
    assert capsys.readouterr().out.endswith(f"pushed to {hub.url}/team/agent\n")
    assert hub.repositories == {"team/agent": True}
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert b"after iteration 2" in hub.files["README.md"] and "model.safetensors" in hub.files


def test_a_layout_of_other_machines_does_not_matter(run, tmp_path):
    workdir, config, saved = run
    model = replace(config.model, attention="splash", remat="full")
    elsewhere = replace(config, model=model, mesh=replace(config.mesh, fsdp=64, data=1))
    export_policy(elsewhere, workdir, "latest", tmp_path / "out")
    model, _ = from_pretrained(str(tmp_path / "out"))
    assert checksum(split_model(model)[1]) == checksum(saved[2])


def test_adapters_are_exported_without_their_model_or_merged(tmp_path):
    config, saved = a_run(tmp_path, lora={"rank": 2, "targets": ("q_proj",)})
    export_policy(config, tmp_path, "latest", tmp_path / "alone")
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat.json"}
    assert names == {"adapter_config.json", "adapter_model.safetensors"} | tokenizer
    trained = load_adapters(from_pretrained(BASE)[0], tmp_path / "alone")
    assert checksum(split_model(trained)[1]) == checksum(saved[2])
    merging = replace(config, lora=replace(config.lora, merge=True))
    export_policy(merging, tmp_path, "latest", tmp_path / "merged")
    model, _ = from_pretrained(str(tmp_path / "merged"))
    assert checksum(split_model(model)[1]) == checksum(split_model(merge_adapters(trained))[1])


def test_the_average_is_exported_unless_the_trained_parameters_are_meant(tmp_path):
    config = from_dict({"model": {"path": BASE}, "optimizer": {"ema": 0.9}})
    made, params = build.load_policy(config, BASE)
    ema, zero = jax.tree.map(lambda leaf: leaf + 0.25, params), jnp.int32(0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, TrainState(params, {}, zero, zero, ema=ema), {})
    checkpoints.close()
    for weights, wanted in ((None, ema), ("ema", ema), ("trained", params)):
        folder = tmp_path / f"as_{weights}"
        export_policy(config, tmp_path, "latest", folder, weights)
        assert checksum(split_model(from_pretrained(str(folder))[0])[1]) == checksum(
            made.merged(wanted)
        )
    with pytest.raises(ValueError, match="--weights: got 'mean'; allowed: trained or ema."):
        export_policy(config, tmp_path, "latest", tmp_path / "out", "mean")


def test_an_average_that_the_run_does_not_have_is_refused(run, tmp_path):
    workdir, config, _ = run
    sentence = "--weights: got 'ema'; allowed: trained, since config.optimizer.ema is none."
    with pytest.raises(ValueError, match=sentence):
        export_policy(config, workdir, "latest", tmp_path / "out", "ema")


@pytest.mark.parametrize(
    "step, sentence",
    [
        ("newest", "--step: got 'newest'; allowed: latest, best, or a number"),
        ("3", "step: got 3; allowed: those in .*: 1, 2"),
    ],
)
def test_a_step_that_is_not_there_is_refused(run, tmp_path, step, sentence):
    workdir, config, _ = run
    with pytest.raises(ValueError, match=sentence):
        export_policy(config, workdir, step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_workdir_without_checkpoints_is_refused(run, tmp_path):
    _, config, _ = run
    for step in ("latest", "best", "1"):
        with pytest.raises(ValueError, match="^--workdir: got .*, which has no checkpoint; "):
            export_policy(config, tmp_path, step, tmp_path / "out")
    with pytest.raises(ValueError, match="^--workdir: got .*/typo, which is not there; allowed"):
        export_policy(config, tmp_path / "typo", "latest", tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path):
    workdir, config, _ = run
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ValueError, match="--output: got .*; allowed: a new or empty folder"):
            export_policy(config, workdir, "latest", folder)
    assert (tmp_path / "mine.txt").read_text() == "mine"
