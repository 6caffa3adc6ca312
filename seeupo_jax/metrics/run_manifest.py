"""WORKDIR/run.json: how a run was begun, and with what."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.flags import command_name
from seeupo_jax.durable_files import write_atomically
from seeupo_jax.trajectories.json_lines import plain, read_file

RUN_FILE = "run.json"
SCHEMA = 1
_PACKAGES = (
    *("seeupo_jax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint"),
    *("transformers", "sentencepiece", "numpy"),
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


def write_run_manifest(
    workdir: str | Path,
    *,
    resumed: bool,
    launch: Launch,
    config: Mapping[str, Any],
    devices: Mapping[str, Any],
    model: Mapping[str, Any],
) -> None:
    """Writes the file; a resumed run keeps its start time and adds the time of resuming.

    Args:
      resumed: whether the run resumes from a checkpoint.
      devices, model: see `docs/trajectories.md`.
    """
    previous = (read_run_manifest(workdir) if resumed else None) or {}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = {
        "schema": SCHEMA,
        "name": Path(workdir).absolute().name,
        "config": config,
        "config_file": launch.config_file,
        "command": launch.command,
        "began": previous.get("began", now),
        "resumed": [*previous.get("resumed", ()), *([now] if resumed else ())],
        "versions": versions(),
        "devices": devices,
        "model": model,
        "checkpoints": previous.get("checkpoints"),
    }
    text = json.dumps(plain(manifest), indent=2) + "\n"
    write_atomically(Path(workdir) / RUN_FILE, text.encode())


def note_checkpoints(workdir: str | Path, folder: str) -> None:
    """Notes, once, in which folder a checkpoint of the run has been written."""
    manifest = read_run_manifest(workdir) or {}
    if manifest and manifest.get("checkpoints") != folder:
        text = json.dumps(manifest | {"checkpoints": folder}, indent=2) + "\n"
        write_atomically(Path(workdir) / RUN_FILE, text.encode())


def read_run_manifest(workdir: str | Path) -> dict[str, Any] | None:
    """What the file says; None where there is none, or none that can be read."""
    return read_file(Path(workdir) / RUN_FILE)


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of the installed packages; this one's from its source tree too."""
    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package == "seeupo_jax":
                installed[package] = "not installed: from its source tree"
    return installed
