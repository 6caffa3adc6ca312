"""A command line as an agent: what it is given, what it leaves, its limits, and its end."""

import dataclasses
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from seeupo_jax.agents.calls import Access, AgentFailure, AgentResult, AgentTask
from seeupo_jax.agents.runners.command_agents import (
    CommandAgents,
    environment_of,
    imports_here,
    split_command,
)

TASK = AgentTask("t/0", "test", {"question": "ü?"}, seed=3, episode_seed=5, max_turns=4)
ACCESS = Access("http://127.0.0.1:9/v1", "key-of-the-episode")
LIMITS = {"memory_mib": None, "output_kib": 64, "max_reward": 10.0}


def runner(command, **limits):
    words = split_command(command)
    return CommandAgents(words, model="policy", **(LIMITS | limits))


@pytest.fixture(scope="module")
def shell():
    """A runner whose program is the episode's key."""
    agents = runner("""sh -c 'eval "$OPENAI_API_KEY"'""")
    yield agents
    agents.close()


def ends(agents, program=None, count=1):
    """What `count` agents came to, which run at once."""
    ended = queue.SimpleQueue()
    access = ACCESS if program is None else Access(ACCESS.base_url, program)
    for _ in range(count):
        agents.start(TASK, access, ended.put)
    found = [ended.get(timeout=20) for _ in range(count)]
    return found[0] if count == 1 else found


def test_it_is_given_the_variables_of_the_sdks_and_its_task(tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the-users.own")  # not for its eyes
    left = tmp_path / "left.json"
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, sys\n"
        "task = json.load(open(os.environ['SEEUPO_TASK']))\n"
        "names = [n for n in os.environ if n.split('_')[0] in ('OPENAI', 'ANTHROPIC', 'NO')]\n"
        "env = {name: os.environ[name] for name in names}\n"
        "open('mine', 'w')\n"
        f"json.dump([task, env, os.getcwd(), os.listdir()], open({str(left)!r}, 'w'))\n"
        "result = {'reward': 2, 'turn_rewards': [0.5, 1.5], 'score': 0.25, 'info': {'a': 1}}\n"
        "json.dump(result, open(os.environ['SEEUPO_RESULT'], 'w'))\n"
        "sys.exit(7)\n"
    )
    agents = runner(f"{sys.executable} -IS {os.path.relpath(program)}")
    assert ends(agents) == AgentResult(2.0, 0.25, {}, (0.5, 1.5), {"a": 1})
    agents.close()
    task, env, folder, files = json.loads(left.read_text())
    assert task == {
        "task_id": "t/0",
        "split": "test",
        "data": {"question": "ü?"},
        "seed": 3,
        "episode_seed": 5,
        "max_turns": 4,
    }
    assert env == {
        "OPENAI_BASE_URL": ACCESS.base_url,
        "OPENAI_API_BASE": ACCESS.base_url,
        "OPENAI_API_KEY": ACCESS.api_key,
        "OPENAI_MODEL": "policy",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_API_KEY": ACCESS.api_key,
        "NO_PROXY": env["NO_PROXY"],
    }
    assert env["NO_PROXY"].split(",")[-1] == "127.0.0.1"
    assert files == ["mine"] and folder != os.getcwd() and not Path(folder).parent.exists()


@pytest.mark.parametrize("from_here", [False, True])
def test_relative_folders_of_modules_are_found_from_its_own_folder(
    from_here, monkeypatch, tmp_path
):
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "", "/opt/lib", "../other"]))
    env = environment_of(ACCESS, "policy", from_here=from_here)
    listed = [tmp_path / "src", tmp_path, Path("/opt/lib"), tmp_path.parent / "other"]
    wanted = [*([tmp_path] if from_here else []), *listed]  # as `sys.path` has them in a shell
    assert env["PYTHONPATH"].split(os.pathsep) == list(map(str, wanted))
    monkeypatch.delenv("PYTHONPATH")
    env = environment_of(ACCESS, "policy", from_here=from_here)
    assert env["PYTHONPATH"] == (str(tmp_path) if from_here else "")


