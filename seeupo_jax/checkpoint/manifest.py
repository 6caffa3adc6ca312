"""The manifest of a checkpoint: its notes, its leaves, and every file's size and SHA-256."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

from seeupo_jax.checkpoint.storage import is_bucket
from seeupo_jax.durable_files import move_file, sync_files, sync_folder, sync_tree
from seeupo_jax.errors import name_file
from seeupo_jax.parallel.host_cores import usable_cores

MANIFEST = "manifest.json"
STATE = "state"
_UNFINISHED = f"{STATE}.orbax-checkpoint-tmp"  # how Orbax names the state until it is written
_UNFINISHED_MANIFEST = f"{MANIFEST}.unfinished"
# What it makes in a state.
_OF_ORBAX = ("state", "_CHECKPOINT_METADATA", "orbax.checkpoint", "commit_success.txt")
_INDEX = f"{STATE}/state/manifest.ocdbt"  # says where every array is
_READERS = min(8, usable_cores())  # hashing lets other threads run


class DamagedCheckpoint(Exception):
    """Why a checkpoint cannot be used, as the end of a sentence that starts with its name."""


def is_checkpoint(folder: epath.Path) -> bool:
    """Whether a folder is a checkpoint, finished or not, by what is in it.

    Its name does not decide: a user may have a folder 2024. An empty one is an interrupted save,
    and one with an empty state, or with no more than a begun manifest, an interrupted removal.
    """
    # Another process may be removing it; what is closed to this user is not ours.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if not folder.is_dir():
            return False
        inside = {path.name for path in folder.iterdir()}
        if MANIFEST in inside:
            return STATE in inside or _is_sealed(folder)
        if any(name.startswith(_UNFINISHED) for name in inside):
            return True
        state = folder / STATE
        parts = {path.name for path in state.iterdir()} if state.is_dir() else set()
        no_more = inside <= {STATE, _UNFINISHED_MANIFEST} and not parts
        return no_more or not parts.isdisjoint(_OF_ORBAX)
    return False


def list_files(folder: epath.Path) -> dict[str, dict[str, Any]]:
    """Every file of a state with its size and its digest.

    Raises:
      OSError: Orbax, which only warns then, has not put together what the processes wrote.
    """
    files = describe_files(folder, folder / STATE)
    if _INDEX not in files:
        raise OSError(f"Orbax left no {_INDEX}, without which it cannot be loaded")
    return files


def describe_files(folder: epath.Path, below: epath.Path) -> dict[str, dict[str, Any]]:
    """Every file below a folder by its path in `folder`, with its size and its digest."""
    paths = list(_walk(below))
    names = [path.relative_to(folder).as_posix() for path in paths]

    def describe(path: epath.Path) -> dict[str, Any]:
        return {"bytes": path.stat().length, "sha256": _digest(path)}

    with ThreadPoolExecutor(_READERS) as readers:
        described = list(readers.map(describe, paths))
    return dict(zip(names, described, strict=True))


def _walk(folder: epath.Path) -> Iterator[epath.Path]:
    """All files below a folder; epath's own walk leaves the scheme out of a bucket's paths."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def check_files(
    folder: epath.Path, files: Mapping[str, Mapping[str, Any]], *, hashes: bool = True
) -> None:
    """Compares files with what was written.

    Args:
      hashes: whether they are read; else only their sizes are compared.

    Raises:
      DamagedCheckpoint: one of them is missing or has changed.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        for _ in readers.map(lambda name: _check_file(folder, name, files[name], hashes), files):
            pass


def _check_file(folder: epath.Path, name: str, file: Mapping[str, Any], hashes: bool) -> None:
    path = folder / name
    if not path.is_file():
        raise DamagedCheckpoint(f"lacks its file {name}")
    size = path.stat().length
    if size != file["bytes"]:
        raise DamagedCheckpoint(f"has {size} bytes in {name} where {file['bytes']} were written")
    if hashes and file["sha256"] is not None and _digest(path) != file["sha256"]:
        raise DamagedCheckpoint(f"has a file {name} that changed after it was written")


def _digest(path: epath.Path) -> str:
    with name_file(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: epath.Path, manifest: Mapping[str, Any]) -> None:
    """Makes the folder a checkpoint, at one moment, once all that it holds is on the disk.

    Raises:
      OSError: something is not on the disk; the folder is no checkpoint.
    """
    text = json.dumps({"sha256": _seal(manifest), "manifest": manifest}, indent=1)
    if is_bucket(folder):  # an object is there whole or not at all
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        return
    sync_tree(folder)
    sync_folder(folder.parent)
    unfinished = folder / _UNFINISHED_MANIFEST
    unfinished.write_text(text, encoding="utf-8")
    try:
        move_file(unfinished, folder / MANIFEST)
    except OSError:  # after the rename, too: it may not be on the disk
        (folder / MANIFEST).unlink(missing_ok=True)
        raise


def remove_manifest(folder: epath.Path) -> None:
    """Makes the folder no checkpoint: after a power cut, too, it does not count again."""
    manifest = folder / MANIFEST
    if manifest.is_dir():
        manifest.rmtree()
    manifest.unlink(missing_ok=True)
    if not is_bucket(folder):
        sync_folder(folder)


def sync_written_by(process: int, folder: epath.Path) -> None:
    """Waits until what a process has written of a state is on the disk.

    Orbax names it `process_N`. Where several hosts share a file system, another host's sync does
    not write what this one still holds in memory.
    """
    if not is_bucket(folder):
        its_own = f"process_{process}"
        sync_files(
            path
            for path in _walk(folder / STATE)
            if any(part.endswith(its_own) for part in path.relative_to(folder).parts)
        )


def read_manifest(folder: epath.Path) -> dict[str, Any]:
    """Reads the manifest that `write_manifest` wrote.

    Raises:
      DamagedCheckpoint: it changed after it was written.
    """
    try:
        with name_file(folder / MANIFEST):
            sealed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if sealed["sha256"] == _seal(sealed["manifest"]):
            return sealed["manifest"]
    except (ValueError, TypeError, LookupError, RecursionError, IsADirectoryError):
        pass  # not JSON, or JSON of another form: damaged just as a broken seal is
    raise DamagedCheckpoint(f"has a {MANIFEST} that changed after it was written")


def _is_sealed(folder: epath.Path) -> bool:
    try:
        read_manifest(folder)
    except DamagedCheckpoint:
        return False
    return True


def read_score(folder: epath.Path) -> tuple[float, dict[str, Any]] | None:
    """A checkpoint's score and notes; None where it has no score or its manifest is damaged."""
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint:
        return None
    score = manifest.get("score")
    return None if score is None else (score, manifest["extra"])


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
