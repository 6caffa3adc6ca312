"""`config.agent`: an agent that brings its own loop, and how it is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.fields import path_field
from seeupo_jax.options import above, at_least, checked, choice, within

# As in `envs.tool_formats`; a test compares them.
TOOL_FORMATS = (
    *("hermes", "llama", "llama_function", "qwen3_coder", "glm", "mistral", "mistral_args"),
    *("deepseek_v3", "deepseek_v31", "kimi", "gemma", "harmony"),
)
UNCONSTRAINED = ("gemma",)  # no grammar of calls
# As in `agents.harnesses`; a test compares them.
HARNESS_NAMES = ("claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code")


@dataclass(frozen=True)
class Agent:
    """An agent with a loop of its own; with no name, command and harness the environment plays."""

    name: str | None = path_field(
        "module:function or FILE.py:function", lambda value: ":" in value.strip(":")
    )
    """An async function that takes (task, client) and returns a reward or an AgentResult."""
    command: str | None = checked(None, "a command line", lambda value: bool(value.strip()))
    """A command line without a shell, which is started once for each episode; with a harness, its
    program and further arguments; none: the harness's program on the PATH."""
    harness: str | None = checked(
        None, f"one of {', '.join(HARNESS_NAMES)}", lambda value: value in HARNESS_NAMES
    )
    """A coding agent that others wrote, started without a terminal for the instruction of each
    task; its tasks have an instruction and a check, or are those of config.tasks."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Keyword arguments of the function."""
    tasks: str | None = path_field()
    """A file of tasks, JSONL or another format that the environment prompts reads, each row with
    task_id and, where it is not train, split; none: those of task_ids(split) in the module of the
    function, or else of config.env."""
    tool_format: str = choice("auto", *TOOL_FORMATS)
    """How the policy writes tool calls; auto: as the chat template writes them."""
    thoughts: str = choice("auto", "field", "content")
    """Where clients get an answer's thoughts; auto: in a field if the chat template knows them."""
    timeout_s: float = above(0, 300.0, most=1_000_000)
    """Seconds that an agent may be without an open call before it is ended (timeout); the time that
    the policy takes does not count."""
    memory_mib: int | None = at_least(1, None)
    """Address space of each process of a command; none: no limit."""
    output_kib: int | None = at_least(1, 16_384)
    """Limit on the output of a command, both streams together; a command that exceeds it is ended;
    none: no limit."""
    request_kib: int = at_least(1, 16_384)
    """Size of a call's request at most."""
    ignore_sampling: bool = False
    """Ignore and count sampling parameters of calls that differ from the run's, instead of refusing
    the call."""
    constraints: bool = False
    """Let calls force the form of an answer (tool_choice, response_format, ...) by a grammar, whose
    mask is part of the log-probability; otherwise they are refused."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens on; another than the loopback lets other machines call."""
    port: int = within(0, 65_535, 0)
    """Port of the endpoint, in each process its own; 0: a free one."""

    @property
    def given(self) -> bool:
        """Whether an agent plays the episodes, and not the environment."""
        return not (self.name is None and self.command is None and self.harness is None)

    @property
    def label(self) -> str:
        """The agent's name in logs and reports."""
        return self.name or self.harness or str(self.command)


def check_agent(agent: Agent, grammar: str | None, *, task_folders: bool) -> None:
    """Checks fields that do not go together.

    Args:
      grammar: `config.rollout.grammar`.
      task_folders: whether `config.tasks` is given.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    if agent.name is not None and agent.command is not None:
        raise ValueError(
            f"config.agent.command: got {agent.command!r} with config.agent.name={agent.name};"
            " allowed: one of the two."
        )
    if agent.harness is not None:
        _check_harness(agent, task_folders)
    if grammar == "tool_calls" and agent.tool_format in UNCONSTRAINED:
        others = [name for name in TOOL_FORMATS if name not in UNCONSTRAINED]
        raise ValueError(
            f"config.agent.tool_format: got {agent.tool_format!r} with"
            f" config.rollout.grammar='tool_calls'; allowed: auto, {', '.join(others)}, whose calls"
            " it constrains."
        )
    if agent.options and agent.name is None:
        raise ValueError(
            "config.agent.options: got options without config.agent.name; allowed: none."
        )
    if agent.tasks is not None and not agent.given:
        raise ValueError(
            f"config.agent.tasks: got {agent.tasks!r} without an agent; allowed: none, unless"
            " config.agent.name, config.agent.command or config.agent.harness is given."
        )
    if agent.memory_mib is not None and agent.command is None and agent.harness is None:
        raise ValueError(
            f"config.agent.memory_mib: got {agent.memory_mib}; allowed: none, unless"
            " config.agent.command or config.agent.harness is given."
        )


def _check_harness(agent: Agent, task_folders: bool) -> None:
    if agent.name is not None:
        raise ValueError(
            f"config.agent.harness: got {agent.harness!r} with config.agent.name={agent.name};"
            " allowed: one of the two."
        )
    if agent.tasks is None and not task_folders:
        raise ValueError(
            f"config.agent.harness: got {agent.harness!r} without config.agent.tasks; allowed: a"
            " file of tasks with an instruction and a check, or config.tasks instead."
        )
