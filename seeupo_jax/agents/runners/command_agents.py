"""Agents that are command lines, with a process group for each episode."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seeupo_jax.agents.calls import Access, AgentFailure, AgentResult, AgentTask
from seeupo_jax.agents.harnesses.table import HARNESSES
from seeupo_jax.agents.runners.agent_results import check_result
from seeupo_jax.agents.runners.command_processes import RESULT, AgentExit
from seeupo_jax.agents.sandboxes.sandboxes import Sandboxes, read_outcome
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.envs.transport.processes import describe_exit, end, python_command, supervised
from seeupo_jax.envs.validation import ProtocolError

_KIB, _MIB = 2**10, 2**20
_CLOSE_S = 10.0  # for all commands to be killed and their folders to be removed
_SHOWN = 1000  # characters of output in a reason
# Messages of runtimes that get no memory: Python, the C library, C++, Node, Rust, Go.
_NO_MEMORY = re.compile(
    r"MemoryError|annot allocate memory|bad_alloc|out of memory|memory allocation of \d+ bytes",
    re.IGNORECASE,
)
# Options before a module's name, or a program, with which Python imports from the current folder.
_MODULE, _PROGRAM = re.compile(r"-[bBdEiIOPqsSuvx]*m"), re.compile(r"-[bBdEiIOPqsSuvx]*c")
# Real credentials that an SDK would send instead of the episode's key.
_REMOVED = ("ANTHROPIC_AUTH_TOKEN",)

OnEnd = Callable[[AgentResult | AgentFailure], None]


def agent_words(agent: Agent, *, max_context: int, max_answer: int) -> list[str]:
    """The words of the command line of `config.agent`: its own, or one that plays by its harness.

    Args:
      max_context: tokens of a conversation. max_answer: tokens of an answer.

    Raises:
      ValueError: as of `split_command`.
    """
    words = program_words(agent)
    if agent.harness is None:
        return words
    # Its own arguments come before the last one, which `python_command` reads.
    *python, path = python_command("seeupo_jax.agents.harnesses.play")
    return [*python, agent.harness, str(max_context), str(max_answer), os.getcwd(), *words, path]


def program_words(agent: Agent, *, in_image: bool = False) -> list[str]:
    """The words of `config.agent.command`, or of the program of `config.agent.harness`.

    Args and errors as of `split_command`.
    """
    if agent.command is None and agent.harness is not None:
        program = HARNESSES[agent.harness].program
        if not in_image and shutil.which(program) is None:
            raise ValueError(
                f"config.agent.harness: got {agent.harness}, whose program {program} is not on the"
                " PATH; allowed: a harness that is installed (make harnesses)."
            )
        return split_command(program, in_image=in_image)
    return split_command(str(agent.command), in_image=in_image)


def split_command(command: str, *, in_image: bool = False) -> list[str]:
    """Splits `config.agent.command` into words; words that name a file here are made absolute.

    An agent runs in its own folder, in which `node my_agent.js` would not find its file.

    Args:
      in_image: the words are those of an image's programs, and not looked up here.

    Raises:
      ValueError: quotes do not match, or there is no such program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(
            f"config.agent.command: got {command!r} ({error}); allowed: shell words, quoted."
        ) from None
    if in_image and words:
        return words
    words = [str(Path(word).absolute()) if os.path.isfile(word) else word for word in words]
    if not words or shutil.which(words[0]) is None:
        got = words[0] if words else command
        raise ValueError(
            f"config.agent.command: got the program {got!r}; allowed: one on the PATH, or an"
            " executable file."
        )
    return words


