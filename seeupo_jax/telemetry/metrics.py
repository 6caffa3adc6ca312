"""The record of a run: one strict JSON object a line, and the trackers that draw it live."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seeupo_jax.telemetry.trackers import TRACKERS, Sample, Tracker, check_trackers

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends metrics to DIR/metrics.jsonl and to the trackers; in one process only.

    Args:
      workdir: the run's folder; made if missing.
      trackers: names out of `TRACKERS`.

    Raises:
      ValueError: an unknown tracker.
    """

    def __init__(self, workdir: str | Path, trackers: Iterable[str] = ()):
        self._trackers_wanted = tuple(trackers)
        check_trackers(self._trackers_wanted)
        self._workdir = Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._path = self._workdir / METRICS_FILE
        self._file = None
        self._trackers: list[Tracker] = []
        self._purge_from: int | None = None

    def resume_from(self, iteration: int) -> None:
        """Forgets lines of this and later iterations and a half-written last line.

        A killed run has often written past its last checkpoint; those iterations run again and must
        not stand in the record twice. The file is replaced in one step, so a second kill harms
        nothing. Call it before the first `write`.

        Args:
          iteration: the first iteration that will be written.

        Raises:
          ValueError: a whole line is not a JSON object with an `iteration`.
        """
        self.close()
        self._purge_from = iteration
        if not self._path.exists():
            return
        kept = [line for line in read_metrics(self._workdir) if line["iteration"] < iteration]
        temporary = self._path.with_suffix(".jsonl.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(_to_line(line) for line in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)

    def write(self, iteration: int, values: Mapping[str, float | int | str]) -> None:
        """Appends one line; NaN and infinities become null.

        Args:
          iteration: goes first in the line and is TensorBoard's step.
          values: names and texts or numbers; NumPy and JAX scalars count as numbers.

        Raises:
          ValueError: a value that is neither text nor number, or a value named `iteration`.
        """
        if "iteration" in values:
            raise ValueError("metrics: got a value named 'iteration'; allowed: any other name.")
        plain = {name: _plain(name, value) for name, value in values.items()}
        self.open()
        self._file.write(_to_line({"iteration": int(iteration), **plain}))
        self._file.flush()
        for tracker in self._trackers:
            tracker.write(int(iteration), plain)

    def draw(
        self,
        iteration: int,
        histograms: Mapping[str, np.ndarray],
        samples: Sequence[Sample],
    ) -> None:
        """Gives the trackers what is more than a number; see `Tracker.draw`."""
        self.open()
        for tracker in self._trackers:
            tracker.draw(int(iteration), histograms, samples)

    def close(self) -> None:
        """Closes the file and the trackers; a later `write` opens them again."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def open(self) -> None:
        """Opens what is not open; the first `write` does it else.

        Raises:
          ValueError: a tracker that cannot begin.
        """
        if self._file is not None:
            return
        self._file = self._path.open("a", encoding="utf-8")
        self._trackers = [
            TRACKERS[name](self._workdir, self._purge_from) for name in self._trackers_wanted
        ]

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The lines of DIR/metrics.jsonl, in order; [] without the file.

    A last line that a kill cut short is left out.

    Raises:
      ValueError: any other line is not a JSON object with an `iteration`.
    """
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    # The piece after the last line end: empty, or what a kill left of a line.
    torn = lines.pop()
    records = [_parse(line, f"{path} line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    try:
        return [*records, _parse(torn, "")] if torn.strip() else records
    except ValueError:
        return records


def _parse(line: bytes, where: str) -> dict[str, Any]:
    allowed = "a JSON object with a whole number 'iteration'"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{where}: got text that is not JSON ({error}); allowed: {allowed}."
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        raise ValueError(f"{where}: got {line[:60]!r}; allowed: {allowed}.")
    return record


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
