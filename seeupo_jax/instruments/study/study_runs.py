"""Training the cells of a study, stage by stage, in this process, so that programs are shared."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import seeupo_jax
from seeupo_jax.comparison.figures import RunCurve, history_of
from seeupo_jax.durable_files import make_folder
from seeupo_jax.errors import NotLearning, WriteError
from seeupo_jax.instruments.study.cell_results import (
    CellResult,
    add_result,
    by_key,
    compact_records,
    read_results,
)
from seeupo_jax.instruments.study.study import STAGES, Cell, Point, Study, grid_points
from seeupo_jax.metrics.metrics_log import METRICS_FILE, read_metrics
from seeupo_jax.metrics.run_manifest import versions
from seeupo_jax.parallel.file_lock import try_lock
from seeupo_jax.parallel.stop_signal import Stopped, StopRequest

# XLA's sums are divided among its threads: as many threads give the same bits on machines alike.
THREADS = {"NPROC": "1"}
_VERSIONS = ("seeupo_jax", "jax", "jaxlib", "optax")
_POLL_S = 1.0
_LOG_FILE = "log.txt"


@dataclass(frozen=True)
class Places:
    """Where a study keeps the run under way, and its finished cells."""

    workdir: Path
    results: Path


def history(cell: Cell, result: CellResult) -> RunCurve:
    """The metrics of a finished cell."""
    ended = _figures(cell, result.records)
    if ended is None:
        raise ValueError(
            f"--results: got {cell} without its last evaluation; allowed: what this command wrote."
        )
    return ended


def _figures(cell: Cell, records: Sequence[Mapping[str, Any]]) -> RunCurve | None:
    """The record of a cell; None: no rollout, or not its last evaluation, gave a figure."""
    config = cell.config
    ended = history_of(
        records, seed=cell.seed, done=True, metric=cell.metric, last=config.iterations
    )
    return None if ended is None or math.isnan(ended.after) else ended


def tuning_scores(
    study: Study, results: Mapping[str, CellResult]
) -> dict[str, list[tuple[Point, float | None]]]:
    """For each recipe its points with the score that decides; None where a run is missing.

    The area is up to the tokens that all finished tuning runs of the recipe have got to.
    """
    histories: dict[str, list[tuple[Point, RunCurve | None]]] = {}
    for cell in study.cells("tuning", {}):
        result = results.get(cell.key)
        ended = None if result is None else history(cell, result)
        histories.setdefault(cell.variant, []).append((cell.point, ended))
    return {
        name: [
            (point, _score(study, [h for at, h in by_point if at == point], by_point))
            for point in grid_points(study.tuning[name])
        ]
        for name, by_point in histories.items()
    }


def _score(
    study: Study, runs: Sequence[RunCurve | None], by_point: Sequence[tuple[Point, RunCurve | None]]
) -> float | None:
    done = [run for run in runs if run is not None]
    if len(done) < len(runs):
        return None
    until = min(h.tokens_I[-1] for _, h in by_point if h is not None)
    scores = [run.area("tokens", until) if study.choose_by == "area" else run.after for run in done]
    return sum(scores) / len(scores)


def choose(study: Study, results: Mapping[str, CellResult]) -> dict[str, Point]:
    """The point with the best score of each recipe whose tuning is complete; the first of equals.

    The score is a mean over the tuning seeds.
    """
    tuned = {}
    for name, scores in tuning_scores(study, results).items():
        complete = [(score, point) for point, score in scores if score is not None]
        if len(complete) == len(scores):
            tuned[name] = max(complete, key=lambda each: each[0])[1]
    return tuned


def train_study(study: Study, places: Places, *, minutes: float | None) -> int:
    """Trains the cells without results, and prints a line for each.

    Args:
      minutes: after this time no further cell is started; None: no limit.

    Returns: how many cells failed. Stages after that of a failed one are not started.

    Raises:
      Stopped: by a signal, or by the limit; finished cells are in the results.
    """
    until = None if minutes is None else time.monotonic() + 60 * minutes
    with StopRequest() as request:
        _remove_finished(places)
        for stage in STAGES:
            failed = _train_stage(study, stage, places, request, until)
            if failed:
                return failed
    return 0


def _remove_finished(places: Places) -> None:
    """Removes the folders of runs whose process was killed after storing the result."""
    folders = [places.workdir / key for key in by_key(read_results(places.results))]
    for folder in filter(Path.exists, folders):
        with _alone(folder) as free:
            if free:
                shutil.rmtree(folder)


def _train_stage(
    study: Study, stage: str, places: Places, request: StopRequest, until: float | None
) -> int:
    tuned = choose(study, by_key(read_results(places.results)))
    cells = study.cells(stage, tuned)
    failed: set[str] = set()
    while True:
        stored = by_key(read_results(places.results))
        remaining = [cell for cell in cells if cell.key not in stored and cell.key not in failed]
        if not remaining:
            return len(failed)
        tried = False
        for cell in remaining:
            if request.asked:
                raise Stopped(f"stopped before {cell}; rerun the command to resume")
            if until is not None and time.monotonic() > until:
                raise Stopped(f"--limit_minutes: stopped before {cell}; rerun to go on")
            at = f"[{stage} {cells.index(cell) + 1}/{len(cells)}] {cell.name}"
            succeeded = _train_alone(cell, places, at)
            tried = tried or succeeded is not None
            failed |= {cell.key} if succeeded is False else set()
        if not tried:
            time.sleep(_POLL_S)  # other processes train the remaining cells


def _train_alone(cell: Cell, places: Places, at: str) -> bool | None:
    """Whether it succeeded; None where another process trains it, or has done so."""
    with _alone(places.workdir / cell.key) as free:
        if not free or cell.key in by_key(read_results(places.results)):
            return None
        return _train(cell, places, at)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process trains the cell of this folder; none does until the end."""
    lock = folder.parent / f"{folder.name}.lock"
    make_folder(lock.parent)
    with lock.open("ab") as file:
        yield try_lock(file)


