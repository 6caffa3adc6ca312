"""Processes of Python that a run starts: one group each, which ends with what started it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # another system has none


def python_command(module: str) -> list[str]:
    """Runs `main` of a module in a new process, with this one's path: both find the same."""
    program = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop()); import {module} as m;"
    return [sys.executable, "-c", f"{program} m.main()", json.dumps(sys.path)]


def take_pipes() -> tuple[int, int]:
    """Standard input and output, which others must not use: what they print goes to stderr."""
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def die_with(parent: int) -> None:
    """Ends this process when its parent does, even while it works or hangs; on Linux only."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


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


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children, unless they left its group or have ended already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
