"""Finished cells of a study: a compressed file of JSON lines for each stage, in one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.durable_files import make_folder, write_atomically
from seeupo_jax.instruments.study.study import Cell
from seeupo_jax.reports.blocks import rounded
from seeupo_jax.trajectories.json_lines import plain, to_line

SUFFIX = ".jsonl.gz"
# Metrics that are kept of every iteration, in addition to the evaluations.
_KEPT = (
    *("iteration", "rollout/success_rate", "rollout/reward_mean", "rollout/turns_mean"),
    *("rollout/action_tokens", "rollout/entropy", "sweep/turns", "sweep/steps", "sweep/kl"),
    *("sweep/clip_fraction", "sweep/weight_max", "sweep/grad_norm", "sweep/updates_skipped"),
    *("exact/value", "exact/optimum", "exact/outside"),
)


@dataclass(frozen=True)
class CellResult:
    """One finished cell.

    key, definition: of the `Cell`. cpu_s: of its process, by `time.process_time`; None where it was
      stopped and resumed.
    versions: of the software that trained it. records: metrics by iteration, with six digits.
    """

    stage: str
    variant: str
    name: str
    key: str
    definition: dict[str, Any]
    cpu_s: float | None
    versions: dict[str, str]
    records: list[dict[str, Any]]


def compact_records(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A run's metrics for a result: without times and without those of single kinds of tasks."""
    records = []
    for line in lines:
        names = [n for n in line if n in _KEPT or (n.startswith("eval/") and "@" in n)]
        top_level = {name: line[name] for name in names if name.count("/") < 2}
        numbers = {k: rounded(v) if isinstance(v, float) else v for k, v in top_level.items()}
        records.append(numbers)
    return records


def read_results(folder: Path) -> list[CellResult]:
    """All of a folder's; () without the folder.

    Raises:
      ValueError: a file that is damaged; one sentence.
    """
    return [result for file in sorted(folder.glob(f"*{SUFFIX}")) for result in _read(file)]


def _read(file: Path) -> list[CellResult]:
    if not file.exists():
        return []
    names = {field.name for field in dataclasses.fields(CellResult)}
    results = []
    try:
        for line in gzip.decompress(file.read_bytes()).splitlines():
            values = json.loads(line)
            if not isinstance(values, dict) or values.keys() != names:
                raise ValueError("a line is no result")
            results.append(CellResult(**values))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        why = str(error) or type(error).__name__
        raise ValueError(
            f"--results: got {file}, which is damaged ({why}); allowed: what this command wrote:"
            " restore the file, or delete it to train its cells again."
        ) from None
    return results


def add_result(folder: Path, result: CellResult) -> None:
    """Adds a result to its stage's file, in place of one of the same name; sorted by name."""
    make_folder(folder)
    file = folder / f"{result.stage}{SUFFIX}"
    with _locked(folder):
        others = [other for other in _read(file) if other.name != result.name]
        ordered = sorted((*others, result), key=lambda each: each.name)
        data = b"".join(to_line(plain(dataclasses.asdict(each))) for each in ordered)
        write_atomically(file, gzip.compress(data, mtime=0))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock, with which one process at a time changes the folder's files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def by_key(results: Sequence[CellResult]) -> dict[str, CellResult]:
    """Results by their definition, whichever stage trained them."""
    return {result.key: result for result in results}


def changed_cells(cells: Sequence[Cell], results: Sequence[CellResult]) -> list[str]:
    """A sentence for each cell that was trained with another definition, which does not count."""
    stored = by_key(results)
    named = {(result.stage, result.name): result for result in results}
    sentences = []
    for cell in cells:
        other = named.get((cell.stage, cell.name))
        if cell.key in stored or other is None:
            continue
        definition, old = cell.definition(), other.definition
        # As texts, as in the key: None is not a field left out, nor is 0 the same as 0.0.
        now_texts, was_texts = (
            {(field, json.dumps(value, sort_keys=True)) for field, value in values.items()}
            for values in (definition, old)
        )
        field, _ = min(now_texts ^ was_texts)
        was, now = (values.get(field, "its default") for values in (old, definition))
        sentences.append(
            f"{cell} was trained with config.{field}={was}, which is {now} now: what it came to"
            " does not count, and it is trained again"
        )
    return sentences
