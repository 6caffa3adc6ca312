"""A process that runs a program and ends all its descendants when the program or the run ends.

The run is the process that started this one. Linux reparents a process whose parent has ended to
the nearest ancestor that is a subreaper. This process is one, so it also finds descendants that
have left the program's process group or session. There are two of them, one started by the other:
if either is killed, the other one ends all descendants. It imports no other module of the package:
each program has its supervisors, which must stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it
SUPPORTED = _PRCTL is not None
# The signal that makes a supervisor end everything immediately. SIGTERM and SIGUSR1 are no choice:
# schedulers send them to all processes of a job, and only the trainer reacts to them.
END = signal.SIGRTMIN + 5 if SUPPORTED else signal.SIGKILL
_KILL_S = 5.0  # for killed processes to end; those of another user cannot be killed


def supervise(parent: int, grace_s: float) -> None:
    """Forks: returns in the new process, in a new session; this process ends with its status.

    Only on Linux; elsewhere it returns in this process.

    Args:
      parent: the process that started this one.
      grace_s: how long the new process may continue after `parent` has ended.
    """
    if not SUPPORTED:
        return
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # no interruptions
    outer = _fork_supervised(parent, grace_s)
    _fork_supervised(outer, 0.0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork_supervised(parent: int, grace_s: float) -> int:
    """Forks: returns this process's id in the new process; this process supervises it.

    Arguments as of `supervise`; all signals are blocked.
    """
    _PRCTL(_PR_SET_CHILD_SUBREAPER, 1)
    # A signal that only wakes: Linux also sends it when the thread that started this process ends.
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGCHLD)
    supervisor = os.getpid()
    program = os.fork()
    if program == 0:
        os.setsid()  # a program that kills its own group does not kill its supervisor
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it has ended already
            os._exit(1)
        return supervisor
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.close(number)
    descendants = _Descendants(program)
    _wait(descendants, parent, grace_s)
    descendants.kill()
    _exit_as(descendants.status)
    os._exit(1)  # after a signal that ends nothing by default


class _Descendants:
    """All descendants of a program.

    status: the program's, in the form of `os.waitpid`; None: it runs.
    """

    def __init__(self, program: int):
        self._program = program
        self.status: int | None = None

    def reap(self) -> bool:
        """Reaps those that have ended; False: none is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self._program:
                    self.status = status
                if pid == 0:
                    return True
        return False

    def kill(self) -> None:
        """Kills this process's children, after which it gets theirs, until none is left."""
        until = time.monotonic() + _KILL_S
        while self.reap() and (left_s := until - time.monotonic()) > 0:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            signal.sigtimedwait([signal.SIGCHLD], min(left_s, 0.1))  # the list may be incomplete


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return [int(pid) for pid in file.read().split()]


def _wait(descendants: _Descendants, parent: int, grace_s: float) -> None:
    """Waits until the program has ended or must be ended."""
    until = None
    while descendants.reap() and descendants.status is None:
        if until is None and os.getppid() != parent:
            until = time.monotonic() + grace_s
        left_s = 3600.0 if until is None else until - time.monotonic()
        if left_s <= 0:
            return
        woken = signal.sigtimedwait([signal.SIGCHLD, END], left_s)
        if woken is not None and woken.si_signo == END:
            return


def _exit_as(status: int | None) -> None:
    """Ends this process with the status of another one, in the form of `os.waitpid`."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program's core dump is enough
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)


def main() -> None:
    """Supervises a command. Arguments: the parent's id, the grace time, the command's words."""
    parent, grace_s, *command = sys.argv[1:]
    supervise(int(parent), float(grace_s))
    os.execvp(command[0], command)