# What Python has as the first entry of `sys.path`: here, or the folder of its file.
COMMANDS = {
    "python -m my_agent": True,
    "/opt/bin/python3.12 -X dev -um my_agent": True,
    "env A=1 uv run -m my_agent": True,
    "sh -c 'python -m my_agent | tee log'": True,
    "python -c 'import my_agent'": True,
    "python agents/shop.py": False,
    "python agents/shop.py -m policy": False,
    "sh -c 'python agents/shop.py'": False,
    "node agents/shop.js": False,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_only_a_module_is_imported_from_the_current_folder(command):
    assert imports_here(shlex.split(command)) == COMMANDS[command]


def test_hosts_that_either_variable_names_stay_without_a_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "a.example,b.example")
    monkeypatch.setenv("no_proxy", "b.example, .c.example,")
    env = environment_of(ACCESS, "policy", from_here=False)
    assert env["NO_PROXY"] == env["no_proxy"] == "a.example,b.example,.c.example,127.0.0.1"


@pytest.mark.parametrize(
    "program, result",
    [
        ("exit 0", AgentResult(1.0, 1.0, info={})),
        ("echo -0.5 > $SEEUPO_RESULT", AgentResult(-0.5, 0.0, turn_rewards=())),
        ("echo 3 > $SEEUPO_RESULT; kill -9 $$", AgentResult(3.0, 1.0, turn_rewards=())),
    ],
)
def test_its_file_counts_or_else_its_exit_code(shell, program, result):
    assert ends(shell, program) == result


@pytest.mark.parametrize(
    "program, cause, says",
    [
        ("echo so sad; exit 3", "exit", "exit code 3; it printed: so sad"),
        ("echo out; echo err >&2; exit 1", "exit", "exit code 1; it printed: out\nerr"),
        ("kill -11 $$", "crash", "signal 11 (SIGSEGV)"),
        ("kill -40 $$", "crash", "signal 40 (SIGRTMIN+6)"),
        ("echo nonsense > $SEEUPO_RESULT", "result", "is not JSON"),
        ("echo 1e9 > $SEEUPO_RESULT", "result", "of magnitude at most 10"),
        ("echo {} > $SEEUPO_RESULT", "result", "got no reward; allowed: reward, and score"),
        ("head -c 2000000 /dev/zero > $SEEUPO_RESULT", "result", "more than 1048576 bytes"),
        ("yes é | head -c 2000000 > $SEEUPO_RESULT", "result", "more than 1048576 bytes"),
        ("exec cat /dev/zero", "output", "printed more than 64 KiB"),
    ],
)
def test_a_failure_has_its_cause_and_a_sentence(shell, program, cause, says):
    failure = ends(shell, program)
    assert isinstance(failure, AgentFailure) and (failure.stop, failure.cause) == (
        "env_error",
        cause,
    )
    assert says in failure.reason
    answered = AgentResult(0.0, 0.0, info={"output": "out\nerr\n"})
    assert failure.answered == (answered if "exit code 1;" in says else None)


def test_a_result_file_that_is_a_pipe_or_a_link_is_none(shell):
    assert ends(shell, "mkfifo $SEEUPO_RESULT; exit 0").reward == 1.0
    assert ends(shell, "ln -s /etc/passwd $SEEUPO_RESULT; exit 0").reward == 1.0


def test_many_run_at_once(shell):
    began = time.monotonic()
    assert ends(shell, "sleep 1", count=16) == [AgentResult(1.0, 1.0, info={})] * 16
    assert time.monotonic() - began < 8  # one after the other: 16


def test_large_tasks_do_not_wait_for_large_results():
    """Either pipe of the helper holds less than four tasks, and less than a result."""
    agents, ended = runner("""sh -c 'eval "$OPENAI_API_KEY"'"""), queue.SimpleQueue()
    program = """printf '{"reward": 1, "info": {"x": "%0200000d"}}' 0 > $SEEUPO_RESULT"""
    task = dataclasses.replace(TASK, data={"x": "y" * 20_000})

    def begin():
        for _ in range(48):
            agents.start(task, Access(ACCESS.base_url, program), ended.put)

    threading.Thread(target=begin, daemon=True).start()
    found = [ended.get(timeout=60) for _ in range(48)]
    agents.close()
    assert [len(result.info["x"]) for result in found] == [200_000] * 48


