"""Adapters per turn as their users have them: trained, resumed, evaluated, exported and served."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
import run_cases
from loaded_python import LoadedPython
from metric_names import checked
from places import TINY
from process_cases import environment

from seeupo_jax.agents.served_address import KEY_VARIABLE
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import from_dict, load_config
from seeupo_jax.evaluation.frozen_roles import check_frozen_roles
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.lora import load_adapters
from seeupo_jax.policy.network import split_model, split_trainable
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.teachers import check_teachers
from seeupo_jax.supervised.sft_config import check_sft
from seeupo_jax.train_service.build_service import check_server
from seeupo_jax.training.checks import check_config

ADAPTERS = 3
CHOICES = (
    "--config.lora.rank=2",
    f"--config.lora.per_turn={ADAPTERS}",
    "--config.optimizer.name=adamw",
    "--config.optimizer.learning_rate=0.01",
)
KEY = "the-users.key"


def iterations(workdir):
    return [line for line in checked(read_metrics(workdir)) if "rollout/success_rate" in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The base model, and an undisturbed run."""
    folder = tmp_path_factory.mktemp("turns")
    base, workdir = run_cases.save_policy(folder / "model"), folder / "whole"
    run_cases.finish(run_cases.start(base, workdir, *CHOICES, "--config.iterations=3"))
    return base, workdir


def test_a_resumed_run_ends_with_the_same_bits(runs, tmp_path):
    base, whole = runs
    run_cases.finish(run_cases.start(base, tmp_path / "run", *CHOICES, "--config.iterations=2"))
    (printed,) = run_cases.finish(
        run_cases.start(base, tmp_path / "run", *CHOICES, "--config.iterations=3")
    )
    assert "resuming after iteration 2" in printed
    again, wanted = (
        [line["state/checksum"] for line in iterations(w)] for w in (tmp_path / "run", whole)
    )
    assert again == wanted and len(set(wanted)) == 3


def test_the_sampler_and_the_trainer_agree_and_the_cost_is_measured(runs):
    _, workdir = runs
    for line in iterations(workdir):
        assert line["logp/sampler_trainer_gap"] < 1e-4
        assert 0 < line["rollout/adapter_prefill_tokens"] < line["rollout/prefilled_tokens"]
        assert line["sweep/updates_skipped"] == 0


def test_the_exported_folders_are_the_checkpoints_adapters(runs):
    base, workdir = runs
    model, _ = from_pretrained(str(base), dtype="float32")
    adapted = load_adapters(model, workdir / "policy")
    assert adapted.arch.turn_adapters == ADAPTERS
    exported, _ = split_trainable(*split_model(adapted))
    checkpoints = Checkpoints(workdir / "checkpoints", 2)
    _, saved, _ = checkpoints.restore({"params": exported}, partial=True)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, exported, saved["params"])
    each = np.asarray(adapted.layers[0].mlp.down.lora_b[...])
    assert (np.abs(each).max(axis=(1, 2)) > 0).all()  # turns of all three have been trained
    assert (each[0] != each[1]).any() and (each[1] != each[2]).any()
    alone = json.loads((workdir / "policy/adapter_2/adapter_config.json").read_text())
    assert alone["base_model_name_or_path"] == str(base)


def test_an_exported_folder_is_trained_further(runs):
    base, workdir = runs
    path = [f"model.path={base}", f"lora.path={workdir / 'policy'}", "warm_start.stages=()"]
    config = load_config(TINY, [*path, f"lora.per_turn={ADAPTERS}", "model.param_dtype=bfloat16"])
    _, params = build.load_policy(config, str(base))
    wanted, _ = split_trainable(
        *split_model(load_adapters(from_pretrained(str(base))[0], workdir / "policy"))
    )
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    with pytest.raises(ValueError, match=r"lora.per_turn: got 2 with .* of 3 turns; allowed: 3\."):
        build.adapters_of(load_config(TINY, [*path, "lora.per_turn=2"]))


