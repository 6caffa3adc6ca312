"""`config.tasks` and `config.sandbox`: tasks in folders, and the sandboxes in which they run."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.options import above, at_least, checked, choice

TASK_FOLDERS = "harbor:"  # prefix of `config.tasks`: a folder of task folders in Harbor's form
RUNTIMES = ("local", "docker", "podman")


@dataclass(frozen=True)
class Sandbox:
    """What isolates the episodes of `config.tasks`."""

    runtime: str = choice(*RUNTIMES)
    """Program that isolates an episode; local: namespaces of this machine, by bubblewrap."""
    memory_mib: int | None = at_least(1, None)
    """Memory of all processes of an episode; none: what the task's environment states."""
    processes: int = at_least(1, 256)
    """Processes and threads of an episode at most."""
    timeout_scale: float = above(0, 1.0, most=1_000_000)
    """Factor of the time limits that tasks state for the agent and the verifier."""
    visible: tuple[str, ...] = checked(
        (), "absolute paths of this machine", lambda v: all(each.startswith("/") for each in v)
    )
    """Files and folders of this machine that agents may read, at the same paths."""
    solution: bool = False
    """Whether the agent sees the task's own solution at /solution, to check tasks."""


def check_sandboxed_tasks(tasks: str | None, sandbox: Sandbox, agent: Agent) -> None:
    """Checks fields that do not go together.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    if tasks is None:
        if sandbox != Sandbox():
            raise ValueError(
                f"config.sandbox: got {sandbox} without config.tasks; allowed: the defaults, unless"
                f" config.tasks={TASK_FOLDERS}FOLDER."
            )
        return
    if not agent.given or agent.name is not None:
        got = "an environment" if agent.name is None else f"the function {agent.name}"
        raise ValueError(
            f"config.tasks: got {tasks!r} played by {got}; allowed: with an agent that is a"
            " program (config.agent.command or config.agent.harness), which a sandbox can hold."
        )
    if agent.tasks is not None:
        raise ValueError(
            f"config.agent.tasks: got {agent.tasks!r} with config.tasks={tasks}; allowed: one of"
            " the two."
        )
