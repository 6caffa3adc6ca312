"""A new project is complete: its files are clean, its tests pass, and its training runs."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from chat_cases import small_library
from flax import nnx
from loaded_python import LoadedPython
from openai.types.chat import ChatCompletion
from places import ROOT
from process_cases import environment
from run_cases import save_policy

from seeupo_jax.agents.served_address import KEY_VARIABLE
from seeupo_jax.cli.project import write_project
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.schema import Chat
from seeupo_jax.init import main
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.training.checks import check_config

LESS = (  # of a training: what shows that the project runs
    "--config.warm_start.stages=({'steps': 4},)",
    "--config.iterations=1",
    "--config.rollout.tasks=1",
    "--config.rollout.group_size=2",
    "--config.rollout.max_action_tokens=8",
    "--config.evaluation.tasks=1",
    "--config.evaluation.k=1",
    "--config.checkpoint.every=0",
)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """The folder that a project was written into."""
    parent = tmp_path_factory.mktemp("parent")
    assert write_project("lockers", parent) == parent / "lockers"
    return parent


def python(parent, *arguments):
    """A run of Python in that folder."""
    line = [sys.executable, "-m", *arguments]
    return subprocess.run(
        line, cwd=parent, env=environment(), capture_output=True, text=True, timeout=900
    )


def test_its_files_are_clean_and_bear_its_name(parent):
    for check in ("check", "format --check"):
        settings = f"--config={ROOT / 'pyproject.toml'}"
        done = python(parent, "ruff", *check.split(), "--no-cache", settings, "lockers")
        assert done.returncode == 0, done.stdout + done.stderr
    texts = {file.name: file.read_text() for file in (parent / "lockers").iterdir()}
    assert {"README.md", "client.py", "config.py", "tasks.jsonl"} <= texts.keys()
    assert not any("PROJECT" in text for text in texts.values())
    assert "--config=lockers/config.py --workdir=runs/lockers" in texts["README.md"]


def test_its_tests_pass(parent):
    done = python(parent, "pytest", "lockers", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout


def commands(text):
    """The lines of a page's blocks that name the project's configuration, without continuations."""
    blocks = re.findall(r"```(?:ba)?sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if "--config=" in line]


def test_the_commands_of_its_pages_pass_every_check(parent, monkeypatch):
    """With small policies at the places of those that are downloaded, or trained by a command."""
    monkeypatch.chdir(parent)
    (parent / "third_party").symlink_to(ROOT / "third_party")
    for place in ("Qwen/Qwen3-0.6B", "runs/lockers_sft/policy"):
        save_policy(parent / place)
    pages = [(parent / "lockers" / "README.md"), ROOT / "docs" / "project.md"]
    lines = [line for page in pages for line in commands(page.read_text())]
    assert {line[0] for line in lines} == {
        f"seeupo-{name}" for name in ("train", "evaluate", "sft", "serve")
    }
    given = {tuple(flag for flag in line if flag.startswith("--config")) for line in lines}
    models = set()
    for file, *fields in given:
        overrides = [flag.removeprefix("--config.") for flag in fields]
        config = load_config(file.removeprefix("--config="), overrides)
        check_config(config)
        models.add(config.model.path)
    assert len(models) == 4


@pytest.mark.exhaustive
def test_its_training_is_explained_runs_and_is_evaluated(parent):
    given = ("--config=lockers/config.py", "--workdir=runs/lockers", *LESS)
    explained = python(parent, "seeupo_jax.train", *given, "--explain")
    assert explained.returncode == 0, explained.stderr
    assert "environment.py:Lockers" in explained.stdout and "160" in explained.stdout
    trained = python(parent, "seeupo_jax.train", *given)
    assert trained.returncode == 0, trained.stderr
    workdir = parent / "runs" / "lockers"
    metrics = list(map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()))
    (iteration,) = [line for line in metrics if "rollout/success_rate" in line]
    assert 0 <= iteration["rollout/executed_fraction"] <= 1
    assert "rollout/reward/few_mistakes" in iteration
    assert (workdir / "policy" / "model.safetensors").is_file()
    evaluated = python(parent, "seeupo_jax.evaluate", *given)
    assert evaluated.returncode == 0 and "avg@1" in evaluated.stdout, evaluated.stderr


def test_its_client_executes_the_calls_of_an_agent(parent, monkeypatch):
    """The agent is one that solves the task; what it is asked is what the server would read."""
    monkeypatch.syspath_prepend(parent / "lockers")
    for name in ("client", "environment"):
        monkeypatch.setitem(sys.modules, name, None)  # as it was, afterwards
        del sys.modules[name]
    client = importlib.import_module("client")
    lockers, asked = importlib.import_module("environment").Lockers(), []
    solution = iter(lockers.solution("test/3"))

    def create(*, model, messages, tools):
        asked.append([*messages])
        call = next(solution)
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls = [{"id": f"call_{len(asked)}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        kind = {"object": "chat.completion", "created": 0}
        return ChatCompletion.model_validate(
            kind | {"id": "1", "model": model, "choices": [choice]}
        )

    completions = SimpleNamespace(create=create)
    agent = SimpleNamespace(chat=SimpleNamespace(completions=completions))
    messages, score = client.play(agent, "test/3")
    assert score == 1.0 and [message["role"] for message in messages] == [
        *("user", "assistant", "tool", "assistant", "tool")
    ]
    code = lockers.tasks["test/3"]["code"]
    answer = {"role": "tool", "name": "find", "content": f"The code is {code}."}
    assert asked[1][-1] == answer | {"tool_call_id": "call_1"}


SHORT = (  # for a chat model of a test: as little of every command as shows that it works
    "--config.rollout.tasks=1",
    "--config.rollout.group_size=2",
    "--config.rollout.max_turns=2",
    "--config.rollout.max_action_tokens=8",
    "--config.rollout.max_context=2048",  # a tokenizer without words: letters
    "--config.evaluation.tasks=1",
    "--config.evaluation.k=1",
    "--config.checkpoint.every=0",
    "--config.iterations=1",
    "--config.sft.steps=2",
    "--config.sft.batch_size=2",
)


def save_chat_model(folder):
    """A random network whose tokenizer has a chat template: Qwen3's, with a listing of tools."""
    library = small_library()
    tokenizer = HuggingFaceTokenizer(library, Chat(), generation={}, where="a test")
    arch = Architecture(
        vocab_size=len(library), width=32, layers=1, heads=2, kv_heads=2, head_dim=16, mlp_width=64
    )
    save_pretrained(Transformer(arch, nnx.Rngs(0)), folder, tokenizer)


