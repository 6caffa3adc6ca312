"""A chat template that lacks a role of the run is refused before anything is compiled."""

import importlib
import json
import shutil

import chat_cases as cases
import pytest
from flax import nnx
from format_cases import ARGUMENTS, CHAT, LISTS, NAME
from places import CONFIGS
from refusals import refusal
from run_environment import Echo

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.envs.base import StepResult
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.training.checks import check_config, check_sampling

CONFIG = CONFIGS / "quickstart.py"
LOST = "chat template: it does not write messages of the role tool; allowed: config.chat.roles="
MAPPED = "chat.roles={'tool': 'user'}"


class UserOnly(Echo):
    """An environment that answers as the user."""

    def step(self, text):
        step = super().step(text)
        answer = tuple({**message, "role": "user"} for message in step.observation)
        return StepResult(answer, step.reward, step.done)


class ListsTools(UserOnly):
    """As `UserOnly`, with a tool, whose reply no first word brings about."""

    def reset(self, task_id, seed):
        messages, _ = super().reset(task_id, seed)
        return messages, ({"name": "find", "parameters": {"properties": {}}},)


class Fails(Echo):
    """An environment of which no step succeeds."""

    def step(self, text):
        raise ConnectionError("no server")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random model whose template has no branch for tools."""
    folder = tmp_path_factory.mktemp("zephyr")
    library = cases.small_library()
    arch = Architecture(len(library), 32, 1, 2, 2, 16, 64)
    save_pretrained(Transformer(arch, nnx.Rngs(0)), folder)
    library.chat_template = cases.DROPS_TOOLS
    library.save_pretrained(folder)
    return folder


def load(model, *overrides, env=None):
    named = [] if env is None else [f"env.name={__name__}:{env}", "env.options={}"]
    return load_config(CONFIG, [f"model.path={model}", "chat.tools=auto", *named, *overrides])


def test_an_environment_that_answers_as_a_tool_is_refused(model):
    assert refusal(lambda: check_config(load(model))).startswith(LOST)
    assert refusal(lambda: check_config(load(model, env="ListsTools"))).startswith(LOST)
    check_config(load(model, MAPPED))


@pytest.mark.parametrize("env", ["UserOnly", "Fails"])
def test_a_role_that_the_environment_does_not_send_is_no_reason(model, env):
    check_config(load(model, env=env))


def test_of_agents_and_clients_any_role_may_come(model, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "a"}\n{"task_id": "b", "split": "test"}\n')
    agent = [f"agent.tasks={tasks}", "agent.command=true"]
    assert refusal(lambda: check_config(load(model, *agent))).startswith(LOST)
    assert refusal(lambda: check_sampling(load(model))).startswith(LOST)
    check_sampling(load(model, MAPPED))


STRANGE = CHAT.format(begin="", call=f"call:{NAME}{ARGUMENTS}", end="", header="", tools=LISTS)


@pytest.fixture(scope="module")
def strange(model, tmp_path_factory):
    """The same model with a template that writes calls in no known format."""
    folder = tmp_path_factory.mktemp("strange")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    library = cases.small_library(STRANGE)
    library.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("tool_format", "sentence"),
    [
        ("auto", "config.agent.tool_format: got 'auto' with a chat template that lists tools and"),
        ("harmony", "config.agent.tool_format: got 'harmony' for a tokenizer without the control"),
        ("pixtral", "config.agent.tool_format: got 'pixtral'; allowed: one of auto, hermes,"),
        ("glm", None),
    ],
)
def test_a_tool_format_that_does_not_fit_the_model_is_refused(
    tool_format, sentence, strange, tmp_path
):
    """In one sentence, before the model's weights are read or anything is compiled."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "a"}\n{"task_id": "b", "split": "test"}\n')
    agent = [f"agent.tasks={tasks}", "agent.command=true", f"agent.tool_format={tool_format}"]
    if sentence is None:
        check_config(load(strange, *agent))
        return
    told = refusal(lambda: check_config(load(strange, *agent)))
    assert told.startswith(sentence) and told.endswith(".")
    if tool_format != "pixtral":
        assert refusal(
            lambda: check_sampling(load(strange, f"agent.tool_format={tool_format}"))
        ) == (told)


@pytest.mark.parametrize("command", ["train", "evaluate", "serve", "sft"])
@pytest.mark.parametrize("explain", [(), ("--explain",)])
def test_every_command_says_so_in_one_line(command, explain, model, tmp_path, capsys):
    data, run = tmp_path / "data.jsonl", f"--workdir={tmp_path / 'run'}"
    talk = [{"role": role, "content": role} for role in ("user", "assistant", "tool", "assistant")]
    data.write_text(json.dumps({"messages": talk}) + "\n")
    flags = {
        "serve": ["--port=0"],
        "sft": [run, f"--data={data}", *explain],
    }.get(command, [run, *explain])
    line = [command, f"--config={CONFIG}", f"--config.model.path={model}", *flags]
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"seeupo_jax.{command}").main(line)
    told = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    place = f"--data: {data}, line 1: " if command == "sft" else ""
    assert told.startswith(f"error: {place}{LOST}")
    assert not list(tmp_path.glob("run/*"))
