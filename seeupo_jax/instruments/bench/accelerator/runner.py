"""Runs pieces as processes, each with a time limit and a record of its results.

A record is one JSON file, rewritten after every measurement, so a piece that is killed keeps its
earlier measurements.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.durable_files import write_atomically
from seeupo_jax.envs.transport.processes import end, signal_name, supervised
from seeupo_jax.trajectories.json_lines import read_file

# How a piece ended. running: its process was killed with the command; stopped: by the command's
# budget. skipped: it cannot run here. Only pieces that are done are not tried again.
DONE, RUNNING, STOPPED = "done", "running", "stopped"
FAILED, TIMEOUT, SKIPPED = "failed", "timeout", "skipped"
_NEW = (None, RUNNING, STOPPED)  # status of pieces that were not tried to their end
_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|out of memory|OutOfMemory|MemoryError", re.I)
_LOG_BYTES = 64 * 1024  # kept of a failed piece's output


class NotHere(Exception):
    """A piece needs something that this machine lacks; the message names it."""


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text, or a process's output, reports that memory ran out."""
    return _OUT_OF_MEMORY.search(text) is not None


def sentence(error: BaseException) -> str:
    """An error as one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


@dataclass(frozen=True)
class Record:
    """The file of a piece.

    values: `piece`, `status`, and as far as they are known `error` (a sentence), `seconds`,
      `attempts`, `size` (words), `notes` (sentences), `checks` and `figures`.
    """

    path: Path
    values: dict[str, Any]

    @classmethod
    def begin(cls, path: Path, **values: Any) -> Record:
        """A file that exists while the piece runs."""
        record = cls(path, {"piece": path.stem, "status": RUNNING, "notes": [], "checks": []})
        record.put(**values)
        return record

    def put(self, **values: Any) -> None:
        """Adds or replaces values, and writes the file: whole, or not at all."""
        self.values.update(values)
        write_atomically(self.path, (json.dumps(self.values, indent=1) + "\n").encode())

    def note(self, sentence: str) -> None:
        """Something that a reader of the figures must know."""
        self.put(notes=[*self.values["notes"], sentence])

    def check(
        self,
        name: str,
        bounded: Mapping[str, tuple[float, float]],
        *,
        error: Exception | None = None,
        **about: Any,
    ) -> None:
        """A comparison: of each quantity the greatest difference and the bound that it must keep.

        Args:
          error: why it could not be made.
          about: plain values that describe it, such as `shape` and `dtype`.
        """
        differences = {key: {"difference": d, "bound": b} for key, (d, b) in bounded.items()}
        passed = error is None and all(d <= b for d, b in bounded.values())  # NaN passes nothing
        one = {"name": name, **about, "differences": differences, "passed": passed}
        if error is not None:
            traceback.print_exception(error)
            one["error"] = sentence(error)
        self.put(checks=[*self.values["checks"], one])


def read(path: Path) -> dict[str, Any] | None:
    """The values of a record; None where there is no file, or a damaged one."""
    values = read_file(path)
    return values if values is not None and "status" in values else None


@dataclass(frozen=True)
class BenchJob:
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


def order(jobs: Sequence[BenchJob], out: Path) -> list[BenchJob]:
    """The jobs to run: first those never run to their end, then failed ones."""
    status = {job.name: (read(out / f"{job.name}.json") or {}).get("status") for job in jobs}
    remaining = [job for job in jobs if status[job.name] != DONE]
    return sorted(remaining, key=lambda job: status[job.name] not in _NEW)  # stable


def work_through(
    jobs: Sequence[BenchJob],
    out: Path,
    *,
    budget_s: float,
    environment: Mapping[str, str],
    report: Callable[[str], None] = print,
) -> dict[str, str]:
    """Runs the remaining jobs one after the other; a failed one does not stop the rest.

    Args:
      budget_s: for all of them.
      environment: of the processes.

    Returns: the reasons of jobs that were not begun, by name.
    """
    ends, not_started = time.monotonic() + budget_s, {}
    for job in order(jobs, out):
        remaining_s, least = ends - time.monotonic(), max(job.about_s, 1.0)
        if remaining_s < least:
            budget = f"{max(0.0, remaining_s):.0f} s of the budget were left"
            why = f"{budget}, and it may take {least:.0f} s"
            not_started[job.name] = why
            report(f"{job.name}: not begun: {why}")
            continue
        report(f"{job.name}: begins, with at most {min(job.limit_s, remaining_s):.0f} s")
        values = _run(job, out, remaining_s, environment)
        wrong = sum(not check["passed"] for check in values["checks"])
        checks = f", {wrong} of {len(values['checks'])} checks failed" if wrong else ""
        why = f": {values['error']}" if values.get("error") else ""
        report(f"{job.name}: {values['status']} in {values['seconds']:.0f} s{checks}{why}")
    return not_started


def _run(job: BenchJob, out: Path, left_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """One job, a size smaller after the other where memory runs out; its record's values."""
    file, log, began = out / f"{job.name}.json", out / f"{job.name}.log", time.monotonic()
    attempts = (read(file) or {}).get("attempts", 0) + 1
    limit_s, notes = min(job.limit_s, left_s), job.notes
    for number, command in enumerate(job.commands, 1):
        file.unlink(missing_ok=True)
        rest = limit_s - (time.monotonic() - began)
        code, output = _process(command, rest, environment)
        record = Record(file, read(file) or {"piece": job.name, "notes": [], "checks": []})
        record.values["notes"] = [*notes, *record.values["notes"]]
        status, error = _ending(code, record.values, output, limit_s, job.limit_s)
        if status == DONE:
            log.unlink(missing_ok=True)
        else:
            log.write_text(output, encoding="utf-8")
        seconds = time.monotonic() - began
        record.put(status=status, error=error, seconds=round(seconds, 1), attempts=attempts)
        smaller = number < len(job.commands) and limit_s - seconds > 1
        if not (smaller and status == FAILED and is_out_of_memory(f"{error}\n{output}")):
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
    if ended not in (None, RUNNING):  # it has recorded its own result
        return ended, values.get("error")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    how = f"ended by signal {signal_name(-code)}" if code < 0 else f"ended with {code}"
    return FAILED, f"{how}: {lines[-1][:300]}" if lines else how


def _process(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Its exit code, None if the limit ended it, and the end of its output.

    Its child processes end with it, and it ends with this process: they would keep the device.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            supervised(command, grace_s=0.0),
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
            end(process)
            process.wait()
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _LOG_BYTES))
        return code, log.read().decode(errors="replace")
