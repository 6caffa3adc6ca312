"""Processes that a run starts: each ends with the run, and with it all that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from seeupo_jax.envs.transport import supervisor

# The module alone: its package would be as large again as Python.
_SUPERVISE = "import sys; sys.path.append(sys.argv.pop(1)); import supervisor as s; s.main()"


def python_command(module: str) -> list[str]:
    """Runs `main` of a module in a new process, with this one's path: both find the same."""
    program = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop()); import {module} as m;"
    return [sys.executable, "-c", f"{program} m.main()", json.dumps(sys.path)]


def supervised(command: Sequence[str], *, grace_s: float) -> list[str]:
    """Runs a command; when it or this process ends, so does all that it has started.

    On Linux that is all that descends from it, elsewhere its process group, and only by `end`.
    Start it in a session of its own, or Ctrl-C in a terminal would reach it.

    Args:
      grace_s: how long the command may go on when this process has ended.
    """
    program = [sys.executable, "-I", "-S", "-c", _SUPERVISE, os.path.dirname(supervisor.__file__)]
    return [*program, str(os.getpid()), str(grace_s), *command]


def take_pipes() -> tuple[int, int]:
    """Standard input and output, which others must not use: what they print goes to stderr."""
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def signal_name(number: int) -> str:
    """Such as SIGSEGV, or SIGRTMIN+6, for which Python has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+}"


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping: the process id stays taken, so its group cannot be another one's yet."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a supervised process and all that it has started."""
    send = os.kill if supervisor.SUPPORTED else os.killpg
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
        send(process.pid, supervisor.END)


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Waits for a supervised process; minus the signal that ended it, where one did."""
    code = process.wait()
    return -signal.SIGKILL if code == -supervisor.END else code  # before it was supervised