def test_it_is_refused_as_the_model_of_one_policy(runs):
    base, workdir = runs
    folder, mesh = str(workdir / "policy"), make_mesh(schema.Mesh())
    teacher = {"model": {"path": str(base)}, "teacher": {"path": folder}}
    roles = {"model": {"path": str(base)}, "roles": [{"name": "a"}, {"name": "b", "path": folder}]}
    model = {"model": {"path": folder}, "warm_start": {"stages": ()}}
    agent = model | {"agent": {"name": "seeupo_jax.agents.order_desk_agent:play"}}
    pair = model | {"roles": [{"name": "a"}, {"name": "b"}]}
    for played in (agent, pair):
        with pytest.raises(ValueError, match="model.path: got .*, which has 3 adapters per turn"):
            check_config(from_dict(played), ["test"])  # an evaluation's
    with pytest.raises(ValueError, match="model.path: got .*, which has 3 adapters per turn"):
        check_server(from_dict(model))
    further = {"model": {"path": str(base)}, "lora": {"path": folder}, "sft": {"data": "any"}}
    refusing = {
        "model.path": lambda: check_config(from_dict({"model": {"path": folder}})),
        "lora.path": lambda: check_sft(from_dict(further)),
        "teacher.path": lambda: check_teachers(from_dict(teacher), mesh, None),
        "roles[1].path": lambda: check_frozen_roles(from_dict(roles), mesh),
    }
    for field, check in refusing.items():
        said = f"config.{field}: got {folder!r}, which has 3 adapters per turn; allowed: "
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            check()


def test_a_run_and_its_exported_folder_are_evaluated_as_the_same_policy(runs, tmp_path):
    base, workdir = runs
    places = ((base, workdir, CHOICES), (workdir / "policy", tmp_path, ["--untrained"]))
    policies = []
    for number, (model, place, more) in enumerate(places):
        out = tmp_path / f"{number}.json"
        given = [*more, "--k=1", f"--json={out}"]
        run_cases.finish(run_cases.start(model, place, *given, module="evaluate"))
        values = json.loads(out.read_text())
        assert values["eval/tasks"] == 6 and values["iteration"] == (3, 0)[number]
        with open(values["episodes"], encoding="utf-8") as episodes:
            policies.append(json.loads(episodes.readline())["settings"]["policy"])
    assert policies[0] == policies[1]  # fingerprints of all parameters


def test_a_run_is_explained(runs, tmp_path):
    base, _ = runs
    (printed,) = run_cases.finish(run_cases.start(base, tmp_path / "new", *CHOICES, "--explain"))
    printed = " ".join(printed.split())
    assert f"in {ADAPTERS} adapters per turn, each of rank 2" in printed
    assert re.search(r"grows evenly to 128 tokens in \d+ turns is prefilled and scored as", printed)


@pytest.fixture(scope="module")
def client(runs):
    """Of a greedy server of the exported folder."""
    own = environment() | {KEY_VARIABLE: KEY}
    given = [f"--config={TINY}", f"--model={runs[1] / 'policy'}", "--port=0", "--temperature=0"]
    given += ["--config.rollout.tasks=1", "--config.warm_start.stages=()"]
    command = [sys.executable, "-m", "seeupo_jax.serve", *given]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = LoadedPython(command, env=own, **streams)
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
            yield made
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("turn", range(5))
def test_a_request_is_answered_under_the_adapter_of_its_turn(runs, client, turn):
    """The turn is the number of the assistant's messages before it."""
    model, tokenizer = from_pretrained(str(runs[1] / "policy"), dtype="float32")
    messages = [{"role": "user", "content": "order 1: again"}]
    for number in range(turn):
        messages += [
            {"role": "assistant", "content": f"say {number}"},
            {"role": "user", "content": "you said so"},
        ]
    (name,) = [model.id for model in client.models.list()]
    done = client.chat.completions.create(
        model=name, messages=messages, logprobs=True, max_tokens=4
    )
    got = [token.logprob for token in done.choices[0].logprobs.content]
    tokens, wanted = list(tokenizer.begin(messages, ()).tokens), []
    for _ in got:
        logits_V = np.asarray(model(jnp.asarray([tokens]), turn=turn))[0, -1].astype(np.float64)
        tokens.append(int(logits_V.argmax()))
        wanted.append(logits_V.max() - np.log(np.exp(logits_V).sum()))
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_a_context_that_is_no_conversation_is_refused(client):
    (name,) = [model.id for model in client.models.list()]
    with pytest.raises(
        openai.BadRequestError, match="prompt: got one for a policy with 3 adapters"
    ):
        client.completions.create(model=name, prompt="order 1", max_tokens=2)