class CommandAgents:
    """A `Runner` of a command line; a helper process starts it for each episode.

    Args:
      words: of the command.
      model: the endpoint's name of the policy.
      memory_mib, output_kib: as in `config.agent`.
      max_reward: the largest magnitude of a reward.
      sandboxes: of the tasks; None: the command runs as the trainer's user, and rewards itself.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        model: str,
        memory_mib: int | None,
        output_kib: int | None,
        max_reward: float,
        sandboxes: Sandboxes | None = None,
    ):
        self._sandboxes = sandboxes
        self._model, self._max_reward = model, max_reward
        self._imports_here = imports_here(words)
        self._memory_mib, self._output_kib = memory_mib, output_kib
        self._first = {
            "argv": list(words) if sandboxes is None else sandboxes.argv,
            # A sandbox limits the agent, and not the driver of its episode.
            "memory_bytes": None if memory_mib is None or sandboxes else memory_mib * _MIB,
            "output_bytes": None if output_kib is None else output_kib * _KIB,
        }
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._helper: _Helper | None = None

    def start(self, task: AgentTask, access: Access, on_end: OnEnd) -> Callable[[], None]:
        key = next(self._keys)
        seen = access if self._sandboxes is None else self._sandboxes.access(access)
        env = environment_of(seen, self._model, from_here=self._imports_here)
        if self._sandboxes is not None:
            env = self._sandboxes.variables(task, access, env)
        request = {"env": env, "task": dataclasses.asdict(task)}
        with self._lock:
            if self._helper is None or self._helper.over:
                self._helper = _Helper(self._first, self._read_end)
            helper = self._helper
        helper.start(key, request, on_end)
        return lambda: helper.stop(key)

    def close(self) -> None:
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def _read_end(self, end: AgentExit) -> AgentResult | AgentFailure:
        """The result of a process that ended: from its result file, otherwise its exit code."""
        printed = {"output": end.output[-_SHOWN:]} if end.output else {}
        tail = f"; it printed: {printed['output']}" if printed else ""
        if end.code is None:
            return _failed("exit", f"it could not be started: {end.output}")
        most = self._output_kib
        if most is not None and end.printed > most * _KIB:
            return _failed("output", f"it printed more than {most} KiB (config.agent.output_kib)")
        if end.result_bytes > RESULT:
            got = f"the agent's result: got more than {RESULT} bytes; allowed: at most that many."
            return _failed("result", got)
        if self._sandboxes is not None and end.result is not None:
            return read_outcome(end.result, printed, self._max_reward)
        if self._sandboxes is not None:  # the driver always writes one
            reason = f"the task's sandbox: its driver ended with {describe_exit(end.code)}{tail}"
            return AgentFailure("env_error", reason, "sandbox")
        if end.result is not None:
            return self._read_result(end.result, printed)
        no_memory = self._memory_mib is not None and _NO_MEMORY.search(end.output)
        if end.code != 0 and no_memory:
            limit = f"{self._memory_mib} MiB (config.agent.memory_mib)"
            return _failed("memory", f"it got no more memory than {limit}{tail}")
        if end.code < 0:
            return _failed("crash", f"it was ended by {describe_exit(end.code)}{tail}")
        if end.code == 0:
            return AgentResult(1.0, 1.0, info=printed)
        failure = _failed("exit", f"it ended with exit code {end.code}{tail}")
        # Python's uncaught exceptions also exit with 1, which counts only after an answer.
        answered = AgentResult(0.0, 0.0, info=printed) if end.code == 1 else None
        return dataclasses.replace(failure, answered=answered)

    def _read_result(self, text: str, printed: Mapping[str, Any]) -> AgentResult | AgentFailure:
        try:
            result = check_result(json.loads(text), max_reward=self._max_reward)
        except (ValueError, RecursionError) as error:
            return _failed("result", f"its result file is not JSON: {error}")
        except ProtocolError as error:
            return _failed("result", str(error))
        return dataclasses.replace(result, info={**printed, **result.info})


def _failed(cause: str, reason: str) -> AgentFailure:
    return AgentFailure("env_error", f"the agent's command: {reason}", cause)


_GONE = _failed("crash", "the process that starts agents has ended")


def imports_here(words: Sequence[str]) -> bool:
    """Whether a command's Python imports from the current folder when a shell starts it.

    It does with `-m` (also of `uv run` and similar) and Python's `-c`. A file imports from its own
    folder; modules in the current folder could then shadow installed packages.
    """
    is_python = False
    for word in " ".join(words).split():
        if word.endswith(".py"):
            return False
        if _MODULE.fullmatch(word) or (is_python and _PROGRAM.fullmatch(word)):
            return True
        is_python |= Path(word).name.startswith("python")
    return False


def environment_of(access: Access, model: str, *, from_here: bool) -> dict[str, str]:
    """The variables by which SDKs find the policy, in addition to those of this process.

    Args:
      from_here: its Python imports from the current folder, in which it is not started.
    """
    direct = _without_proxy(urlsplit(access.base_url).hostname or "")
    given = os.environ.get("PYTHONPATH", "")
    entries = [*([""] if from_here else []), *(given.split(os.pathsep) if given else [])]
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_BASE": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": access.api_key,
        "NO_PROXY": direct,  # the endpoint is not behind the machine's proxy
        "no_proxy": direct,
        # Entries are relative to the current folder, and an empty entry is that folder.
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, entries)),
    }


def _without_proxy(host: str) -> str:
    """The hosts that this process reaches without a proxy by either variable, and `host`."""
    listed = ",".join(os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy"))
    hosts = [each for each in map(str.strip, listed.split(",")) if each not in ("", host)]
    return ",".join(dict.fromkeys([*hosts, host]))


class _Helper:
    """The process that starts commands, and a thread that receives their ends."""

    def __init__(
        self, first: Mapping[str, Any], read: Callable[[AgentExit], AgentResult | AgentFailure]
    ):
        self._read, self._waiting = read, dict[int, OnEnd]()
        self._lock = threading.Lock()  # of `_waiting`; never held while writing to the helper
        self._writing = threading.Lock()  # of the pipe, which may be full
        self.over = False  # the process has ended
        self._process = subprocess.Popen(
            supervised(
                python_command("seeupo_jax.agents.runners.command_processes"), grace_s=_CLOSE_S
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in _REMOVED},
            start_new_session=True,  # Ctrl-C in a terminal is for the trainer only
        )
        self._write(first)
        self._thread = threading.Thread(target=self._listen, name="agents", daemon=True)
        self._thread.start()

    def start(self, key: int, request: Mapping[str, Any], on_end: OnEnd) -> None:
        """Starts the command; if the process has ended, the command fails."""
        with self._lock:
            over = self.over
            if not over:
                self._waiting[key] = on_end
        if over:
            return on_end(_GONE)
        self._write({"start": key, **request})

    def stop(self, key: int) -> None:
        with self._lock:
            waits = self._waiting.pop(key, None) is not None
        if waits:
            self._write({"stop": key})

    def close(self) -> None:
        """Ends the process, which ends the commands that it started."""
        with self._lock:
            self._waiting.clear()
        self._hang_up()
        self._thread.join(_CLOSE_S)
        end(self._process)

    def _hang_up(self) -> None:
        with self._writing, contextlib.suppress(OSError):
            self._process.stdin.close()

    def _write(self, request: Mapping[str, Any]) -> None:
        line = json.dumps(request).encode() + b"\n"
        # The process has ended, which `_listen` detects, or it is being closed.
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _listen(self) -> None:
        for line in self._process.stdout:
            end = AgentExit(*json.loads(line))
            with self._lock:
                on_end = self._waiting.pop(end.key, None)
            if on_end is not None:
                on_end(self._read(end))
        with self._lock:
            self.over, waiting, self._waiting = True, self._waiting, {}
        self._hang_up()
        self._process.wait()
        self._process.stdout.close()
        for on_end in waiting.values():
            on_end(_GONE)
