"""WORKDIR/run.json: the start of a run, with its configuration and environment."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from seeupo_jax.configuration.flags import command_name
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.durable_files import write_atomically
from seeupo_jax.trajectories.json_lines import plain, read_file

RUN_FILE = "run.json"
SCHEMA = 1
PACKAGES = (
    *("seeupo_jax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint"),
    *("transformers", "tokenizers", "sentencepiece", "jinja2", "llguidance", "safetensors", "gguf"),
    *("numpy", "ml_dtypes", "grain", "array_record", "tensorflow-datasets"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin"),
)


@dataclass(frozen=True)
class Launch:
    """The command line: the configuration's file, and the command."""

    config_file: str = ""
    command: tuple[str, ...] = ()

    @classmethod
    def of_command(cls, command: str, config_file: str) -> Launch:
        """This process's command line, as it was typed."""
        return cls(config_file, (*command_name(command).split(), *sys.argv[1:]))


UNKNOWN_LAUNCH = Launch()  # how the run was begun is not known


class Resumption(NamedTuple):
    """A start of a run that was not its first.

    at: UTC, ISO 8601.
    after: the iteration (of supervised fine-tuning, the step) that it resumed after; None: written
      by a version that did not record it.
    in_sweep: whether it resumed in the sweep of the iteration that follows.
    changes: differences from the previous start, by name; None: not known.
    """

    at: str
    after: int | None = None
    in_sweep: bool = False
    changes: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def place(self) -> str:
        """Where it resumed, in words."""
        if self.after is None:
            return f"at {self.at}"
        return f"in the sweep of {self.after + 1}" if self.in_sweep else f"after {self.after}"

    def lines(self) -> list[str]:
        """A line for each change: `config.optimizer.learning_rate: 0.001 -> 0.0003`."""
        changes = {} if self.changes is None else self.changes
        return [
            f"{name}: {_typed(change, 'before')} -> {_typed(change, 'after')}"
            for name, change in changes.items()
        ]


def _typed(change: Mapping[str, Any], side: str) -> str:
    """One side of a change; - where that start had no such field."""
    if side not in change:
        return "-"
    value = change[side]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_run_manifest(
    workdir: str | Path,
    *,
    resumes: tuple[int, bool] | None,
    launch: Launch,
    config: Mapping[str, Any],
    devices: Mapping[str, Any],
    model: Mapping[str, Any],
) -> Resumption | None:
    """Writes the file; a resumed run keeps its start, and adds the changes of each resumption.

    Args:
      resumes: `after` and `in_sweep` of a `Resumption`; None: the run begins.
      devices, model: see `docs/trajectories.md`.

    Returns: the resumption, as recorded in the file.
    """
    previous = read_run_manifest(workdir) if resumes is not None else None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    settings = plain({"config": config, "versions": versions(), "devices": devices, "model": model})
    resumption = None
    if resumes is not None:
        changes = None if previous is None else _changes(previous, settings)
        resumption = Resumption(now, *resumes, changes)
    previous = previous or {}
    manifest = {
        "schema": SCHEMA,
        "name": Path(workdir).absolute().name,
        "config": settings["config"],
        "config_file": launch.config_file,
        "command": launch.command,
        "began": previous.get("began", now),
        "resumed": [
            *previous.get("resumed", ()),
            *([] if resumption is None else [resumption._asdict()]),
        ],
        "versions": settings["versions"],
        "devices": settings["devices"],
        "model": settings["model"],
        "checkpoints": previous.get("checkpoints"),
    }
    text = json.dumps(plain(manifest), indent=2) + "\n"
    write_atomically(Path(workdir) / RUN_FILE, text.encode())
    return resumption


def _changes(previous: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The differences between two starts, by dotted name, with the values `before` and `after`.

    A configuration field that one start's version did not have counts as its default.
    """
    usual = dict(flatten({"config": plain(to_dict(Config()))}))
    before, after = (
        dict(flatten({name: values.get(name, {}) for name in now})) for values in (previous, now)
    )
    changes = {}
    for name in dict.fromkeys([*after, *before]):
        sides = {
            side: values.get(name, usual.get(name))
            for side, values in (("before", before), ("after", after))
            if name in values or name in usual
        }
        if len(sides) == 1 or sides["before"] != sides["after"]:
            changes[name] = sides
    return changes


def read_resumptions(manifest: Mapping[str, Any]) -> list[Resumption]:
    """The resumptions in a manifest, also in one whose version noted their times alone."""
    entries = manifest.get("resumed")
    return [_resumption(entry) for entry in entries] if isinstance(entries, list) else []


def _resumption(entry: Any) -> Resumption:
    if not isinstance(entry, Mapping):
        return Resumption(str(entry))
    after, changes = entry.get("after"), entry.get("changes")
    readable = isinstance(changes, Mapping) and all(
        isinstance(x, Mapping) for x in changes.values()
    )
    return Resumption(
        str(entry.get("at")),
        after if isinstance(after, int) else None,
        entry.get("in_sweep") is True,
        changes if readable else None,
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted names and values; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def note_checkpoints(workdir: str | Path, folder: str) -> None:
    """Notes, once, in which folder a checkpoint of the run has been written."""
    manifest = read_run_manifest(workdir) or {}
    if manifest and manifest.get("checkpoints") != folder:
        text = json.dumps(manifest | {"checkpoints": folder}, indent=2) + "\n"
        write_atomically(Path(workdir) / RUN_FILE, text.encode())


def note_end(workdir: str | Path, iteration: int, reason: str, best: int | None) -> None:
    """Notes that the run is over.

    Args:
      iteration: its last one.
      reason: iterations: it was the last that was asked for; patience: evaluations improved no
        more.
      best: the best checkpoint, if one is compared.
    """
    manifest = read_run_manifest(workdir) or {}
    if manifest:
        ended = {"iteration": iteration, "reason": reason, "best": best}
        text = json.dumps(manifest | {"ended": ended}, indent=2) + "\n"
        write_atomically(Path(workdir) / RUN_FILE, text.encode())


def read_run_manifest(workdir: str | Path) -> dict[str, Any] | None:
    """The content of the file; None if it is missing or cannot be read."""
    return read_file(Path(workdir) / RUN_FILE)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the installed packages; this one's from its source tree too."""
    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package == "seeupo_jax":
                installed[package] = "not installed: from its source tree"
    return installed
