"""The record of a run: one strict JSON object per line, and the trackers that draw it live."""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from seeupo_jax.configuration.user_code import describe
from seeupo_jax.durable_files import make_folder, sync_file, sync_folder, write_atomically
from seeupo_jax.errors import name_file
from seeupo_jax.metrics.trackers import TRACKERS, Sample, Tracker, check_trackers

METRICS_FILE = "metrics.jsonl"
DAMAGED_FILE = "metrics.jsonl.damaged"
_LOGGER = logging.getLogger(__name__)


class MetricsWriter:
    """Appends metrics to DIR/metrics.jsonl and to the trackers; in one process only.

    A tracker that fails is reported and dropped: the run does not end for it.

    Args:
      trackers: names out of `TRACKERS`; ValueError for others.
      log: takes a sentence about damaged lines, or about a tracker that failed.
    """

    def __init__(
        self,
        workdir: str | Path,
        trackers: Iterable[str] = (),
        *,
        log: Callable[[str], None] = _LOGGER.warning,
    ):
        self._trackers_wanted = tuple(trackers)
        check_trackers(self._trackers_wanted)
        self._workdir, self._log = Path(workdir).absolute(), log
        make_folder(self._workdir)
        self._path = self._workdir / METRICS_FILE
        self._file = None
        self._trackers: dict[str, Tracker] = {}
        self._purge_from: int | None = None

    def resume_from(self, iteration: int) -> None:
        """Removes the lines of this and later iterations, and sets damaged lines aside.

        A killed run has often written past its last checkpoint; those iterations run again and must
        not be recorded twice. Damaged lines (a half-written last line, or corruption by a failing
        disk) are appended to DIR/metrics.jsonl.damaged and reported. The file is replaced
        atomically, so a second kill loses nothing. Call it before the first `write`. ValueError if
        the file is a folder.
        """
        self.close()
        self._purge_from = iteration
        lines = _read_lines(self._path)
        if lines is None:
            return
        if lines.damaged:
            damaged = self._path.with_name(DAMAGED_FILE)
            with name_file(damaged), damaged.open("ab") as file:
                file.writelines(line + b"\n" for line in lines.damaged.values())
            sync_file(damaged)
            self._log(f"{lines.sentence()}; they are set aside in {damaged}")
        earlier = [line for line in lines.records if line["iteration"] < iteration]
        write_atomically(self._path, "".join(map(_to_line, earlier)).encode())

    def write(
        self, iteration: int, values: Mapping[str, float | int | str], *, sync: bool = True
    ) -> None:
        """Appends one line; NaN and infinities become null, NumPy and JAX scalars numbers.

        Args:
          sync: return when it is on the disk; else `sync` is called before it has to be.

        Raises:
          ValueError: a value that is neither text nor number, or a value named `iteration`.
          OSError: the line could not be written, and the file is as it was; or it is not synced.
        """
        if "iteration" in values:
            raise ValueError("metrics: got a value named 'iteration'; allowed: any other name.")
        plain = {name: _plain(name, value) for name, value in values.items()}
        self.open()
        with name_file(self._path):
            self._append(_to_line({"iteration": int(iteration), **plain}).encode())
        if sync:
            self.sync()
        self._each(lambda tracker: tracker.write(int(iteration), plain))

    def sync(self) -> None:
        """Returns when the lines so far are on the disk."""
        if self._file is not None:
            with name_file(self._path):
                os.fsync(self._file.fileno())

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # of a library, its server, or the disk
                del self._trackers[name]
                self._log(f"{name} failed ({describe(error)}); nothing more is written to it")

    def _append(self, line: bytes) -> None:
        """Writes a line whole or not at all."""
        end = self._file.seek(0, os.SEEK_END)
        remaining = memoryview(line)
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError:
            self._file.truncate(end)
            raise

    def draw(
        self,
        iteration: int,
        histograms: Mapping[str, np.ndarray],
        samples: Sequence[Sample],
    ) -> None:
        """Sends distributions and conversations to the trackers; see `Tracker.draw`."""
        self.open()
        self._each(lambda tracker: tracker.draw(int(iteration), histograms, samples))

    def close(self) -> None:
        """Closes the file and the trackers; a later `write` opens them again."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def open(self) -> None:
        """Opens file and trackers, as the first `write` does; ValueError if a tracker cannot."""
        if self._file is not None:
            return
        self._file = self._path.open("ab", buffering=0)  # an error belongs to its line
        sync_folder(self._workdir)
        for name in self._trackers_wanted:
            self._trackers[name] = TRACKERS[name](self._workdir, self._purge_from)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(
    workdir: str | Path, *, log: Callable[[str], None] = _LOGGER.warning
) -> list[dict[str, Any]]:
    """The lines of DIR/metrics.jsonl, in order; [] without the file.

    Damaged lines are left out. `log` gets a sentence about them, except for a last one that is cut
    short: a run may be about to write the rest of it. ValueError if the file is a folder.
    """
    lines = _read_lines(Path(workdir) / METRICS_FILE)
    if lines is None:
        return []
    if lines.damaged.keys() - {lines.torn}:
        log(f"{lines.sentence()}; they are left out")
    return lines.records


class _Lines(NamedTuple):
    """Lines of a file. damaged: by number, from 1. torn: the number of a last one without end."""

    path: Path
    records: list[dict[str, Any]]
    damaged: dict[int, bytes]
    torn: int

    def sentence(self) -> str:
        return (
            f"{self.path}: {len(self.damaged)} of {len(self.damaged) + len(self.records)} lines are"
            f" damaged, the first of them line {min(self.damaged)}"
        )


def _read_lines(path: Path) -> _Lines | None:
    if path.is_dir():
        raise ValueError(f"{path}: got a folder; allowed: a file with one JSON object per line.")
    if not path.exists():
        return None
    with name_file(path):
        lines = path.read_bytes().split(b"\n")
    records, damaged = [], {}
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif line.strip():
            damaged[number] = line
    return _Lines(path, records, damaged, len(lines))


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line as `write` makes it; None: another."""
    try:
        # `loads` would accept UTF-16 bytes, and numbers that JSON does not have.
        record = json.loads(line.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("iteration")) is not int:
        return None
    return record if all(_is_plain(value) for value in record.values()) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON.")


def _is_plain(value: Any) -> bool:
    if isinstance(value, int | float):
        return abs(value) <= sys.float_info.max  # no infinity, as 1e999 is; no 400 digits
    return value is None or isinstance(value, str)


def _to_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _plain(name: str, value: Any) -> float | int | str | None:
    if isinstance(value, str | bool | int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        number = float(value)
    except TypeError:
        raise ValueError(f"metrics: got {name}={value!r}; allowed: a number or a text.") from None
    return number if math.isfinite(number) else None
