"""An exported policy goes to the hub with a card that has the run's figures."""

import json
import re
import socket

import pytest
import yaml
from hub_stub import READ_ONLY, TOKEN, running_hub
from places import TINY

from seeupo_jax import export
from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.errors import WriteError
from seeupo_jax.policy_io.hub import hub_client, model_card, push

EVALUATIONS = [
    {"iteration": 0, "eval/avg@4": 0.39, "eval/avg@4_low": 0.35, "eval/avg@4_high": 0.43}
    | {"eval/tasks": 4},
    {"iteration": 1, "rollout/success_rate": 0.5},
    {"iteration": 2, "eval/avg@4": 0.75, "eval/pass@4": 0.875, "eval/tasks": 64},
    {"iteration": 4, "eval/avg@4": 0.99},
]
MANIFEST = {
    "command": ["seeupo-train", "--config=package:quickstart"],
    "began": "2026-01-02T03:04:05+00:00",
    "versions": {"python": "3.11.7", "jax": "0.10.2", "seeupo_jax": "0.1.0", "numpy": "2"},
    "devices": {"platform": "cpu", "count": 1},
}


@pytest.fixture(scope="module")
def hub():
    with running_hub() as running:
        yield running


@pytest.fixture
def place(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def workdir(tmp_path):
    lines = "".join(json.dumps(line) + "\n" for line in EVALUATIONS)
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "run.json").write_text(json.dumps(MANIFEST))
    return tmp_path


def a_config(**fields):
    return from_dict({"model": {"path": "package:order_desk"}, **fields})


def test_the_card_has_the_first_evaluation_and_that_of_the_exported_policy(workdir):
    card = model_card(a_config(recipe="grpo"), workdir, 2, "params", "someone/agent")
    _, head, body = card.split("---\n", 2)
    values = yaml.safe_load(head)
    assert values["library_name"] == "transformers" and "seeupo_jax" in values["tags"]
    (index,) = values["model-index"]
    (result,) = index["results"]
    assert index["name"] == "agent"
    assert [(m["type"], m["value"]) for m in result["metrics"]] == [("avg@4", 0.75)]
    assert result["dataset"]["name"] == "order_desk"
    assert result["dataset"]["split"] == "test"
    table = "| 0 | 4 | 0.39 [0.35, 0.43] | - |\n| 2 | 64 | 0.75 | 0.88 |\n"
    assert table in body and "0.99" not in body and "selected" not in body
    assert "`grpo`" in body and "| command | seeupo-train --config=package:quickstart |" in body
    assert "| versions | python 3.11.7, seeupo_jax 0.1.0, jax 0.10.2 |" in body


def test_settings_and_splits_of_the_card_are_the_runs_own(workdir):
    own = a_config(
        recipe="grpo",
        optimizer={"learning_rate": 0.25},
        seed=7,
        iterations=11,
        evaluation={"split": "validation"},
    )
    (workdir / "run.json").write_text(json.dumps(MANIFEST | {"config": to_dict(own)}))
    given = a_config(evaluation={"k": 2}, env={"name": "bfcl"}, lora={"rank": 2})
    card = model_card(given, workdir, 2, "params", "agent")
    assert card == model_card(own, workdir, 2, "params", "agent").replace("transformers", "peft")
    for text in ("`grpo`", "learning rate 0.25", "| seed | 7 |", "`validation` of `order_desk`"):
        assert text in card
    values = yaml.safe_load(card.split("---\n")[1])
    assert values["model-index"][0]["results"][0]["dataset"]["split"] == "validation"
    assert "| iterations planned | 11 |" in card and "value: 0.75" in card


def test_the_card_names_what_changed_when_the_run_resumed(workdir):
    changes = {"config.optimizer.learning_rate": {"before": 1e-3, "after": 3e-4}}
    resumed = [
        "2026-01-02T03:04:05+00:00",
        {"at": "then", "after": 2, "in_sweep": False, "changes": changes},
        {"at": "later", "after": 2, "in_sweep": False, "changes": {"versions.jax": {"after": "1"}}},
        {"at": "last", "after": 3, "in_sweep": False, "changes": {}},
    ]
    (workdir / "run.json").write_text(json.dumps(MANIFEST | {"resumed": resumed}))
    card = model_card(a_config(), workdir, 2, "params", "agent")
    row = "| changed on resuming after 2 | config.optimizer.learning_rate: 0.001 -> 0.0003;"
    assert f"{row} versions.jax: - -> 1 |" in card
    assert card.count("changed on resuming") == 1


def test_figures_of_the_card_are_of_as_many_episodes_as_in_the_last_evaluation(workdir):
    """A resumed run may have another evaluation.k than before, or than its run.json."""
    later = {"iteration": 3, "eval/avg@8": 0.625, "eval/tasks": 64, "eval/selected_on": 1.0}
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(later) + "\n")
    card = model_card(a_config(), workdir, 3, "params", "agent")
    values = yaml.safe_load(card.split("---\n")[1])
    (metric,) = values["model-index"][0]["results"][0]["metrics"]
    assert (metric["type"], metric["value"]) == ("avg@8", 0.625)
    table = "| iteration | tasks | avg@8 | pass@8 |\n| --- | --- | --- | --- |\n"
    assert f"{table}| 3 | 64 | 0.62 | - |\n\n" in card and "8 episodes per task" in card
    assert "best checkpoint is selected on this split too: its figure here is biased up" in card