def test_memory_is_limited():
    agents = runner(f"{sys.executable} -ISc {shlex.quote('x = bytearray(2**30)')}", memory_mib=256)
    failure = ends(agents)
    agents.close()
    assert failure.cause == "memory" and "256 MiB (config.agent.memory_mib)" in failure.reason


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(happened):
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_all_that_it_started_ends_with_an_agent_and_its_folder_goes(shell, tmp_path):
    """When the agent is over, or stopped; nobody is told of one that was stopped."""
    said = tmp_path / "said"
    daemon = f"(setsid sh -c 'echo $$ > {said}.daemon; exec sleep 1000' &)"
    begin = f"{daemon}; sleep 1000 & until [ -s {said}.daemon ]; do sleep 0.01; done;"
    begin += f"echo $! $$ $(cat {said}.daemon) > {said}.new; pwd >> {said}.new;"
    begin += f"rm {said}.daemon; mv {said}.new {said}; "

    def read():
        pids, folder = said.read_text().splitlines()
        said.unlink()
        return [*map(int, pids.split())], Path(folder)

    assert ends(shell, begin).reward == 1.0
    pids, folder = read()
    wait_for(lambda: not any(map(alive, pids)) and not folder.exists())
    ended = queue.SimpleQueue()
    stop = shell.start(TASK, Access(ACCESS.base_url, begin + "wait"), ended.put)
    wait_for(said.exists)
    pids, folder = read()
    assert all(map(alive, pids))
    stop()
    wait_for(lambda: not any(map(alive, pids)) and not folder.exists())
    stop()
    assert ends(shell, "exit 0").reward == 1.0 and ended.empty()


TRAINER = """
import queue, sys
sys.path[:] = {path!r}
from seeupo_jax.agents.calls import Access, AgentTask
from seeupo_jax.agents.runners.command_agents import CommandAgents
begun = "setsid sleep 1000 & helper=$(ps -o ppid= $(ps -o ppid= $PPID));"
begun += "echo $! $$ $helper > {said};"
begun += "pwd >> {said}; mv {said} {said}.done;"
words = ["sh", "-c", begun + "exec sleep 1000"]
agents = CommandAgents(words, model="m", memory_mib=None, output_kib=1, max_reward=1)
agents.start(AgentTask("t", "train", None, 0, 0, 1), Access("http://x/v1", "k"), print)
queue.SimpleQueue().get()
"""


@pytest.mark.parametrize("victim", ["trainer", "helper"])
def test_none_outlives_the_trainer_or_what_started_it(tmp_path, victim):
    program = TRAINER.format(path=sys.path, said=tmp_path / "said")
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    wait_for((tmp_path / "said.done").exists)
    numbers, folder = (tmp_path / "said.done").read_text().splitlines()
    child, command, helper = map(int, numbers.split())
    assert alive(child) and alive(command) and alive(helper)
    if victim == "trainer":
        trainer.kill()
        wait_for(lambda: not (alive(child) or alive(command) or alive(helper)))
        wait_for(lambda: not Path(folder).parent.exists())
    else:
        os.kill(helper, signal.SIGKILL)
        assert "the process that starts agents has ended" in trainer.stdout.readline()
        wait_for(lambda: not alive(command) and not alive(child))
    trainer.kill()
    trainer.communicate()


def test_after_the_helper_has_died_another_one_starts_agents():
    agents = runner("sh -c 'kill -9 $(ps -o ppid= $(ps -o ppid= $PPID)); sleep 10'")
    assert ends(agents).cause == "crash"
    assert "has ended" in ends(agents).reason
    agents.close()


def test_a_word_that_is_too_long_for_a_files_name_stays_as_it_is():
    code = "import json; " + "x = 1; " * 50
    assert split_command(f"sh -c '{code}'") == ["sh", "-c", code]


@pytest.mark.parametrize(
    "command, says",
    [
        ("no_such_program --flag", "got the program 'no_such_program'"),
        ("sh -c 'echo", "No closing quotation"),
        ("''", "got the program ''"),
    ],
)
def test_a_command_that_cannot_run_is_refused(command, says):
    with pytest.raises(ValueError, match="config.agent.command: got") as error:
        split_command(command)
    assert says in str(error.value) and str(error.value).endswith(".")
