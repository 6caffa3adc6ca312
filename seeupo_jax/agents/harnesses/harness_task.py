"""The task of a harness: an instruction, the files to work on, and the check of what was done."""

from __future__ import annotations

import reprlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any


@dataclass(frozen=True)
class HarnessTask:
    """A task.

    instruction: the user's message to the harness.
    check: a command line of `sh`, run in the episode's folder after the harness has ended; it
      succeeds with exit code 0, which is reward 1.
    folder: copied into the episode's folder; "": none. files: written there, by relative path.
    check_files: written before the check, over what the harness may have made of them.
    """

    instruction: str
    check: str
    folder: str = ""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    check_files: Mapping[str, str] = field(default_factory=dict[str, str])

    def prepare(self, work: Path, start: Path) -> None:
        """Fills the episode's folder; `start`: what `folder` is relative to."""
        if self.folder:
            shutil.copytree(start / self.folder, work, symlinks=True, dirs_exist_ok=True)
        write_files(work, self.files)


def read_harness_task(data: Mapping[str, Any] | None) -> HarnessTask:
    """Reads a task's data; fields of other names are for people.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    data = {} if data is None else data
    for name in ("instruction", "check"):
        if not isinstance(data.get(name), str) or not data[name].strip():
            raise ValueError(f"{name}: got {_got(data, name)}; allowed: a text.")
    folder = data.get("folder") or ""
    if not isinstance(folder, str):
        raise ValueError(f"folder: got {_got(data, 'folder')}; allowed: a folder's path.")
    files = {name: _read_files(data, name) for name in ("files", "check_files")}
    return HarnessTask(data["instruction"], data["check"], folder, **files)


def check_harness_task(data: Mapping[str, Any]) -> None:
    """Checks a task's data where the run is started.

    Raises:
      ValueError: as of `read_harness_task`, also if the task's folder is not there.
    """
    folder = read_harness_task(data).folder
    if folder and not Path(folder).is_dir():
        allowed = "a folder that is there, relative to the folder in which the run is started"
        raise ValueError(f"folder: got {reprlib.repr(folder)}; allowed: {allowed}.")


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes texts to new files by their relative paths; a link in the place of one is removed."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _read_files(data: Mapping[str, Any], name: str) -> dict[str, str]:
    files = data.get(name) or {}
    if not isinstance(files, Mapping):
        raise ValueError(f"{name}: got {_got(data, name)}; allowed: texts by relative path.")
    # A table has the files of all its rows in each, with null for those that one lacks.
    files = {path: text for path, text in files.items() if text is not None}
    for path, text in files.items():
        place = PurePosixPath(path)
        if not isinstance(text, str) or not place.parts or place.is_absolute():
            got = f"{reprlib.repr(path)}: {reprlib.repr(text)}"
            raise ValueError(f"{name}: got {got}; allowed: texts by relative path.")
        if ".." in place.parts:
            raise ValueError(f"{name}: got {reprlib.repr(path)}; allowed: paths without `..`.")
    return files


def _got(data: Mapping[str, Any], name: str) -> str:
    return "none" if data.get(name) is None else reprlib.repr(data[name])
