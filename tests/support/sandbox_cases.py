"""Episodes in sandboxes, without a trainer; and where bubblewrap can make them.

`.ci/run` requires that it can.
"""

import os
import queue
import shutil
import subprocess
import sys
import time

import pytest

from seeupo_jax.agents.calls import Access, AgentTask
from seeupo_jax.agents.runners.command_agents import CommandAgents, split_command
from seeupo_jax.agents.sandboxes.sandboxes import Sandboxes
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.sandbox_schema import Sandbox
from seeupo_jax.configuration.schema import Rollout

SOLVED = "echo 1 > /logs/verifier/reward.txt"
ACCESS = Access("http://127.0.0.1:9/v1", "key-of-the-episode")


def _lacks() -> str:
    """Why no sandbox can be made; empty: it can."""
    if shutil.which("bwrap") is None:
        return "the program bwrap (bubblewrap) is not installed"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"bwrap makes no sandbox here: {done.stderr.strip()}" if done.returncode else ""


NO_SANDBOX = "" if os.environ.get("SEEUPO_REQUIRE_SANDBOX") else _lacks()
needs_bubblewrap = pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX)


def sandboxes_of(tasks, command, sandbox=None):
    sandbox = sandbox or Sandbox()
    words = split_command(command, in_image=sandbox.runtime != "local")
    return Sandboxes(sandbox, tasks, words, Agent(command=command), Rollout())


def runner(tasks, command, sandbox=None, output_kib=64):
    sandboxes = sandboxes_of(tasks, command, sandbox)
    limits = {"memory_mib": None, "output_kib": output_kib, "max_reward": 10.0}
    return CommandAgents(sandboxes.words, model="policy", sandboxes=sandboxes, **limits)


def start(agents, tasks, task_id, split, on_end, access=ACCESS):
    data = tasks.data(task_id, split)
    return agents.start(AgentTask(task_id, split, data, 0, 0, 4), access, on_end)


def outcomes(tasks, command, sandbox=None, access=ACCESS, output_kib=64):
    """What an agent came to in each task, all of which run at once."""
    agents, ended = runner(tasks, command, sandbox, output_kib), queue.SimpleQueue()
    listed = [(split, task_id) for split in tasks.count for task_id in tasks.task_ids(split)]
    for split, task_id in listed:
        start(agents, tasks, task_id, split, lambda r, t=task_id: ended.put((t, r)), access)
    found = dict(ended.get(timeout=120) for _ in listed)
    agents.close()
    return found


def write_task(folder, tests=SOLVED, settings="", docker="", instruction="Do it.\n"):
    """A task whose verifier is a program of the shell."""
    files = {
        "task.toml": settings,
        "instruction.md": instruction,
        "environment/Dockerfile": f"FROM scratch\nWORKDIR /app\n{docker}\n",
        "tests/test.sh": tests,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def wait_for(happened):
    until = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)


_TRAINER = """
import queue, sys
sys.path[:] = {path!r}
from pathlib import Path
from sandbox_cases import runner, start
from seeupo_jax.configuration.sandbox_schema import Sandbox
from seeupo_jax.tasks.task_folders import TaskFolders
tasks = TaskFolders(Path({folder!r}), local={local!r})
agents = runner(tasks, {command!r}, {sandbox!r})
start(agents, tasks, {task!r}, "train", print)
queue.SimpleQueue().get()
"""


def start_trainer(folder, task, command, sandbox):
    """A process that plays an episode of a task and waits."""
    values = {"folder": str(folder), "task": task, "command": command, "sandbox": sandbox}
    local = sandbox.runtime == "local"
    program = _TRAINER.format(path=sys.path, local=local, **values)
    return subprocess.Popen([sys.executable, "-c", program])


def write_programs(home, **files):
    """Executable files of a home folder, by name; a text begins with the interpreter."""
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
        (home / name).chmod(0o755)
