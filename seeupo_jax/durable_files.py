"""Files and folders that outlive a machine that stops: on the disk when a function returns.

A file's bytes reach the disk with an fsync of the file, its name with one of its folder. What makes
other files count is therefore renamed into place last, after all of these are synced.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from seeupo_jax.errors import name_file

_LOGGER = logging.getLogger(__name__)
# By file systems that cannot sync a folder, and where a folder may be written to, not read.
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_refusing: set[int] = set()  # devices of which a warning was given


def sync_file(path: str | os.PathLike[str]) -> None:
    """Waits until a file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_file(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Waits until the names in a folder are on the disk; where that is refused: one warning."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        device = os.stat(path).st_dev
        if device not in _refusing:
            _refusing.add(device)
            _LOGGER.warning(
                f"{os.fspath(path)}: folders cannot be synced there ({error.strerror}): new files"
                " may be missing after a power cut."
            )


def sync_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """As `sync_file`, of those that are regular files; a pipe or a link is left alone."""
    for path in paths:
        if stat.S_ISREG(os.lstat(path).st_mode):
            sync_file(path)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Waits until all that a folder holds is on the disk: files, then folders, itself the last."""
    for inner, _, names in os.walk(folder, topdown=False, onerror=_raise):
        sync_files(os.path.join(inner, name) for name in names)
        sync_folder(inner)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder, and those above it, where they are missing; their names are on the disk."""
    folder = Path(os.path.realpath(path))
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def move_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Renames a file that is finished, in place of an older one; at any moment one is whole."""
    sync_file(source)
    os.replace(source, target)
    sync_folder(os.path.dirname(target))


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file, and its folder: all of it or nothing, also where the machine stops.

    A link stays, and what it points to is written. What is no file, such as a pipe or /dev/null,
    stays too, and is written to. Of several processes that write one file the last one's stays;
    a killed one may leave PATH.*.tmp.

    Raises:
      OSError: it could not be written; the error names `path`.
    """
    with name_file(path):
        _write_atomically(path, data)


def _write_atomically(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        move_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def move_folder(folder: Path, unfinished: Path, previous: Path) -> None:
    """Renames a folder that is finished into its place, and removes the older one after that.

    At any moment one of them is complete: in its place or, between two renames, at `unfinished`.

    Args:
      folder: its place. unfinished: the new folder. previous: where the old one is kept meanwhile.
    """
    sync_tree(unfinished)
    sync_folder(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    unfinished.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _raise(error: OSError) -> NoReturn:
    raise error
