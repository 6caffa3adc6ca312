"""A run as read from its folder: `metrics.jsonl`, `run.json`, and when they last changed."""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.schema import Evaluation
from seeupo_jax.metrics.metrics_log import METRICS_FILE, read_metrics
from seeupo_jax.metrics.phases import total_time
from seeupo_jax.metrics.run_manifest import (
    RUN_FILE,
    Resumption,
    flatten,
    read_resumptions,
    read_run_manifest,
)
from seeupo_jax.metrics.statistics import read_estimates, split_and_metric
from seeupo_jax.trajectories.reader import FOLDER

# Of which a run's folder has at least one, also of a run just started or only evaluated.
_OF_A_RUN = (METRICS_FILE, RUN_FILE, FOLDER, "evaluation", "checkpoints")
_NAMED = 8  # runs in a folder that is none itself
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]{1,3})?")


@dataclass(frozen=True)
class RunData:
    """The recorded data of a run, whether it is finished, training, or copied elsewhere.

    name: the folder's, with parent folders where two runs would have the same name.
    lines: of metrics, in order.
    about: the content of run.json; an empty `config` for a run without the file.
    age_s: seconds since the last line was written, by the file's time; None without metrics.
    """

    name: str
    workdir: Path
    lines: Sequence[Mapping[str, Any]]
    about: Mapping[str, Any]
    age_s: float | None

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Iterations and values of a metric, where it is a finite number."""
        return [(i, value) for i, value in self.recorded(metric) if value is not None]

    def recorded(self, metric: str) -> list[tuple[int, float | None]]:
        """As `series`, with None where the metric was recorded as missing."""
        values = [(line["iteration"], line[metric]) for line in self.lines if metric in line]
        return [
            (i, None if value is None else float(value))
            for i, value in values
            if value is None or is_number(value)
        ]

    def keyed(self, prefix: str) -> list[tuple[str, str]]:
        """Metric names with a prefix: the part after it, and the whole name, in natural order."""
        names = {name for line in self.lines for name in line if name.startswith(prefix)}
        return sorted(((n.removeprefix(prefix), n) for n in names), key=lambda e: natural(e[0]))

    @functools.cached_property  # every kind of task asks for it
    def evaluations(self) -> dict[str, str]:
        """Names of metrics of evaluations by what they are called, such as `test avg@4`."""
        keys = dict.fromkeys(key for line in self.lines for key in read_estimates(line))
        return {" ".join(split_and_metric(key, self.split)): key for key in keys}

    def setting(self, name: str) -> Any:
        """A value of the configuration by its dotted name; None where it is not known."""
        return dict(flatten(self.about["config"])).get(name)

    @property
    def resumptions(self) -> list[Resumption]:
        """Starts of the run after its first one."""
        return read_resumptions(self.about)

    @property
    def split(self) -> str:
        """The split that metrics named `eval/` were measured on; the default if not recorded."""
        split = self.setting("evaluation.split")
        return split if isinstance(split, str) else Evaluation().split

    @property
    def done(self) -> int:
        """Iterations that are over."""
        return max((line["iteration"] for line in self.lines), default=0)

    @property
    def planned(self) -> int | None:
        planned = self.setting("iterations")
        return planned if isinstance(planned, int) else None

    @property
    def supervised(self) -> bool:
        """Whether it is one of supervised fine-tuning, whose iterations are its steps."""
        return any("sft/loss" in line for line in self.lines)

    @property
    def seconds(self) -> float:
        """Seconds that the metrics account for."""
        return sum(map(total_time, self.lines))

    @property
    def finished(self) -> bool:
        """Whether the last iteration is over and, where the run evaluates, was evaluated.

        It may also be over since the held-out loss of supervised fine-tuning, or the success of
        evaluations, had stopped to improve.
        """
        patience, worse = self.setting("sft.patience"), self.series("eval/worse")
        if is_number(patience) and worse and worse[-1][1] >= patience:
            return True
        ended = self.about.get("ended") or {}
        if ended.get("reason") == "patience":
            return True
        if self.planned is None or self.done < self.planned:
            return False
        evaluated = [
            line["iteration"] for line in self.lines if any(k.startswith("eval") for k in line)
        ]
        return not evaluated or max(evaluated) >= self.planned


def load_runs(workdirs: Sequence[Path]) -> list[RunData]:
    """The runs in these folders, each with a name of its own.

    Raises:
      ValueError: no such folder, or metrics in it that are none.
    """
    folders = [Path(os.path.abspath(workdir)) for workdir in workdirs]
    return [_load(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def check_run(flag: str, folder: Path) -> None:
    """ValueError where a folder holds nothing that a run writes; it names runs inside, if any."""
    if not folder.is_dir():
        raise ValueError(f"--{flag}: got {folder}; allowed: the folder of a run.")
    if _of_a_run(folder):
        return
    runs = sorted((each.name for each in folder.iterdir() if _of_a_run(each)), key=natural)
    more = ", ..." if len(runs) > _NAMED else ""
    inside = f", which holds runs: {', '.join(runs[:_NAMED])}{more}"
    got = f"{folder}{inside if runs else ', which holds nothing of a run'}"
    raise ValueError(f"--{flag}: got {got}; allowed: the folder of a run.")


def _of_a_run(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in _OF_A_RUN)


def _load(workdir: Path, name: str) -> RunData:
    if not workdir.is_dir():
        raise ValueError(f"--workdir: got {workdir}; allowed: the folder of a run.")
    file = workdir / METRICS_FILE
    age_s = max(0.0, time.time() - file.stat().st_mtime) if file.exists() else None
    about = read_run_manifest(workdir) or {}
    if not isinstance(about.get("config"), dict):
        about = {**about, "config": {}}
    return RunData(name, workdir, read_metrics(workdir), about, age_s)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parent folders as make them distinct."""
    names: list[str] = []
    for folder in folders:
        twins = [f for f in folders if f != folder and f.name == folder.name]
        depth = 1
        while any(f.parts[-depth:] == folder.parts[-depth:] for f in twins):
            depth += 1
        name = "/".join(folder.parts[-depth:])
        repeats = names.count(name)
        names.append(f"{name} ({repeats + 1})" if repeats else name)
    return names


def is_number(value: Any) -> bool:
    """Whether a value of a line of metrics is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def natural(text: str) -> list[tuple[Decimal | float, str]]:
    """A sort key by which `turns=10` comes after `turns=2`, and numbers alone in their order."""
    if _NUMBER.fullmatch(text):
        return [(Decimal(text), "")]
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(int(part), "") if part.isdecimal() else (-math.inf, part) for part in parts]
