"""The runs of a comparison: each a training command of its own, which can be resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.loading import load_config, to_dict
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.configuration.resume_fields import without_computed
from seeupo_jax.configuration.schema import Config
from seeupo_jax.durable_files import make_folder, write_atomically
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.file_lock import try_lock
from seeupo_jax.parallel.stop_signal import Stopped, StopRequest
from seeupo_jax.trajectories.json_lines import read_file

LOG_FILE = "log.txt"
CONFIG_FILE = "config.json"
_POLL_S = 0.2
_LAST_LINES = 12
# Fields that may change when a comparison resumes, in addition to those of places and devices:
# they do not change the recorded results.
_MAY_CHANGE = ("stop_after_idle", "checkpoint", "profile", "telemetry", "evaluation.extra_splits")


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed, in a folder of its own.

    variant: the recipe, and the values of this run's swept fields.
    """

    variant: str
    seed: int
    folder: Path
    config: Config
    command: list[str]

    def __str__(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def metric(self) -> str:
        return f"eval/avg@{self.config.evaluation.k}"


class RunFailed(Exception):
    """A run ended without its last evaluation; the message gives the cause."""


def plan(
    config_file: str | Path,
    overrides: Sequence[str],
    workdir: Path,
    *,
    recipes: Sequence[str] | None,
    seeds: int,
    equal_steps: bool,
    sweep: Sequence[str] = (),
) -> list[PlannedRun]:
    """All runs of a comparison, every variant with seed 0 first.

    `stop_after_idle` is none in all of them if the file and the overrides leave it at its default:
    a run that collapses is trained to its end, too, and counts.

    Args:
      overrides: `field.sub=value`, for every run.
      recipes: names out of `RECIPES`, each once; None: the algorithm of the configuration.
      seeds: how many; they count from 0.
      equal_steps: whether recipes that update all turns at once make as many optimizer steps an
        iteration as there are turns.
      sweep: `field.sub=value,value,...`, of which every combination is a variant of each recipe.

    Raises:
      ValueError: an unknown recipe, a field that is not allowed, or a folder whose run has
        another configuration.
    """
    for number, recipe in enumerate(recipes or ()):
        if recipe not in RECIPES or recipe in recipes[:number]:
            allowed = ", ".join(RECIPES)
            raise ValueError(f"--recipes: got {recipe!r}; allowed, each once: {allowed}.")
    for field, flag in (("recipe", "--recipes"), ("seed", "--seeds")):
        if any(text.partition("=")[0] == field for text in overrides):
            raise ValueError(f"--config.{field}: each run has its own; use {flag}.")
    points = sweep_points(sweep, overrides)
    common = load_config(config_file, overrides)
    to_the_end = ["stop_after_idle=none"] * (common.stop_after_idle == Config.stop_after_idle)
    named = [(common.recipe, [])] if recipes is None else [(r, [f"recipe={r}"]) for r in recipes]
    runs = []
    for seed in range(seeds):
        for (recipe, choice), point in itertools.product(named, points):
            fields = [*to_the_end, *overrides, *choice, *point, f"seed={seed}"]
            config = load_config(config_file, fields)
            if equal_steps and updates_at_once(config.algorithm):
                parts = config.algorithm.minibatches_per_turn * config.rollout.max_turns
                fields.append(f"algorithm.minibatches_per_turn={parts}")
                config = load_config(config_file, fields)
            check_evaluated(config)
            folder = workdir / Path(*map(_folder_name, (recipe, *point))) / f"seed{seed}"
            command = [sys.executable, "-m", "seeupo_jax.train", f"--config={config_file}"]
            command += [f"--workdir={folder}", *(f"--config.{text}" for text in fields)]
            variant = " ".join((recipe, *point))
            runs.append(PlannedRun(variant, seed, folder, config, command))
            _check_same(runs[-1])
    return runs


def check_evaluated(config: Config) -> None:
    """ValueError where a run has no evaluation to be compared by."""
    if config.evaluation.patience:
        raise ValueError(
            f"config.evaluation.patience: got {config.evaluation.patience}; allowed in comparisons:"
            " none, since runs are compared after equally many iterations."
        )
    if not config.evaluation.tasks:
        raise ValueError(
            "config.evaluation.tasks: got 0; allowed in a comparison: a whole number >= 1, since"
            " runs are compared by their evaluations."
        )


def sweep_points(sweep: Sequence[str], overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of swept values, each as overrides; without a sweep, one without any.

    Raises:
      ValueError: a text without values, a value twice, or a field that is given elsewhere.
    """
    fixed = {text.partition("=")[0] for text in overrides} | {"recipe", "seed"}
    axes = []
    for text in sweep:
        field, _, given = text.partition("=")
        values = [value.strip() for value in _split(given)]
        if not field or not all(values) or len(set(values)) < len(values):
            raise ValueError(
                f"--sweep: got {text[:200]!r}; allowed: FIELD=VALUE,VALUE,... with each value once,"
                " as optimizer.learning_rate=1e-4,2e-4."
            )
        if field in fixed:
            raise ValueError(
                f"--sweep: got the field {field!r}; allowed: each field once, and none that"
                " --recipes, --seeds or --config.FIELD sets."
            )
        fixed.add(field)
        axes.append([f"{field}={value}" for value in values])
    return list(itertools.product(*axes))


def _split(text: str) -> list[str]:
    """Values with commas between them; commas inside of brackets belong to a value."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values


def _folder_name(text: str) -> str:
    """A name of a recipe or of a field with its value that is short, and its own, as a folder's."""
    name = re.sub(r"[^\w.=+-]", "_", text)
    if name == text and len(name) <= 100:
        return name
    return f"{name[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def updates_at_once(algorithm: Algorithm) -> bool:
    """Whether an iteration is one update of all turns."""
    return algorithm.order == "parallel" or algorithm.turns_per_update is None


def finished(run: PlannedRun, lines: Sequence[dict[str, Any]]) -> bool:
    """Whether these lines hold the evaluation after the last iteration."""
    last = run.config.iterations
    return any(line["iteration"] == last and run.metric in line for line in lines)


def recorded(run: PlannedRun) -> list[dict[str, Any]]:
    """Its metrics up to its last iteration: an earlier comparison may have trained it longer."""
    lines = read_metrics(run.folder)
    return [line for line in lines if line["iteration"] <= run.config.iterations]


def train_all(runs: Sequence[PlannedRun]) -> int:
    """Trains the unfinished runs one after the other, and prints a line for each.

    Returns:
      How many failed.

    Raises:
      Stopped: SIGTERM or Ctrl-C; the run under way has saved what it needs to resume.
    """
    failed = 0
    with StopRequest() as request:
        for number, run in enumerate(runs, 1):
            if request.asked:
                raise Stopped(f"stopped before {run}; rerun the command to resume")
            try:
                outcome = _train_unless_finished(run, request)
            except RunFailed as error:
                failed += 1
                outcome = str(error)
            print(f"[{number}/{len(runs)}] {run}: {outcome}", flush=True)
    return failed


def _train_unless_finished(run: PlannedRun, request: StopRequest) -> str:
    """The run's result in words."""
    took = "finished before"
    if not finished(run, recorded(run)):
        began = time.monotonic()
        train(run, request)
        took = f"{time.monotonic() - began:.0f} s"
    scores = [line[run.metric] for line in recorded(run) if run.metric in line]
    before, after = ("-" if s is None else f"{s:.2f}" for s in (scores[0], scores[-1]))
    return f"success {before} -> {after}, {took}"


def train(run: PlannedRun, request: StopRequest) -> None:
    """Trains one run, or the rest of it; its output goes to log.txt in its folder.

    Raises:
      RunFailed: it ended, but not with its last evaluation.
      Stopped: it was asked to stop and did.
    """
    make_folder(run.folder)
    with (run.folder / LOG_FILE).open("ab") as log:
        # The run inherits the lock with the file, so it outlives this process if need be.
        if not try_lock(log):
            raise RunFailed("another process trains it")
        config = json.dumps(to_dict(run.config), indent=2) + "\n"
        write_atomically(run.folder / CONFIG_FILE, config.encode())
        before = log.tell()
        # In a session of its own, Ctrl-C reaches it once: from here.
        process = subprocess.Popen(
            run.command,
            env={name: x for name, x in os.environ.items() if name != "WANDB_RUN_ID"},  # of one run
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = _wait(process, request)
    if finished(run, recorded(run)):
        return
    if request.asked:
        raise Stopped(f"stopped in {run}; rerun the command to resume")
    path = run.folder / LOG_FILE
    last = path.read_bytes()[before:].decode(errors="replace").splitlines()[-_LAST_LINES:]
    raise RunFailed(
        f"failed with exit code {code}; {path} ends with\n" + "\n".join(f"    {t}" for t in last)
    )


def _wait(process: subprocess.Popen[bytes], request: StopRequest) -> int:
    """The exit code; a request to stop is passed on once."""
    passed_on = False
    try:
        while process.poll() is None:
            if request.asked and not passed_on:
                process.send_signal(signal.SIGTERM)
                passed_on = True
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:  # a second Ctrl-C
            process.kill()
            process.wait()
    return process.returncode


def _check_same(run: PlannedRun) -> None:
    """A folder's run resumes, or counts as finished, with its own configuration only."""
    path = run.folder / CONFIG_FILE
    if not path.exists():
        return
    saved = read_file(path)
    if saved is None:
        raise ValueError(
            f"--workdir: got {path}, which holds no configuration; allowed: what this command wrote"
            " there, or another workdir."
        )
    mine = without_computed(json.loads(json.dumps(to_dict(run.config))))
    saved = without_computed(saved)
    for field, value, saved_value in _changes(run.config, mine, saved):
        if any(f"{field}.".startswith(f"{name}.") for name in _MAY_CHANGE):
            continue
        schedule = run.config.optimizer.schedule
        if field == "iterations" and schedule == "constant":
            continue
        why = f" with optimizer.schedule={schedule}, which depends on it" * (field == "iterations")
        raise ValueError(
            f"config.{field}: got {value!r}{why}; allowed for {run.folder}, which has a run with"
            f" it: {saved_value!r}. Choose a new workdir for another comparison."
        )


def _changes(
    group: Any, mine: Mapping[str, Any], saved: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Fields that differ, with both values; a field that is missing in a saved group is newer than
    the run.

    Args:
      group: a dataclass of the configuration. mine: its fields as JSON has them.
    """
    for name, value in mine.items():
        if name not in saved:
            continue
        if dataclasses.is_dataclass(vars(group)[name]) and isinstance(saved[name], dict):
            yield from _changes(vars(group)[name], value, saved[name], f"{prefix}{name}.")
        elif saved[name] != value:  # a dict of free form is one value
            yield f"{prefix}{name}", value, saved[name]
