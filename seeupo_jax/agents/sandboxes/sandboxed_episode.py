"""The driver of an episode in a sandbox: the agent, then the verifier, then the reward.

It is the command that the runner of commands starts, so that its output, its end and all that it
has started are treated as an agent's. Its result file has either `result`, the fields of
`AgentResult`, `code`, the agent's exit code, and `limit`, which ended the agent if it is not empty;
or `failure`, a cause and a sentence.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seeupo_jax.agents.harnesses.harness import PolicyAccess
from seeupo_jax.agents.harnesses.table import HARNESSES
from seeupo_jax.agents.sandboxes.container_sandbox import ContainerSandbox
from seeupo_jax.agents.sandboxes.endpoint_relay import EndpointRelay
from seeupo_jax.agents.sandboxes.local_sandbox import LocalSandbox
from seeupo_jax.agents.sandboxes.reward_files import RewardError, read_reward
from seeupo_jax.agents.sandboxes.sandbox_plan import VARIABLE, SandboxError, SandboxPlan
from seeupo_jax.envs.transport.processes import describe_exit

SANDBOXES = {"local": LocalSandbox, "docker": ContainerSandbox, "podman": ContainerSandbox}
_POLL_S = 0.1  # between two looks at memory and processes
_SHOWN = 500  # characters of a verifier's output in a reason

Sandbox = LocalSandbox | ContainerSandbox


def main() -> None:
    """Plays an episode. Arguments: the agent's words; the rest is in the environment."""
    plan = SandboxPlan(**json.loads(os.environ.pop(VARIABLE)))
    folder = Path(os.environ["SEEUPO_TASK"]).parent
    sandbox = SANDBOXES[plan.runtime](plan, folder)
    try:
        outcome = _play(sandbox, plan, folder, sys.argv[1:])
    except (SandboxError, OSError, shutil.Error) as error:
        outcome = {"failure": ["sandbox", str(error)]}
    except RewardError as error:
        outcome = {"failure": ["verifier", str(error)]}
    finally:
        sandbox.close()
    Path(os.environ["SEEUPO_RESULT"]).write_text(json.dumps(outcome), encoding="utf-8")


def _play(sandbox: Sandbox, plan: SandboxPlan, folder: Path, words: list[str]) -> dict[str, Any]:
    sandbox.prepare()
    shutil.copyfile(folder / "task.json", sandbox.private / "task.json")
    EndpointRelay(sandbox.private / "endpoint.sock", plan.endpoint)
    agent = _start_agent(sandbox, plan, folder, words)
    limit = _wait(sandbox, plan, agent, plan.agent_timeout_s)
    code = agent.wait()
    printed = folder / "verifier_output.txt"
    with printed.open("wb") as output:
        verifier = sandbox.start_verifier(output)
        stopped = _wait(sandbox, plan, verifier, plan.verifier_timeout_s)
    tail = _end_of(printed)
    said = f"; it printed: {tail}" if tail else ""
    if stopped:
        raise RewardError(f"it was ended by its limit of {stopped}{said}")
    try:
        found = read_reward(sandbox.logs / "verifier")
    except RewardError as error:
        raise RewardError(
            f"{error}; it ended with {describe_exit(verifier.wait())}{said}"
        ) from None
    info = {"agent_limit": limit} if limit else {}
    return {"result": {**found, "info": info}, "code": code, "limit": limit}


def _end_of(file: Path) -> str:
    """The last characters of what a verifier printed, which may be gigabytes."""
    with file.open("rb") as printed:
        printed.seek(max(0, file.stat().st_size - 4 * _SHOWN))
        return printed.read().decode(errors="replace").strip()[-_SHOWN:]


def _start_agent(
    sandbox: Sandbox, plan: SandboxPlan, folder: Path, words: list[str]
) -> subprocess.Popen[bytes]:
    """Starts the agent's program, as its harness is started if it has one."""
    passed = {name: os.environ[name] for name in plan.passed if name in os.environ}
    variables = {**plan.variables, **passed}
    if plan.harness is None:
        return sandbox.start_agent(words, variables, {})
    instruction = json.loads((folder / "task.json").read_bytes())["data"]["instruction"]
    access = PolicyAccess(
        passed["OPENAI_BASE_URL"],
        passed["OPENAI_API_KEY"],
        passed["OPENAI_MODEL"],
        plan.max_context,
        plan.max_answer,
    )
    home = sandbox.home()
    launch = HARNESSES[plan.harness].launch(instruction, access, home)
    files = {str(home / name): text for name, text in launch.files.items()}
    return sandbox.start_agent([*words, *launch.words], launch.variables(variables), files)


def _wait(
    sandbox: Sandbox, plan: SandboxPlan, process: subprocess.Popen[bytes], limit_s: float
) -> str:
    """Waits for a command and all that it started; returns the limit that ended it, if one did."""
    until, reached = time.monotonic() + limit_s, ""
    with _Handle(process.pid) as ended:
        while not reached and not ended(min(_POLL_S, limit_s)):
            count, memory_mib = sandbox.usage()
            if time.monotonic() > until:
                reached = "time"
            elif count > plan.processes:
                reached = "processes"
            elif memory_mib > plan.memory_mib:
                reached = "memory"
        if reached:
            sandbox.stop()
            ended(None)
    sandbox.finish()
    return reached


class _Handle:
    """A child process that can be waited for with a time limit."""

    def __init__(self, pid: int):
        self._number = os.pidfd_open(pid)

    def __enter__(self) -> Callable[[float | None], bool]:
        poll = select.poll()
        poll.register(self._number, select.POLLIN)
        return lambda limit_s: bool(poll.poll(None if limit_s is None else limit_s * 1000))

    def __exit__(self, *_: object) -> None:
        os.close(self._number)
