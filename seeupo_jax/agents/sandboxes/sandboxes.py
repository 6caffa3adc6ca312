"""Plans of sandboxed episodes, from the configuration and the task's folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seeupo_jax.agents.calls import Access, AgentFailure, AgentResult, AgentTask
from seeupo_jax.agents.runners.agent_results import check_result
from seeupo_jax.agents.sandboxes.program_folders import program_folders
from seeupo_jax.agents.sandboxes.sandbox_plan import PORT, PRIVATE, VARIABLE, SandboxPlan
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.sandbox_schema import Sandbox
from seeupo_jax.configuration.schema import Rollout
from seeupo_jax.envs.transport.processes import describe_exit, python_command
from seeupo_jax.envs.validation import ProtocolError
from seeupo_jax.tasks.task_folders import TaskFolder, TaskFolders

_MIB = 2**20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Sandboxes:
    """Makes the command and the environment by which an agent's command runs in a sandbox.

    Args:
      words: of the agent's program.
      agent, rollout: of the configuration.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        tasks: TaskFolders,
        words: Sequence[str],
        agent: Agent,
        rollout: Rollout,
    ):
        self.sandbox, self.tasks, self.words = sandbox, tasks, list(words)
        self._agent, self._rollout = agent, rollout
        of_program = program_folders(words) if sandbox.runtime == "local" else []
        self._visible = list(dict.fromkeys([*of_program, *sandbox.visible]))
        self._hidden = _inside(tasks.folder, self._visible)
        *program, paths = python_command("seeupo_jax.agents.sandboxes.sandboxed_episode")
        self.argv = [*program, *words, paths]

    def access(self, access: Access) -> Access:
        """The endpoint as it is reached from a sandbox."""
        return Access(f"http://127.0.0.1:{PORT}/v1", access.api_key)

    def variables(
        self, task: AgentTask, access: Access, variables: Mapping[str, str]
    ) -> dict[str, str]:
        """The environment of the episode's driver.

        Args:
          variables: of the agent, in addition to those of its task.
        """
        plan = self.plan(self.tasks.task(task.task_id, task.split), access, list(variables))
        return {**variables, VARIABLE: json.dumps(plan.as_json())}

    def plan(self, task: TaskFolder, access: Access, passed: Sequence[str] = ()) -> SandboxPlan:
        """The plan of an episode; `passed` as in `SandboxPlan`."""
        sandbox, container, address = self.sandbox, task.container, urlsplit(access.base_url)
        most_mib = self._agent.memory_mib
        made = {} if container is None else dict(container.variables)
        own = {**made, **task.variables}
        if container is not None:  # a container has these of its image
            own = {"PATH": _path(self._visible), "HOME": "/root", "LANG": "C.UTF-8", **own}
        told = {"SEEUPO_TASK": f"{PRIVATE}/task.json"}
        solved = task.solution_variables if sandbox.solution else {}
        copies = () if container is None else container.copies
        return SandboxPlan(
            runtime=sandbox.runtime,
            endpoint=(address.hostname or "", address.port or 0),
            variables={**own, **solved, **told},
            verifier_variables={**own, **task.verifier_variables},
            passed=passed,
            harness=self._agent.harness,
            max_context=self._rollout.max_context,
            max_answer=self._rollout.max_action_tokens,
            workdir="" if container is None else container.workdir,
            copies=[(str(source), target) for source, target in copies],
            image=task.image,
            build=str(task.folder / "environment"),
            tag=f"seeupo-{re.sub('[^a-z0-9]+', '-', task.folder.name.lower())}:{task.digest[:16]}",
            tests=str(task.folder / "tests"),
            solution=str(task.folder / "solution") if sandbox.solution else None,
            agent_timeout_s=task.agent_timeout_s * sandbox.timeout_scale,
            verifier_timeout_s=task.verifier_timeout_s * sandbox.timeout_scale,
            build_timeout_s=task.build_timeout_s,
            cpus=task.cpus,
            memory_mib=task.memory_mib if sandbox.memory_mib is None else sandbox.memory_mib,
            storage_bytes=task.storage_mib * _MIB,
            processes=sandbox.processes,
            address_bytes=None if most_mib is None else most_mib * _MIB,
            visible=self._visible,
            hidden=self._hidden,
        )


def _inside(folder: Path, visible: Sequence[str]) -> list[str]:
    """Where a folder is seen by way of visible paths that contain it."""
    real = folder.resolve()
    places = [(Path(each), Path(each).resolve()) for each in visible]
    return [str(x / real.relative_to(y)) for x, y in places if y in real.parents or y == real]


def _path(visible: Sequence[str]) -> str:
    """The system's PATH, then the parts of this process's that a sandbox has too."""
    own = [each for each in os.environ.get("PATH", "").split(os.pathsep) if each]
    seen = [p for p in own if any(Path(p).is_relative_to(place) for place in visible)]
    return os.pathsep.join([_PATH, *seen])


def read_outcome(
    text: str, info: Mapping[str, Any], max_reward: float
) -> AgentResult | AgentFailure:
    """Reads the result file of an episode's driver.

    Args:
      info: added to the result's. max_reward: the largest magnitude of a reward.
    """
    outcome = json.loads(text)
    if "failure" in outcome:
        cause, reason = outcome["failure"]
        return AgentFailure("env_error", f"the task's {cause}: {reason}", cause)
    found = outcome["result"]
    try:
        result = check_result({**found, "info": {**info, **found["info"]}}, max_reward=max_reward)
    except ProtocolError as error:
        reason = str(error).replace("the agent's result", "the task's verifier")
        return AgentFailure("env_error", reason, "verifier")
    code, limit = outcome["code"], outcome["limit"]
    if code == 0 and not limit:
        return result
    said = f"; it printed: {info['output']}" if info.get("output") else ""
    if limit:
        reason = f"the agent's command: it was ended by its limit of {limit}{said}"
        return AgentFailure("env_error", reason, "limit", answered=result)
    reason = f"the agent's command: it ended with {describe_exit(code)}{said}"
    return AgentFailure("env_error", reason, "exit" if code > 0 else "crash", answered=result)