def _train(cell: Cell, places: Places, at: str) -> bool:
    """Trains a cell and keeps its result; False: it failed."""
    folder = places.workdir / cell.key
    recorded = read_metrics(folder)
    over = any(
        line["iteration"] == cell.config.iterations and cell.metric in line for line in recorded
    )
    if over and _figures(cell, recorded) is None:  # else it would only be finished again
        shutil.rmtree(folder)
    resumed = (folder / METRICS_FILE).exists()
    began = time.process_time()
    make_folder(folder)
    try:
        with (folder / _LOG_FILE).open("a", encoding="utf-8") as log:
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                stopped = seeupo_jax.train(cell.config, folder).stopped
    except (ValueError, NotLearning, WriteError) as error:
        print(f"{at}: failed: {error} See {folder / _LOG_FILE}.", flush=True)
        return False
    if stopped is not None:
        raise Stopped(f"stopped in {cell}; rerun with this workdir to resume, with another to redo")
    result = CellResult(
        stage=cell.stage,
        variant=cell.variant,
        name=cell.name,
        key=cell.key,
        definition=cell.definition(),
        cpu_s=None if resumed else round(time.process_time() - began, 1),
        versions=versions(_VERSIONS),
        records=compact_records(read_metrics(folder)),
    )
    ended = _figures(cell, result.records)
    if ended is None:
        print(
            f"{at}: failed: its last evaluation, or every rollout, gave no figure, as where the"
            " environment fails in every episode; rerun the command to train it again. See"
            f" {folder / _LOG_FILE}.",
            flush=True,
        )
        return False
    add_result(places.results, result)
    shutil.rmtree(folder)
    took = "resumed" if result.cpu_s is None else f"{result.cpu_s:.0f} CPU s"
    print(f"{at}: success {ended.before.value:.2f} -> {ended.after:.2f}, {took}", flush=True)
    return True
