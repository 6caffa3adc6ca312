"""Answers that are mathematical expressions, compared by the package math-verify."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.user_code import escaped, in_one_line
from seeupo_jax.envs.base import EnvironmentUnavailable
from seeupo_jax.envs.checkers.checker import (
    RIGHT,
    Checker,
    CheckResult,
    check_flags,
    check_option,
    expected_value,
    is_number,
    needed_column,
    refused_value,
    wrong,
)
from seeupo_jax.envs.checkers.math_worker import MathReply
from seeupo_jax.envs.transport.processes import end, python_command, supervised

_START_S = 120.0  # for a process to import SymPy
_LATE_S = 1.0  # after its own time limit a process is ended
_LOGGER = logging.getLogger(__name__)


class MathExpression(Checker):
    """Whether an answer's expression equals the expected one, as math-verify reads and compares.

    math-verify reads the last box or formula, else the last number, and compares symbolically. It
    runs in processes with limits of time and memory, at most one per core, which all checkers of
    this process share: its own time limit works only in a main thread.

    Args:
      answer_column: of a text, such as `\\frac{1}{2}` or a solution with a box, or of a number.
      timeout_s: of one comparison, in seconds. A longer one scores 0, with a warning in the log.
      strict: math-verify's: variables have names, and a set equals no tuple.
    """

    def __init__(self, answer_column: str | None, *, timeout_s: float = 5.0, strict: bool = True):
        self._column = needed_column("math", answer_column)
        check_option("timeout_s", timeout_s, "a number > 0", lambda t: is_number(t) and t > 0)
        check_flags(strict=strict)
        if importlib.util.find_spec("math_verify") is None:
            raise EnvironmentUnavailable(
                "check: 'math' needs the package math-verify: pip install 'seeupo_jax[math]'."
            )
        self._timeout_s, self._strict = timeout_s, strict

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        expected = self._expected(row)
        options = {"timeout_s": self._timeout_s, "strict": self._strict}
        reply = _WORKERS.compare({"expected": expected, "answer": answer_text, **options})
        if not reply.expected:
            raise refused_value(self._column, expected, "a text that math-verify can read")
        if reply.failure is not None:
            _LOGGER.warning("check math: an answer scores 0, by %s.", reply.failure)
            return wrong("Your answer's expression takes too long to compare.")
        if not reply.shown:
            return wrong("Your answer has no expression that can be read; put it in \\boxed{}.")
        shown = in_one_line(escaped(reply.shown), 100)
        return RIGHT if reply.equal else wrong(f"Your answer {shown} is wrong.")

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._expected(row)

    def _expected(self, row: Mapping[str, Any]) -> str:
        value = expected_value(row, self._column)
        if not is_number(value) and (not isinstance(value, str) or not value.strip()):
            raise refused_value(self._column, value, "a text or a number")
        return str(value)


class _Workers:
    """Processes that compare; each serves one thread at a time and is kept for the next."""

    def __init__(self, most: int):
        self._free = threading.Semaphore(most)
        self._idle: list[subprocess.Popen[bytes]] = []  # appended and popped atomically

    def compare(self, request: Mapping[str, Any]) -> MathReply:
        """Compares in a process that is idle, or in a new one."""
        data = json.dumps(request).encode() + b"\n"
        with self._free:
            worker = self._idle.pop() if self._idle else _launch()
            line = b""
            try:
                with contextlib.suppress(BrokenPipeError):  # it has ended
                    worker.stdin.write(data)
                    worker.stdin.flush()
                    line = _read_line(worker, request["timeout_s"] + _LATE_S)
            finally:
                if line:
                    self._idle.append(worker)
                else:
                    _discard(worker)
        return MathReply(**json.loads(line)) if line else MathReply(failure="timeout")

    def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            _discard(self._idle.pop())


def _launch() -> subprocess.Popen[bytes]:
    """Starts a process and waits until it is ready. Raises: RuntimeError, it cannot start."""
    worker = subprocess.Popen(
        supervised(python_command("seeupo_jax.envs.checkers.math_worker"), grace_s=0.0),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    if not _read_line(worker, _START_S):
        _discard(worker)
        raise RuntimeError("check math: the process that compares expressions does not start.")
    return worker


def _read_line(worker: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """A line of a process; empty: it has ended, or has written none in time."""
    until, line = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left_s = until - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                return b""
            piece = os.read(worker.stdout.fileno(), 2**16)
            if not piece:
                return b""
            line += piece
    return line


def _discard(worker: subprocess.Popen[bytes]) -> None:
    end(worker)
    worker.wait()
    worker.stdout.close()
    with contextlib.suppress(OSError):
        worker.stdin.close()


_WORKERS = _Workers(len(os.sched_getaffinity(0)))
atexit.register(_WORKERS.close)
