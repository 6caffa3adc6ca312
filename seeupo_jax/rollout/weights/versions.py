"""The folder of published policies: each version a folder, there whole or not at all.

A version is written into a folder of another name and renamed once it is on the disk. Its own name
is `VERSION-DIGEST`: a run that was resumed from an older checkpoint gives other bytes another name,
and the same bytes the same, which a worker need not copy again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from seeupo_jax.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    check_files,
    read_manifest,
    remove_manifest,
)
from seeupo_jax.durable_files import make_folder, sync_folder

FOLDER = "weights"  # in a run's workdir
KEPT = 2  # versions: samplers may still read the one before the newest
_NAME = re.compile(r"(\d+)-([0-9a-f]{12})")
_UNFINISHED = ".unfinished"


class Version(NamedTuple):
    """A published policy: sweeps behind it, and its folder's name, which no other bytes have."""

    number: int
    name: str


def versions(folder: Path) -> list[Version]:
    """The whole versions in a folder, the newest last; a folder that is not there has none."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            named = _NAME.fullmatch(name)
            if named is not None and (folder / name / MANIFEST).is_file():
                found.append(Version(int(named[1]), name))
    return sorted(found)


def newest_version(folder: str | os.PathLike[str]) -> int | None:
    """The newest version that is whole; None: there is none."""
    there = versions(Path(folder))
    return there[-1].number if there else None


def check_version(folder: Path, name: str) -> dict[str, Any]:
    """The manifest of a version, each of whose files is as it was published.

    Returns: `version`, `arrays` (their types, by name), and `files` with their sizes and SHA-256.

    Raises:
      DamagedCheckpoint: it is not what was published. OSError: it is gone, or cannot be read.
    """
    inside = epath.Path(folder / name)
    manifest = read_manifest(inside)
    check_files(inside, manifest["files"])
    return manifest


def begin_version(folder: Path) -> Path:
    """An empty folder to write a version into; what a killed process has left of one is removed."""
    make_folder(folder)
    drop_unfinished(folder)
    unfinished = folder / _UNFINISHED
    unfinished.mkdir()
    return unfinished


def finish_version(folder: Path, version: int) -> Version:
    """Makes what was written the newest version, in one moment, and removes what is not kept.

    The same and newer ones with other bytes, of a run that was resumed from an older checkpoint,
    are removed before.
    """
    unfinished = folder / _UNFINISHED
    made = Version(version, f"{version}-{_digest(unfinished)}")
    for other in versions(folder):
        if other.number >= version and other != made:
            remove_version(folder, other)
    if made in versions(folder):
        drop_unfinished(folder)
    else:
        shutil.rmtree(folder / made.name, ignore_errors=True)  # removed by half
        unfinished.rename(folder / made.name)
        sync_folder(folder)
    for old in versions(folder)[:-KEPT]:
        remove_version(folder, old)
    return made


def drop_unfinished(folder: Path) -> None:
    """Removes what is left of a version that was not finished."""
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)


def remove_version(folder: Path, version: Version) -> None:
    """Removes a version so that it never counts while it is only half there."""
    with contextlib.suppress(FileNotFoundError):
        remove_manifest(epath.Path(folder / version.name))
    shutil.rmtree(folder / version.name, ignore_errors=True)


def receive_version(folder: Path, name: str, fetch: Callable[[str, Path], None]) -> Version:
    """Copies a version from elsewhere into a folder, whole or not at all, unless it is there.

    It is the newest then: newer ones that the folder has are removed, as by `finish_version`.

    Args:
      folder: of this process alone.
      name: of the version's folder there.
      fetch: copies a file of the version, by its name, to a path.

    Raises:
      DamagedCheckpoint: what came is not what was published. Whatever `fetch` raises.
    """
    named = _NAME.fullmatch(name)
    if named is None:
        raise DamagedCheckpoint(f"is called {name!r}, which is no name of a version")
    version = Version(int(named[1]), name)
    if versions(folder)[-1:] == [version]:
        return version
    unfinished = begin_version(folder)
    try:
        _receive(unfinished, name, fetch)
        finish_version(folder, version.number)
    finally:
        drop_unfinished(folder)
    return version


def _receive(unfinished: Path, name: str, fetch: Callable[[str, Path], None]) -> None:
    fetch(MANIFEST, unfinished / MANIFEST)
    files = read_manifest(epath.Path(unfinished))["files"]
    if name.partition("-")[2] != _digest(unfinished):
        raise DamagedCheckpoint("has another manifest than its name says")
    for file in files:
        if Path(file).name != file:
            raise DamagedCheckpoint(f"names the file {file}, which is outside of it")
        fetch(file, unfinished / file)
    check_files(epath.Path(unfinished), files)


def _digest(folder: Path) -> str:
    """What the name of a version has of the SHA-256 of its manifest, and so of all its bytes."""
    manifest = read_manifest(epath.Path(folder))
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]
