"""Pieces as processes: a time limit for each, a budget for all, and what is left for next time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.bench.accelerator.record import (
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    TIMEOUT,
    Record,
    read,
)

_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|out of memory|OutOfMemory|MemoryError", re.I)
_LOG_BYTES = 64 * 1024  # of what a failed piece printed that are kept
_NEW = (None, RUNNING, STOPPED)  # status of pieces that were not tried to their end


@dataclass(frozen=True)
class Job:
    """A piece to run.

    commands: from its largest size to its smallest; the next is run where memory runs out. Each
      writes a `Record` to `NAME.json` in the folder of results.
    limit_s: all that it may take. about_s: it is not begun with less of the budget left.
    notes: sentences for its record.
    """

    name: str
    commands: Sequence[Sequence[str]]
    limit_s: float
    about_s: float = 0.0
    notes: tuple[str, ...] = ()


def order(jobs: Sequence[Job], out: Path) -> list[Job]:
    """What is left to run: first what was never tried to its end, then what failed."""
    status = {job.name: (read(out / f"{job.name}.json") or {}).get("status") for job in jobs}
    left = [job for job in jobs if status[job.name] != DONE]
    return sorted(left, key=lambda job: status[job.name] not in _NEW)  # stable


def work_through(
    jobs: Sequence[Job],
    out: Path,
    *,
    budget_s: float,
    environment: Mapping[str, str],
    report: Callable[[str], None] = print,
) -> dict[str, str]:
    """Runs what is left of the jobs, one after the other, whatever becomes of each.

    Args:
      budget_s: for all of them.
      environment: of the processes.

    Returns: of those that were not begun, by name, why.
    """
    ends, not_begun = time.monotonic() + budget_s, {}
    for job in order(jobs, out):
        left = ends - time.monotonic()
        if left < max(job.about_s, 1.0):
            not_begun[job.name] = (
                f"{max(0.0, left):.0f} s of the budget were left, and it may take"
                f" {max(job.about_s, 1.0):.0f} s"
            )
            report(f"{job.name}: not begun: {not_begun[job.name]}")
            continue
        report(f"{job.name}: begins, with at most {min(job.limit_s, left):.0f} s")
        values = _run(job, out, left, environment)
        report(f"{job.name}: {_words(values)}")
    return not_begun


def _words(values: Mapping[str, Any]) -> str:
    wrong = sum(not check["passed"] for check in values["checks"])
    checks = f", {wrong} of {len(values['checks'])} checks failed" if wrong else ""
    why = f": {values['error']}" if values.get("error") else ""
    return f"{values['status']} in {values['seconds']:.0f} s{checks}{why}"


def _run(job: Job, out: Path, left_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """One job, a size smaller after the other where memory runs out; its record's values."""
    file, began = out / f"{job.name}.json", time.monotonic()
    attempts = (read(file) or {}).get("attempts", 0) + 1
    limit_s, notes = min(job.limit_s, left_s), job.notes
    for number, command in enumerate(job.commands, 1):
        file.unlink(missing_ok=True)
        rest = limit_s - (time.monotonic() - began)
        code, output = _process(command, rest, environment)
        record = Record(file, read(file) or {"piece": job.name, "notes": [], "checks": []})
        record.values["notes"] = [*notes, *record.values["notes"]]
        status, error = _ending(code, record.values, output, limit_s, job.limit_s)
        _keep_log(out / f"{job.name}.log", output, status)
        record.put(
            status=status,
            error=error,
            seconds=round(time.monotonic() - began, 1),
            attempts=attempts,
        )
        smaller = number < len(job.commands) and limit_s - (time.monotonic() - began) > 1
        if not (smaller and status == FAILED and _OUT_OF_MEMORY.search(f"{error}\n{output}")):
            break
        size = record.values.get("size", f"size {number}")
        notes = (*notes, f"Memory ran out with {size}: {error}")
    return record.values


def _ending(
    code: int | None, values: Mapping[str, Any], output: str, limit_s: float, own_limit_s: float
) -> tuple[str, str | None]:
    """Status and error of a process that has ended, or was ended (code None)."""
    if code is None and limit_s < own_limit_s:
        return STOPPED, f"the budget ended after {limit_s:.0f} s of it"
    if code is None:
        return TIMEOUT, f"it took longer than its limit of {limit_s:.0f} s"
    ended = values.get("status")
    if ended not in (None, RUNNING):  # it has said itself how it went
        return ended, values.get("error")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return FAILED, f"{how}: {lines[-1][:300]}" if lines else how


def _process(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Exit code, None where the limit ended it, and the end of what it printed.

    It and what it starts are one group, which ends with it.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _LOG_BYTES))
        return code, log.read().decode(errors="replace")


def _keep_log(file: Path, output: str, status: str) -> None:
    if status == DONE:
        file.unlink(missing_ok=True)
    else:
        file.write_text(output)
