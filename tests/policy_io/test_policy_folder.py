"""A policy is written whole, through links; what cannot be written ends the run everywhere."""

import contextlib
import importlib
import json
import shutil
from pathlib import Path

import chat_cases
import jax
import jax.numpy as jnp
import learner_cases
import numpy as np
import pytest
import torch
from flax import nnx
from places import CONFIGS
from process_cases import run_processes
from refusals import refusal
from safetensors.numpy import load_file

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.loading import from_dict, load_config, to_dict
from seeupo_jax.configuration.schema import Config, Mesh
from seeupo_jax.evaluation.policy_sources import run_policy
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.files.weights import from_pretrained
from seeupo_jax.policy.lora import attach_adapters, merge_adapters
from seeupo_jax.policy.network import split_model, split_trainable
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.policy_folder import (
    check_output,
    check_trained,
    find_step,
    publish_policy,
    write_policy,
)
from seeupo_jax.rollout.weights.versions import newest_version, versions
from seeupo_jax.training.checks import check_config, check_sampling


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


def test_every_version_for_other_engines_is_a_policy_and_the_newest_two_stay(tmp_path):
    network, params = learner_cases.policy()
    policy = Policy(network, None, make_mesh(Mesh()))
    for version in (0, 1, 2):
        moved = jax.tree.map(lambda x, version=version: x + version, params)
        publication = publish_policy(Config(), policy, moved, tmp_path, version)
        assert publication.failure is None and newest_version(tmp_path) == version
        write_policy(Config(), policy, moved, tmp_path / "policy")
        wanted = {file.name: file.read_bytes() for file in (tmp_path / "policy").iterdir()}
        found = {file.name: file.read_bytes() for file in (tmp_path / str(version)).iterdir()}
        del found["manifest.json"]
        assert found == wanted and "model.safetensors" in found
        shutil.rmtree(tmp_path / "policy")
    assert versions(tmp_path) == [1, 2]


def test_a_version_of_adapters_has_no_files_of_their_model(tmp_path):
    model = Transformer(Architecture(32, 32, 1, 2, 2, 16, 64), nnx.Rngs(0))
    save_pretrained(model, tmp_path / "model")
    config = from_dict({"model": {"path": str(tmp_path / "model")}, "lora": {"rank": 2}})
    network, params = split_model(attach_adapters(model, build.adapters_of(config)))
    params, frozen = split_trainable(network, params)
    moved = jax.tree.map(lambda x: x + 0.5, params)
    policy = Policy(network, None, make_mesh(Mesh()), frozen, str(tmp_path / "model"))
    publish_policy(config, policy, moved, tmp_path / "versions", 4)
    folder = tmp_path / "versions" / "4"
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    }
    merged, _ = from_pretrained(folder, dtype="float32")
    wanted = split_model(merge_adapters(network.bind(policy.merged(moved))))[1]
    jax.tree.map(np.testing.assert_array_equal, split_model(merged)[1], wanted)


def test_a_version_for_other_engines_that_cannot_be_written_is_named(tmp_path):
    network, params = learner_cases.policy()
    policy = Policy(network, None, make_mesh(Mesh()))
    (tmp_path / "versions").write_text("a file")
    failure = publish_policy(Config(), policy, params, tmp_path / "versions", 0).failure
    assert failure.startswith(f"version 0 could not be published in {tmp_path / 'versions'}: ")


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


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A policy's adapters, written from the folder in which its model had a relative path."""
    folder = tmp_path_factory.mktemp("adapters")
    library = chat_cases.small_library()
    model = Transformer(Architecture(len(library), 32, 1, 2, 2, 16, 64), nnx.Rngs(0))
    chat = {"tools": "hermes", "roles": {"tool": "user"}}
    options = from_dict({"chat": chat}).chat
    tokenizer = HuggingFaceTokenizer(library, options, generation={}, where="a test")
    save_pretrained(model, folder / "model", tokenizer)
    with contextlib.chdir(folder):
        config = from_dict({"model": {"path": "model"}, "lora": {"rank": 2}})
        policy, params = build.load_policy(config, "model")
        rng = np.random.default_rng(0)
        moved = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32), params)
        write_policy(config, policy, moved, folder / "policy")
    return folder


# PEFT 0.21 reads a name that transformers 5.23 has deprecated.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_are_a_policy_for_other_software_in_any_folder(adapters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = adapters / "policy"
    stated = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert stated == str(adapters / "model")
    peft, transformers = (importlib.import_module(name) for name in ("peft", "transformers"))
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    library = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "where is the order"}]
    text = library.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    model, tokenizer = from_pretrained(folder, dtype="float32")
    tokens = tokenizer.begin(messages, ()).tokens
    assert library.encode(text, add_special_tokens=False) == tokens
    inputs = torch.tensor([tokens])
    with torch.no_grad():
        wanted = theirs(inputs).logits.numpy()
    actual = np.asarray(model(jnp.asarray([tokens])))
    np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=1e-4)
    plain, _ = from_pretrained(adapters / "model", dtype="float32")
    assert np.abs(np.asarray(plain(jnp.asarray([tokens]))) - wanted).max() > 0.1
    assert model.arch == plain.arch


def test_adapters_are_a_policy_for_every_command(adapters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["rollout.tasks=4", "rollout.group_size=2", "evaluation.tasks=2"]
    config = load_config(CONFIGS / "quickstart.py", [f"model.path={adapters / 'policy'}", *small])
    check_config(config)
    check_sampling(config)
    chat = json.loads((adapters / "policy" / "chat.json").read_text())
    assert chat == {"system": True, "tools": "hermes", "roles": {"tool": "user"}}
    with run_policy(config, tmp_path, untrained=True) as source:
        served, tokenizer = source.params, source.tokenizer
    assert tokenizer.unwritten == {}
    loaded = split_model(from_pretrained(adapters / "policy", dtype="float32")[0])[1]
    jax.tree.map(np.testing.assert_array_equal, served, loaded)
    more = load_config(
        CONFIGS / "quickstart.py", [f"model.path={adapters / 'policy'}", "lora.rank=1"]
    )
    assert "which has adapters, with config.lora; allowed: the folder of their model with" in (
        refusal(lambda: check_config(more))
    )


def test_adapters_without_a_tokenizer_have_that_of_their_model(adapters, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapters / "policy" / name, tmp_path / name)
    _, tokenizer = from_pretrained(tmp_path)
    _, of_the_model = from_pretrained(adapters / "model")
    assert tokenizer is not None
    assert tokenizer.action("the order") == of_the_model.action("the order")


@pytest.mark.parametrize("base", ["nowhere/model", "Qwen/Qwen3-0.6B", None, 5, "itself"])
def test_adapters_whose_model_is_not_here_are_one_sentence(adapters, tmp_path, base):
    shutil.copytree(adapters / "policy", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_config.json"
    base = str(tmp_path) if base == "itself" else base
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    text = refusal(lambda: from_pretrained(tmp_path))
    assert text.startswith(f"{file}: base_model_name_or_path is {base!r}; allowed: ")


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
