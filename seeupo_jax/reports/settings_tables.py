"""Tables of the report: configurations and versions side by side, and failures."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from seeupo_jax.metrics.run_manifest import RUN_FILE, flatten
from seeupo_jax.reports.run_data import RunData, natural
from seeupo_jax.reports.sections import Section, Table, TableRow
from seeupo_jax.trajectories.reader import find_shards, read_shard

_ABOUT = ("model", "devices", "versions", "config_file", "command", "began", "resumed")
_UNKNOWN = "(cause not recorded)"


def configuration_table(runs: Sequence[RunData]) -> Table | None:
    """Every field of the runs' configurations; None where no run recorded one."""
    with_config = [run for run in runs if run.about["config"]]
    return _table(
        "Configuration", "field", with_config, [run.about["config"] for run in with_config]
    )


def versions_table(runs: Sequence[RunData]) -> Table | None:
    """The table of the runs' model, devices, software versions and command."""
    with_versions = [run for run in runs if "versions" in run.about]
    abouts = [{key: run.about[key] for key in _ABOUT if key in run.about} for run in with_versions]
    for run, about in zip(with_versions, abouts, strict=True):
        if "resumed" in about:
            about["resumed"] = [each.at for each in run.resumptions]
    return _table("Versions", "what", with_versions, abouts)


def changes_table(runs: Sequence[RunData]) -> Table | None:
    """The settings that changed at each resumption; None if no run resumed with changes.

    The configuration and the versions are those of the last start.
    """
    rows = []
    for run in runs:
        for each in run.resumptions:
            lines = ["not recorded"] if each.changes is None else each.lines() or ["nothing"]
            name = [] if len(runs) == 1 else [run.name]
            rows += [TableRow([each.place, *name, each.at, line]) for line in lines]
    header = ["resumed", *(["run"] if len(runs) > 1 else []), "at", "what changed"]
    return Table("Changes on resuming", header, rows) if rows else None


def unrecorded(runs: Sequence[RunData]) -> str:
    """Which runs wrote no run.json, in a sentence; empty where all did."""
    names = [run.name for run in runs if not run.about["config"]]
    if not names:
        return ""
    return f"Without {RUN_FILE}, so that configuration and versions are not known: " + (
        ", ".join(names) + "."
    )


def _table(
    caption: str, what: str, runs: Sequence[RunData], values: Sequence[Mapping[str, Any]]
) -> Table | None:
    flat = [dict(flatten(fields)) for fields in values]
    names = sorted(dict.fromkeys(name for fields in flat for name in fields), key=natural)
    rows = []
    for name in names:
        cells = [_text(fields[name]) if name in fields else "-" for fields in flat]
        exact = [_json(fields[name]) if name in fields else "-" for fields in flat]
        if len(set(cells)) < len(set(exact)):  # as of 1 and "1"
            cells = exact
        rows.append(TableRow([name, *cells], marked=len(set(exact)) > 1))
    return Table(caption, [what, *(run.name for run in runs)], rows) if rows else None


def _text(value: Any) -> str:
    """A value as it would be typed; a command as it was."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return " ".join(value)
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def failures_section(runs: Sequence[RunData]) -> Section:
    """Why environments failed: of rollouts by the metrics, of evaluations by the trajectories."""
    rows = []
    for run in runs:
        for (where, cause), iterations in sorted(_failures(run).items()):
            span = f"{min(iterations)} to {max(iterations)}"
            run_name = [] if len(runs) == 1 else [run.name]
            rows.append(TableRow([cause, *run_name, where, f"{sum(iterations.values()):g}", span]))
    if not rows:
        return Section("failures", "Failures", "No environment failed.")
    header = ["cause", *(["run"] if len(runs) > 1 else []), "in", "episodes", "iterations"]
    intro = "Episodes whose environment failed are in no statistic and in no update."
    return Section("failures", "Failures", intro, tables=[Table("Failures by cause", header, rows)])


def _failures(run: RunData) -> dict[tuple[str, str], Counter[int]]:
    """How many episodes failed in each iteration, by where and why."""
    counts: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for where, metric, causes in _failing(run):
        attributed: Counter[int] = Counter()
        for iteration, cause, count in causes:
            attributed[iteration] += count
            counts[where, cause][iteration] += count
        for iteration, count in run.series(metric):
            if count > attributed[iteration]:
                counts[where, _UNKNOWN][iteration] += count - attributed[iteration]
    return counts


def _failing(run: RunData) -> Iterator[tuple[str, str, list[tuple[int, str, float]]]]:
    """Where episodes can fail, the metric that counts them, and the causes that are recorded: of
    evaluations in the trajectories, of which only shards with failures are read."""
    keyed = run.keyed("rollout/failed/cause=")
    causes = [(i, cause, n) for cause, name in keyed for i, n in run.series(name)]
    yield "rollouts", "rollout/failed", causes
    for name in (name for _, name in run.keyed("eval") if name.endswith("/failed")):
        prefix = name.removesuffix("/failed")
        split = run.split if prefix == "eval" else prefix.removeprefix("eval_")
        iterations = [iteration for iteration, count in run.series(name) if count]
        records = _failed_records(run, split, iterations)
        causes = [(r["iteration"], r["failure"] or _UNKNOWN, 1.0) for r in records]
        yield f"evaluation on {split}", name, causes


def _failed_records(run: RunData, split: str, iterations: list[int]) -> Iterator[dict[str, Any]]:
    for shard in find_shards(run.workdir) if iterations else ():
        if shard.evaluation and shard.split == split and shard.iteration in iterations:
            # A training run has just removed it, or it is damaged, which its pages report.
            with contextlib.suppress(OSError, ValueError):
                records = read_shard(shard.path(run.workdir))
                yield from (record for record in records if record["failed"])
