"""How each harness is started, and how an episode of one is played and checked."""

import json
import os
import queue
import shlex
import tomllib
from pathlib import Path

import pytest
from places import ROOT

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.agents.calls import Access, AgentTask
from seeupo_jax.agents.harnesses.harness import PolicyAccess
from seeupo_jax.agents.harnesses.harness_task import read_harness_task
from seeupo_jax.agents.harnesses.table import HARNESSES
from seeupo_jax.agents.runners.command_agents import CommandAgents, agent_words
from seeupo_jax.configuration.agent_schema import HARNESS_NAMES, Agent
from seeupo_jax.configuration.loading import from_dict, load_config
from seeupo_jax.training.checks import check_config

ACCESS = PolicyAccess("http://127.0.0.1:9/v1", "the-key", "policy", 4096, 512)
HOME = Path("/home/of/the/episode")
TASK = {"instruction": "-v: say 2", "check": "grep -qx 2 a.txt", "files": {"a.txt": "1\n"}}


def test_the_configuration_names_the_harnesses_of_the_table():
    assert sorted(HARNESS_NAMES) == sorted(HARNESSES)


@pytest.mark.parametrize("name", HARNESSES)
def test_each_gets_the_instruction_the_key_and_the_address(name):
    launch = HARNESSES[name].launch(TASK["instruction"], ACCESS, HOME)
    assert TASK["instruction"] in launch.words[-1]
    assert "the-key" in launch.env.values()
    told = [*launch.env.values(), *launch.files.values()]
    assert any("http://127.0.0.1:9" in text for text in told)
    assert not any("the-key" in text for text in (*launch.words, *launch.files.values()))


def test_the_files_of_each_are_what_it_reads():
    made = {name: each.launch("go", ACCESS, HOME).files for name, each in HARNESSES.items()}
    codex = tomllib.loads(made["codex"][".codex/config.toml"])
    assert codex["model_providers"]["policy"]["base_url"] == ACCESS.base_url
    assert (codex["model_context_window"], codex["analytics"]["enabled"]) == (4096, False)
    opencode = json.loads(made["opencode"][".config/opencode/opencode.json"])
    limit = opencode["provider"]["policy"]["models"]["policy"]["limit"]
    assert limit == {"context": 4096, "output": 512} and opencode["autoupdate"] is False
    qwen = json.loads(made["qwen_code"][".qwen/settings.json"])
    generation = qwen["model"]["generationConfig"]
    assert (generation["contextWindowSize"], generation["maxRetries"]) == (4096, 0)
    assert not qwen["privacy"]["usageStatisticsEnabled"]