def test_a_paper_is_linked_for_its_recipes_only(workdir):
    link = "([SeeUPO](https://arxiv.org/abs/2602.06554))"
    for recipe, linked in (("seeupo", 1), ("seeupo_forward", 1), ("grpo", 0), ("gigpo", 0)):
        card = model_card(a_config(recipe=recipe), workdir, 2, "params", "agent")
        assert f"`{recipe}`" in card and card.count(link) == linked


@pytest.mark.parametrize(
    "step, part, evaluated, figures",
    [
        (2, "params", False, None),
        (3, "params", False, "iteration 2."),
        (2, "params", True, "iteration 2, of the averaged parameters."),
        (3, "ema", True, "iteration 2, of the averaged parameters."),
        (2, "ema", True, None),
    ],
)
def test_a_value_of_the_metadata_is_of_this_very_policy(workdir, step, part, evaluated, figures):
    """Otherwise the card says whose the figures are."""
    averaged = [line | ({"eval/ema": 1.0} if evaluated else {}) for line in EVALUATIONS]
    lines = "".join(json.dumps(line) + "\n" for line in averaged)
    (workdir / "metrics.jsonl").write_text(lines)
    card = model_card(a_config(optimizer={"ema": 0.9}), workdir, step, part, "agent")
    values = yaml.safe_load(card.split("---\n")[1])
    assert ("model-index" in values) == (figures is None)
    said = re.findall(
        r"This very policy was not evaluated: the last figures are those of (.*)", card
    )
    assert said == ([] if figures is None else [figures])


def test_a_supervised_run_has_a_card_of_its_own(tmp_path):
    losses = [(0, "eval/loss", 0.9), (1, "sft/loss", 0.5), (2, "eval/loss", 0.25)]
    losses += [(3, "sft/loss", 0.2), (4, "eval/loss", 0.125)]
    lines = (json.dumps({"iteration": step, name: loss}) + "\n" for step, name, loss in losses)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    config = a_config(sft={"data": "talks.jsonl", "batch_size": 4})
    card = model_card(config, tmp_path, 2, "params", "agent")
    values = yaml.safe_load(card.split("---\n")[1])
    assert "sft" in values["tags"] and "reinforcement-learning" not in values["tags"]
    assert "after step 2 of supervised fine-tuning" in card and "recipe" not in card
    assert "| 0 | 0.9000 |\n| 2 | 0.2500 |\n" in card and "0.1250" not in card
    assert "| data | talks.jsonl |" in card and "iterations planned" not in card


def test_a_run_without_records_has_a_card_that_says_so(tmp_path):
    adapters = a_config(lora={"rank": 2})
    card = model_card(adapters, tmp_path, 3, "params", "agent")
    values = yaml.safe_load(card.split("---\n")[1])
    assert values["library_name"] == "peft" and "model-index" not in values
    assert "| none was recorded |  |  |  |" in card and "after iteration 3" in card


def test_a_folder_is_uploaded_to_a_repository_that_is_made(place, tmp_path):
    (tmp_path / "README.md").write_text("# A\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    client = hub_client("team/agent")
    assert push(client, tmp_path, "team/agent", private=True) == f"{place.url}/team/agent"
    assert place.repositories["team/agent"] is True
    assert place.files["README.md"] == b"# A\n"
    assert place.files["model.safetensors"] == bytes(range(256)) * 64
    assert push(client, tmp_path, "team/agent", private=True)  # once more, onto what is there


def test_the_command_refuses_before_it_exports(place, tmp_path, monkeypatch, capsys):
    line = [f"--config={TINY}", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}"]

    def refusal(*more, code=2):
        with pytest.raises(SystemExit) as ended:
            export.main(["export", *line, *more])
        assert ended.value.code == code and not (tmp_path / "out").exists()
        text = capsys.readouterr().err
        assert text.startswith("error: ") and text.count("\n") == 1
        return text

    assert "--private: got True; allowed: with --push_to_hub" in refusal("--private")
    assert "--push_to_hub: got 'a/b/c'; allowed: a name as" in refusal("--push_to_hub=a/b/c")
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    assert f"{place.url} did not take the token: " in refusal("--push_to_hub=a/b")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert "ConnectError" in refusal("--push_to_hub=a/b", code=1)


def test_a_hub_that_is_switched_off_is_one_sentence(place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WriteError, match="--push_to_hub: .* did not take the token: Offline"):
        hub_client("a/b")


def test_a_token_is_needed(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/dev/null")
    with pytest.raises(ValueError, match="--push_to_hub: got no token; allowed: .* in HF_TOKEN"):
        hub_client("a/b")


def test_a_token_that_may_not_write_is_named_with_what_is_complete(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", READ_ONLY)
    client = hub_client("a/read")
    with pytest.raises(ValueError, match=f"a/read could not be written .*; {tmp_path} is complete"):
        push(client, tmp_path, "a/read", private=False)
    assert "a/read" not in place.repositories
