"""Harnesses in sandboxes: what each finds there, and the real programs on bundled tasks."""

import queue
import shlex
import shutil

import pytest
from places import ROOT
from sandbox_cases import needs_bubblewrap
from scripted_harness import calls_of, check_episode, play, processes_of, set_up

from seeupo_jax.agents.calls import Access, AgentResult, AgentTask
from seeupo_jax.agents.harnesses.table import HARNESSES
from seeupo_jax.agents.runners.command_agents import CommandAgents, program_words
from seeupo_jax.agents.sandboxes.sandboxes import Sandboxes
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.sandbox_schema import Sandbox
from seeupo_jax.configuration.schema import Rollout
from seeupo_jax.tasks.task_folders import TaskFolders, find_folder

pytestmark = needs_bubblewrap
BUNDLED = "harbor:package:sandboxed_tasks"
# A program in the place of a harness's own, which does what its instruction says in `sh`.
PROGRAM = """#!/bin/sh
for last; do :; done
eval "$last"
"""


def copy_task(folder, name="fix_sum", instruction=None):
    """A bundled task, alone in a folder; with another instruction if one is given."""
    shutil.copytree(find_folder(BUNDLED) / "train" / name, folder / name)
    if instruction is not None:
        (folder / name / "instruction.md").write_text(instruction)
    return folder


def played(tmp_path, harness, instruction):
    """What a program in the place of a harness's own comes to."""
    program = tmp_path / HARNESSES[harness].program
    program.write_text(PROGRAM)
    program.chmod(0o755)
    tasks = TaskFolders(copy_task(tmp_path / "tasks", instruction=instruction), local=True)
    agent = Agent(harness=harness, command=shlex.quote(str(program)))
    words, rollout = program_words(agent), Rollout(max_context=4096, max_action_tokens=512)
    limits = {"memory_mib": None, "output_kib": 64, "max_reward": 1.0}
    sandboxes = Sandboxes(Sandbox(), tasks, words, agent, rollout)
    agents, ended = (
        CommandAgents(words, model="policy", sandboxes=sandboxes, **limits),
        queue.Queue(),
    )
    task = AgentTask("fix_sum", "train", tasks.data("fix_sum", "train"), 0, 0, 4)
    agents.start(task, Access("http://127.0.0.1:9/v1", "the-key"), ended.put)
    result = ended.get(timeout=120)
    agents.close()
    assert isinstance(result, AgentResult), result
    return result


def test_a_harness_finds_its_configuration_in_the_sandboxs_home(tmp_path):
    look = "echo $HOME $PWD $OPENAI_API_KEY $OPENAI_BASE_URL.; cat ~/.codex/config.toml"
    result = played(tmp_path, "codex", f"{look}; bash -c \"sed -i 's/- /+ /' add.sh\"")
    first, *config = result.info["output"].splitlines()
    assert first == "/root /app the-key ."  # the address is in its configuration alone
    assert 'base_url = "http://127.0.0.1:7411/v1"' in config
    assert "model_context_window = 4096" in config
    assert result.reward == 1.0


def test_a_harness_gets_its_variables_and_no_other_ones_of_harnesses(tmp_path, monkeypatch):
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "the user's")
    result = played(tmp_path, "claude_code", "env")
    seen = dict(line.split("=", 1) for line in result.info["output"].splitlines())
    assert seen["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:7411"
    assert (seen["ANTHROPIC_API_KEY"], seen["ANTHROPIC_MODEL"]) == ("the-key", "policy")
    assert "CLAUDE_CODE_USE_BEDROCK" not in seen and "OPENAI_API_KEY" not in seen
    assert seen["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "512"


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", sorted(HARNESSES))
def test_the_real_program_solves_a_bundled_task_in_its_sandbox(harness, tmp_path, monkeypatch):
    set_up(harness, monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where episodes have their folders
    commands = (
        f"ls -d {ROOT}/tests /tests; ls /",
        "sed -i 's/- \\$2/+ $2/' /app/add.sh",
        'setsid sleep 1000 >/dev/null 2>&1 & echo "sum $(sh /app/add.sh 2 3)"',
    )
    config = from_dict(
        {
            "tasks": f"harbor:{copy_task(tmp_path / 'tasks')}",
            "agent": {"harness": harness, "timeout_s": 900.0},
            "sandbox": {"memory_mib": 4096, "timeout_scale": 10.0},
            "rollout": {"max_turns": 8, "max_action_tokens": 2048, "max_context": 200_000},
        }
    )
    trajectory, said = play(config, calls_of(harness, commands))
    check_episode(trajectory, said, turns=4)
    texts = [str(message["content"]) for message in trajectory.messages]
    assert any("cannot access" in text and "logs" in text for text in texts), texts
    assert any("sum 5" in text for text in texts), texts[-3:]
    assert processes_of(tmp_path) == []