# A program in the place of a harness's own, which does what its instruction says in `sh`.
PROGRAM = """#!/bin/sh
for last; do :; done
eval "$last"
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    file = tmp_path_factory.mktemp("program") / "claude"
    file.write_text(PROGRAM)
    file.chmod(0o755)
    return file


def ends(program, task):
    """What an episode comes to."""
    agent = Agent(harness="claude_code", command=shlex.quote(str(program)), tasks="T")
    words = agent_words(agent, max_context=4096, max_answer=512)
    limits = {"memory_mib": None, "output_kib": 64, "max_reward": 1.0}
    agents, ended = CommandAgents(words, model="policy", **limits), queue.SimpleQueue()
    try:
        access = Access("http://127.0.0.1:9/v1", "the-key")
        agents.start(AgentTask("t", "train", task, 0, 0, 4), access, ended.put)
        return ended.get(timeout=300)
    finally:
        agents.close()


def test_a_task_is_solved_if_its_check_succeeds(program):
    result = ends(program, TASK | {"instruction": "echo 2 > a.txt; exit 3"})
    assert (result.reward, result.score) == (1.0, 1.0)
    assert result.info["harness_exit_code"] == 3  # its own opinion does not count
    result = ends(program, TASK | {"instruction": "true", "check": "echo no; false"})
    assert (result.reward, result.info["check_output"]) == (0.0, "no\n")


def test_a_harness_that_fails_counts_only_after_an_answer(program):
    failure = ends(program, TASK | {"instruction": "exit 5"})
    assert failure.cause == "exit" and failure.answered.reward == 0.0
    assert "the harness ended with exit code 5" in failure.reason


def test_the_check_has_its_own_files_whatever_the_harness_wrote(program):
    task = {"check": "sh check.sh", "check_files": {"check.sh": "exit 1\n"}}
    assert ends(program, {"instruction": "echo exit 0 > check.sh"} | task).reward == 0.0


def test_a_link_in_the_place_of_a_checks_file_is_not_followed(program, tmp_path):
    other = tmp_path / "other"
    other.write_text("as it was")
    task = {"check": "grep -qx new check.sh", "check_files": {"check.sh": "new\n"}}
    assert ends(program, {"instruction": f"ln -s {other} check.sh"} | task).reward == 1.0
    assert other.read_text() == "as it was"


def test_the_harness_finds_neither_the_check_nor_the_place_of_the_result(program):
    task = TASK | {"instruction": "cp ../task.json . ; env | grep SEEUPO_ > env; ls -A > all"}
    result = ends(program, task | {"check": "cat all env; false"})
    assert result.info["check_output"] == "a.txt\nall\nenv\n"


def test_a_folder_is_copied_and_stays_as_it_was(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given" / "sub").mkdir(parents=True)
    (tmp_path / "given" / "sub" / "a.txt").write_text("1")
    task = {"instruction": "echo 2 > sub/a.txt", "check": "grep 2 sub/a.txt", "folder": "given"}
    assert ends(program, task).reward == 1.0
    assert (tmp_path / "given" / "sub" / "a.txt").read_text() == "1"


def test_settings_and_credentials_of_the_user_are_not_seen(program, tmp_path, monkeypatch):
    left = tmp_path / "left"
    for name in ("CLAUDE_CODE_USE_BEDROCK", "ANTHROPIC_MODEL", "XDG_CONFIG_HOME", "QWEN_HOME"):
        monkeypatch.setenv(name, "the user's")
    # As the program got them: `sh` corrects PWD, in which opencode works.
    ends(program, TASK | {"instruction": f"cat /proc/$$/environ > {left}; pwd > {left}.pwd"})
    seen = dict(each.split("=", 1) for each in left.read_text().split("\0") if "=" in each)
    assert seen["PWD"] == Path(f"{left}.pwd").read_text().strip() != os.getcwd()
    assert "the user's" not in seen.values() and seen["HOME"] != os.environ["HOME"]
    assert seen["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert (seen["ANTHROPIC_API_KEY"], seen["ANTHROPIC_MODEL"]) == ("the-key", "policy")


EXAMPLES = ROOT / "docs" / "examples" / "agents"
SOLUTIONS = {
    "train/two": "echo 2 > a.txt",
    "train/rename": "mv notes.md README.md",
    "train/sort": "sort names.txt > sorted.txt",
    "train/sum": """echo 'awk "{s += \\$1} END {print s}" numbers.txt' > total.sh""",
    "test/count": "grep -c '' log.txt > count.txt",
    "test/spelling": "sed -i s/colour/color/g text.txt",
}
TASKS = [json.loads(x) for x in (EXAMPLES / "harness_tasks.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["task_id"])
def test_the_tasks_of_the_page_are_solved_by_work_and_by_nothing_else(program, task):
    data = {name: x for name, x in task.items() if name not in ("task_id", "split")}
    assert ends(program, data | {"instruction": SOLUTIONS[task["task_id"]]}).reward == 1.0
    assert ends(program, data | {"instruction": "true"}).reward == 0.0


PAGE = (ROOT / "docs" / "agents.md").read_text().partition("## Harnesses")[2].partition("\n## ")[0]
RUNS = [
    line for line in PAGE.replace("\\\n", " ").splitlines() if line.startswith("python -m seeupo")
]


@pytest.mark.parametrize("line", RUNS, ids=("mini_swe_agent", "claude_code"))
def test_the_commands_of_the_page_pass_every_check(line, program, monkeypatch):
    monkeypatch.chdir(ROOT)
    mini = program.parent / "mini"
    mini.unlink(missing_ok=True)
    mini.symlink_to(program)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in line.split()[3:])
    file, model = flags.pop("config"), {"MODEL": "package:order_desk", "65536": "32768"}
    fields = [
        f"{name.removeprefix('config.')}={model.get(value, value)}"
        for name, value in flags.items()
        if name != "workdir"
    ]
    check_config(load_config(ROOT / file, fields))


WRONG = {
    "instruction: got none; allowed: a text.": {"instruction": None},
    "check: got 3; allowed: a text.": {"check": 3},
    "files: got 'a'; allowed: texts by relative path.": {"files": "a"},
    "files: got '/etc/a': 'b'; allowed: texts by relative path.": {"files": {"/etc/a": "b"}},
    "check_files: got '../a'; allowed: paths without `..`.": {"check_files": {"../a": "b"}},
    "folder: got 'lost'; allowed: a folder that is there, relative to the folder in which the run"
    " is started.": {"folder": "lost"},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_task_that_cannot_be_played_is_said_before_the_run(sentence, tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"task_id": "t"} | TASK | WRONG[sentence]))
    config = from_dict({"agent": {"harness": "codex", "tasks": str(file)}})
    with pytest.raises(ValueError, match="tasks.jsonl") as error:
        find_tasks(config)
    assert str(error.value).endswith(sentence)


def test_null_files_of_a_table_are_left_out():
    task = read_harness_task(TASK | {"files": {"a": "1", "b": None}, "check_files": None})
    assert (task.files, task.check_files) == ({"a": "1"}, {})


@pytest.mark.parametrize(
    "agent, sentence",
    [
        ({"harness": "codex"}, "config.agent.harness: got 'codex' without config.agent.tasks;"),
        ({"harness": "cursor"}, "config.agent.harness: got 'cursor'; allowed: one of claude_code,"),
        (
            {"harness": "codex", "name": "a:b", "tasks": "T"},
            "config.agent.harness: got 'codex' with config.agent.name=a:b;",
        ),
    ],
)
def test_a_harness_that_cannot_play_is_refused(agent, sentence):
    with pytest.raises(ValueError, match=sentence):
        from_dict({"agent": agent})


def test_a_program_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    agent = Agent(harness="codex", tasks="T")
    with pytest.raises(ValueError, match="config.agent.harness: got codex, whose program codex is"):
        agent_words(agent, max_context=1, max_answer=1)