@pytest.mark.exhaustive
def test_a_chat_model_is_fine_tuned_trained_served_and_asked(tmp_path):
    """The commands of the page on a project of its own, and a client of what it serves."""
    write_project("lockers", tmp_path)
    save_chat_model(tmp_path / "model")
    page = (ROOT / "docs" / "project.md").read_text().partition("\n## A chat model\n")[2]
    (block,) = (each for each in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "sft" in each)
    *trained, served = commands(f"```sh\n{block}```")
    assert [line[0] for line in trained] == ["seeupo-sft", "seeupo-train", "seeupo-evaluate"]
    for name, *flags in trained:
        more = ("--config.model.path=model",) if name == "seeupo-sft" else ()
        module = name.replace("-", "_jax.")
        done = python(tmp_path, module, *flags, *SHORT, *more)
        assert done.returncode == 0, f"{name}: {done.stderr}"
    assert "avg@1" in done.stdout

    line = [sys.executable, "-m", served[0].replace("-", "_jax."), *served[1:], "--port=0", *SHORT]
    own = environment() | {KEY_VARIABLE: "secret"}
    with (tmp_path / "log").open("w") as log:
        server = LoadedPython(
            line, cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        url = re.search(r"http://\S+", server.stdout.readline())[0]
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "secret"}
        asked = subprocess.run(
            [sys.executable, "lockers/client.py", "test/1"],
            cwd=tmp_path,
            env=environment() | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        server.kill()
        server.communicate()
    assert asked.returncode == 0, asked.stderr
    first, *_, score = asked.stdout.splitlines()
    assert json.loads(first)["role"] == "user" and score == "score: 0"


@pytest.mark.parametrize("name", ["", "../x", "a/b", "1st", "a-b", "a b", ".", "ä", "x" * 65])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="NAME: got .*; allowed: a letter and then letters"):
        write_project(name, tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.py").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(["seeupo-init", "mine"])
    assert ended.value.code == 2
    sentence = "error: NAME: got 'mine', which is here already; allowed: a new folder.\n"
    assert capsys.readouterr().err == sentence
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["config.py"]
    (tmp_path / "empty").mkdir()
    for name, more in (("empty", []), ("new", ["--into=a/b"])):
        main(["seeupo-init", name, *more])
        assert f"seeupo-train --config={name}/config.py" in capsys.readouterr().out
    assert (tmp_path / "empty/config.py").is_file() and (tmp_path / "a/b/new/config.py").is_file()


def test_the_command_needs_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["seeupo-init"])
    assert ended.value.code == 2 and "error: NAME: got none; allowed" in capsys.readouterr().err
