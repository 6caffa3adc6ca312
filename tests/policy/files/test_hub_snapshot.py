"""A model of the hub is a folder in the hub's cache, downloaded once, at one commit."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hub_stub import running_hub
from process_cases import environment
from run_cases import command, save_policy

from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.files.hub_snapshot import cached_snapshot, hub_revision, hub_snapshot
from seeupo_jax.policy.files.weights import from_pretrained, read_tokenizer, resolve_path
from seeupo_jax.policy.lora import TARGETS, attach_adapters, save_adapters

NAME = "team/agent"
RESOLVE = "import sys; from seeupo_jax.policy.files.weights import resolve_path as f;" + (
    "print(f(sys.argv[1]))"
)
CLOSED = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = save_policy(tmp_path_factory.mktemp("published") / "policy")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"the same weights")
    return folder


@pytest.fixture
def hub(policy, tmp_path, monkeypatch):
    with running_hub() as running:
        running.publish(NAME, policy)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        hub_snapshot.cache_clear()
        yield running
        hub_snapshot.cache_clear()


def test_processes_of_a_machine_download_each_file_that_is_read_once(hub, policy, tmp_path):
    line = [sys.executable, "-c", RESOLVE, NAME]
    started = [
        subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    answers = [each.communicate(timeout=120) for each in started]
    assert len({out for out, _ in answers}) == 1 and not any(p.returncode for p in started)
    read = {each.name for each in policy.iterdir() if each.suffix not in (".bin", "")}
    assert sorted(hub.sent) == sorted(read) and len(read) > 3
    # One of them: the other may find the snapshot begun.
    announced = f"team/agent is downloaded from {hub.url} (0.00 GB)".encode()
    assert any(announced in err for _, err in answers)
    (commit,) = hub.published[NAME]
    assert answers[0][0].decode().strip() == str(
        tmp_path / "cache" / "models--team--agent" / "snapshots" / commit
    )


def test_a_name_loads_the_model_and_the_tokenizer_of_its_folder(hub, policy):
    tokens = np.arange(12)[None]
    (got, tokenizer), (wanted, _) = from_pretrained(NAME), from_pretrained(policy)
    np.testing.assert_array_equal(got(tokens), wanted(tokens))
    assert tokenizer.encode("tea") == read_tokenizer(policy).encode("tea")


def test_a_revision_is_kept_and_the_newest_is_taken_without_one(hub, policy, tmp_path):
    (first,) = hub.published[NAME]
    assert hub_revision(NAME) == first
    second = hub.publish(NAME, policy)
    assert hub_revision(NAME) == first  # of this process's run
    hub_snapshot.cache_clear()
    assert hub_revision(NAME) == second and hub_revision(f"{NAME}@{first}") == first
    assert hub_revision(policy) is None and hub_revision(None) is None


def test_without_a_network_the_cache_is_read(hub, monkeypatch):
    assert cached_snapshot(NAME) is None
    folder = resolve_path(NAME)
    hub_snapshot.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    assert resolve_path(NAME) == folder == cached_snapshot(NAME)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("team/other", "RepositoryNotFoundError"),
        (f"{NAME}@v2", "RevisionNotFoundError"),
        (f"{NAME}@v3", "ConnectError"),
    ],
)
def test_what_cannot_be_downloaded_is_a_sentence_with_the_command(hub, monkeypatch, name, reason):
    if reason == "ConnectError":
        monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    with pytest.raises(ValueError) as error:
        resolve_path(name)
    text, revision = str(error.value), name.partition("@")[2]
    assert text.startswith(f"model path: got '{name}'; allowed: a folder with a config.json, a")
    assert reason in text and "\n" not in text
    option = f" --revision {revision}" if revision else ""
    assert f"`hf download {name.partition('@')[0]}{option} --local-dir {name}` writes" in text


def test_a_repository_without_a_model_in_its_folder_is_refused(hub, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text("nothing")
    hub.publish("team/data", tmp_path / "data")
    with pytest.raises(ValueError, match="got 'team/data'; allowed: a folder with a config.json"):
        resolve_path("team/data")


def test_adapters_per_turn_are_read_from_their_folders(hub, tmp_path):
    lora = LoraAdapters(rank=2, alpha=4.0, targets=TARGETS, per_turn=2)
    made = attach_adapters(from_pretrained(NAME)[0], lora)
    save_adapters(made, tmp_path / "turns", NAME, read_tokenizer(NAME))
    hub.publish("team/turns", tmp_path / "turns")
    model, tokenizer = from_pretrained("team/turns")
    assert model.arch.turn_adapters == 2 and tokenizer is not None
    hub_snapshot.cache_clear()
    assert cached_snapshot("team/turns") == resolve_path("team/turns")


@pytest.mark.exhaustive
def test_a_run_records_the_commit_and_its_adapters_name_their_model(hub, tmp_path):
    (commit,) = hub.published[NAME]
    workdir = tmp_path / "run"
    line = command(NAME, workdir, "--config.lora.rank=2", "--config.iterations=1")
    ended = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    record = json.loads((workdir / "run.json").read_text())
    assert record["model"]["name"] == NAME and record["model"]["revision"] == commit
    adapters = json.loads((workdir / "policy" / "adapter_config.json").read_text())
    assert (adapters["base_model_name_or_path"], adapters["revision"]) == (NAME, commit)
    hub.published[NAME] = {"0" * 40: {}}  # another newest commit, with nothing in it
    model, tokenizer = from_pretrained(workdir / "policy")
    assert model.arch.width == 32 and tokenizer is not None
