"""The folder of published policies: each version a folder, there whole or not at all.

A version is written into a folder of another name and renamed once it is on the disk. Its identity
is a digest of all its bytes: a run that was resumed from an older checkpoint may publish a version
again with other bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from seeupo_jax.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    check_files,
    describe_files,
    read_manifest,
    remove_manifest,
    write_manifest,
)
from seeupo_jax.durable_files import make_folder, sync_folder
from seeupo_jax.errors import reason

FOLDER = "weights"  # in a run's workdir
KEPT = 2  # versions: samplers may still read the one before the newest
_NAME = re.compile("0|[1-9][0-9]*")  # of a version's folder
_UNFINISHED = ".unfinished"


class UnusableVersion(Exception):
    """Why a version cannot be read; the text is a sentence.

    gone: the trainer has removed or replaced it meanwhile; the newest one can be read. Otherwise
    it is damaged.
    """

    def __init__(self, sentence: str, *, gone: bool):
        super().__init__(sentence)
        self.gone = gone


def versions(folder: Path) -> list[int]:
    """The whole versions in a folder, the newest last; a folder that is not there has none."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            if _NAME.fullmatch(name) and (folder / name / MANIFEST).is_file():
                found.append(int(name))
    return sorted(found)


def newest_version(folder: Path) -> int | None:
    """The newest version that is whole; None: there is none."""
    return max(versions(folder), default=None)


def identity(manifest: Mapping[str, Any]) -> str:
    """A digest of a version's manifest, and so of all its bytes: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def checked_version(folder: Path) -> Generator[dict[str, Any]]:
    """A version while it is read: its manifest, after every file is compared with it.

    Args:
      folder: of the version.

    Raises:
      UnusableVersion: before or after the reading.
    """
    manifest = None
    try:
        manifest = read_manifest(epath.Path(folder))
        check_files(epath.Path(folder), manifest["files"])
        yield manifest
    except Exception as error:
        gone = not _is_there(folder, manifest)
        if not gone and not isinstance(error, (DamagedCheckpoint, OSError)):
            raise
        if not gone:
            raise UnusableVersion(f"{folder} {_damage(error)}.", gone=False) from error
    else:
        gone = not _is_there(folder, manifest)
    if gone:
        sentence = f"{folder} was removed or replaced while it was read; read the newest version."
        raise UnusableVersion(sentence, gone=True)


def begin_version(folder: Path) -> Path:
    """An empty folder to write a version into; what a killed process has left of one is removed."""
    make_folder(folder)
    drop_unfinished(folder)
    unfinished = folder / _UNFINISHED
    unfinished.mkdir()
    return unfinished


def finish_version(folder: Path, version: int, arrays: Mapping[str, str]) -> dict[str, Any]:
    """Makes what was written the newest version, in one moment, and removes what is not kept.

    The same version with other bytes, and newer ones, are removed before: the run was resumed from
    an older checkpoint.

    Args:
      arrays: types and shapes by name, for the manifest.

    Returns: the manifest: `version`, `arrays`, and `files` with their sizes and SHA-256.
    """
    unfinished = epath.Path(folder / _UNFINISHED)
    files = describe_files(unfinished, unfinished)
    manifest = {"version": version, "arrays": dict(arrays), "files": files}
    write_manifest(unfinished, manifest)
    _put(folder, manifest)
    return manifest


def receive_version(folder: Path, version: int, fetch: Callable[[str, Path], None]) -> Path:
    """Copies a version from elsewhere into a folder, whole or not at all.

    It is the newest then, as after `finish_version`.

    Args:
      folder: of this process alone.
      fetch: copies a file of the version, by its name, to a path.

    Returns: its folder.

    Raises:
      UnusableVersion: what came is not what was published. Whatever `fetch` raises.
    """
    unfinished = begin_version(folder)
    try:
        fetch(MANIFEST, unfinished / MANIFEST)
        for file in read_manifest(epath.Path(unfinished))["files"]:
            if Path(file).name != file:
                raise DamagedCheckpoint(f"names the file {file}, which is outside of it")
            fetch(file, unfinished / file)
        manifest = _read_checked(unfinished)
        if manifest["version"] != version:
            raise DamagedCheckpoint(f"is version {manifest['version']}")
        _put(folder, manifest)
    except DamagedCheckpoint as error:
        sentence = f"version {version}, as received in {folder}, {error}."
        raise UnusableVersion(sentence, gone=False) from error
    finally:
        drop_unfinished(folder)
    return folder / str(version)


def drop_unfinished(folder: Path) -> None:
    """Removes what is left of a version that was not finished."""
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)


def _put(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Renames the unfinished version into its place, unless the same bytes are there."""
    version = manifest["version"]
    for newer in [each for each in versions(folder) if each > version]:
        _remove(folder / str(newer))
    place = folder / str(version)
    if not _holds(place, manifest):
        _remove(place)
        (folder / _UNFINISHED).rename(place)
    drop_unfinished(folder)
    # The version is there: what fails now is no failure of it.
    with contextlib.suppress(OSError):
        sync_folder(folder)
        for old in versions(folder)[:-KEPT]:
            _remove(folder / str(old))


def _read_checked(folder: Path) -> dict[str, Any]:
    """The manifest of a version, with which every file is compared."""
    manifest = read_manifest(epath.Path(folder))
    check_files(epath.Path(folder), manifest["files"])
    return manifest


def _is_there(folder: Path, manifest: Mapping[str, Any] | None) -> bool:
    """Whether a version has this manifest still; None: any."""
    try:
        found = read_manifest(epath.Path(folder))
    except FileNotFoundError:
        return False
    except (DamagedCheckpoint, OSError):
        return True
    return manifest is None or found == manifest


def _holds(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether a version with this manifest is there, undamaged."""
    try:
        return _read_checked(folder) == manifest
    except (DamagedCheckpoint, OSError):
        return False


def _remove(folder: Path) -> None:
    """Removes a version so that it never counts while it is only half there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        remove_manifest(epath.Path(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _damage(error: Exception) -> str:
    """The end of a sentence that begins with a version's folder."""
    if isinstance(error, DamagedCheckpoint):
        return str(error)
    named = f" {error.filename}" if getattr(error, "filename", None) else ""
    return f"cannot be read ({reason(error)}{named})"
