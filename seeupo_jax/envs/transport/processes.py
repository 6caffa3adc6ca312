"""Processes that a run starts: each ends with the run, together with its descendants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from seeupo_jax.envs.transport import supervisor

# Imports the module alone: its package would double Python's memory.
_SUPERVISE = "import sys; sys.path.append(sys.argv.pop(1)); import supervisor as s; s.main()"


def python_command(module: str) -> list[str]:
    """Returns the command that runs `main` of a module in a new process, with this `sys.path`."""
    program = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop()); import {module} as m;"
    return [sys.executable, "-c", f"{program} m.main()", json.dumps(sys.path)]


def supervised(command: Sequence[str], *, grace_s: float) -> list[str]:
    """Returns a command that runs `command` and ends its descendants when it or this process ends.

    On Linux these are all descendants, elsewhere the process group, and only by `end`. Start it in
    a new session, otherwise Ctrl-C in a terminal reaches it.

    Args:
      grace_s: how long the command may continue after this process has ended.
    """
    program = [sys.executable, "-I", "-S", "-c", _SUPERVISE, os.path.dirname(supervisor.__file__)]
    return [*program, str(os.getpid()), str(grace_s), *command]


def take_pipes() -> tuple[int, int]:
    """Takes standard input and output for exclusive use; later output goes to stderr."""
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGSEGV or SIGRTMIN+6, which has no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+}"


def describe_exit(code: int) -> str:
    """How a process ended, in words, by its exit code as `subprocess` gives it."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal_name(-code)})"


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended. It is not reaped, so its id and group cannot be reused yet."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a supervised process and its descendants."""
    send = os.kill if supervisor.SUPPORTED else os.killpg
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
        send(process.pid, supervisor.END)


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Waits for a supervised process; returns its exit code, or minus the signal that ended it."""
    code = process.wait()
    return -signal.SIGKILL if code == -supervisor.END else code  # it was not yet supervised
