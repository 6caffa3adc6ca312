"""A process that compares mathematical expressions with math-verify, with a time limit.

It answers lines of JSON on standard input and output: first `{}` when it is ready, then each
request (`expected`, `answer`, `timeout_s`, `strict`) with the fields of `MathReply`. The time limit
is a signal, which Python handles only in a main thread, between two of its instructions. It cannot
interrupt one long operation on large numbers, so the parent ends the process when it is late.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from typing import Any, NamedTuple

from seeupo_jax.envs.transport.processes import take_pipes

_MEMORY_BYTES = 3 * 2**30
_SHOWN = 200
_ENVIRONMENTS = ("\\boxed", "$", "\\(", "\\[", "\\begin")


class MathReply(NamedTuple):
    """A comparison. failure: why there is none, `timeout` or the name of an error.

    expected: whether the expected text has an expression. shown: that of the answer, "" for none.
    """

    equal: bool = False
    expected: bool = True
    shown: str = ""
    failure: str | None = None


class _OutOfTime(BaseException):
    """Passes each `except Exception` of math-verify and SymPy."""


def main() -> None:
    """Serves comparisons until standard input is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    pipes = take_pipes()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the trainer ends this process
    signal.signal(signal.SIGALRM, _end_comparison)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # this process limits the time
    import math_verify  # takes a second, and this process is for nothing else

    with os.fdopen(pipes[0], "rb") as requests, os.fdopen(pipes[1], "wb", buffering=0) as answers:
        answers.write(b"{}\n")
        for line in requests:
            reply = _limited(math_verify, **json.loads(line))
            answers.write(json.dumps(reply._asdict()).encode() + b"\n")


def _end_comparison(number: int, frame: Any) -> None:
    raise _OutOfTime


def _limited(
    math_verify: Any, expected: str, answer: str, timeout_s: float, strict: bool
) -> MathReply:
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return _compare(math_verify, expected, answer, strict)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OutOfTime:
        return MathReply(failure="timeout")
    except Exception as error:
        return MathReply(failure=type(error).__name__)


def _compare(math_verify: Any, expected: str, answer: str, strict: bool) -> MathReply:
    if not any(start in expected for start in _ENVIRONMENTS):
        expected = f"\\boxed{{{expected}}}"  # data sets have bare LaTeX, which is read only in one
    wanted = math_verify.parse(expected, parsing_timeout=None)
    if not wanted:
        return MathReply(expected=False)
    got = math_verify.parse(answer, parsing_timeout=None)
    if not got:
        return MathReply()
    equal = math_verify.verify(wanted, got, strict=strict, timeout_seconds=None)
    return MathReply(equal=bool(equal), shown=str(got[-1])[:_SHOWN])
