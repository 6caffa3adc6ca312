"""Where checkpoints lie: whether it can be written, and what went wrong, in one sentence."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import tensorstore
from etils import epath
from etils.epath.gpath import PosixGPath

from seeupo_jax.configuration import schema
from seeupo_jax.durable_files import make_folder
from seeupo_jax.errors import reason

_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?")
_MOUNT = "a folder (gcsfuse mounts a bucket as one)"
_OF_POLICY = (
    "config.json",
    "adapter_config.json",
    "adapter_0/adapter_config.json",  # of adapters per turn
    "*.safetensors",
)
_TIMEOUT_S = 60  # of an answer from a bucket


class NotWritable(ValueError):
    """This user cannot make a folder on this machine, or not write to it.

    name: of the setting that names the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, why: str):
        super().__init__(
            f"{name}: got {os.fspath(folder)} ({why}); allowed: a folder that can be made and"
            " written to."
        )
        self.name = name


def find_directory(config: schema.Checkpoint, workdir: str | os.PathLike[str]) -> str:
    """Where the checkpoints of a run are: an absolute folder, or gs://BUCKET/PATH."""
    inside = os.path.join(workdir, "checkpoints")
    return absolute(inside if config.directory is None else config.directory)


def absolute(folder: str | os.PathLike[str]) -> str:
    """The absolute path of a folder; one in a bucket is already absolute."""
    return os.fspath(folder) if is_bucket(folder) else os.path.abspath(folder)


class Folder(PosixGPath):
    """A folder below which Orbax finds what it wrote, whatever characters are in its own path.

    epath reads `[...]`, `*` and `?` in a folder's own path as a pattern, too: Orbax would find none
    of a checkpoint's arrays, or those of another run.
    """

    def glob(self, pattern: str) -> Iterator[Folder]:
        """Returns the paths below it that match a pattern."""
        return map(type(self), Path(self).glob(pattern))


def is_bucket(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder lies in a bucket of Google Cloud Storage."""
    return os.fspath(folder).startswith("gs://")


def check_path(directory: str, name: str) -> None:
    """ValueError: below this path of `find_directory` checkpoints cannot be written or found.

    TensorStore takes a backslash for a slash. Paths in a bucket are epath's, not a `Folder`.
    """
    wrong = "\\[*?" if is_bucket(directory) else "\\"
    if not set(wrong).isdisjoint(directory):
        raise ValueError(
            f"{name}: got {directory}; allowed where checkpoints are: a path without"
            f" {' '.join(wrong)} in it."
        )


def check_writable(folder: str | os.PathLike[str], name: str = "--workdir") -> None:
    """Makes the folder where it is missing, and in it, for a moment, a folder that it renames.

    Args:
      folder: may be gs://BUCKET/PATH.
      name: of the setting that names the folder.

    Raises:
      NotWritable: this user cannot write there. ValueError: folders cannot be renamed there, as
        checkpoints and policies are, or a bucket cannot be used.
    """
    if is_bucket(folder):
        return _check_bucket(os.fspath(folder), name)
    path = epath.Path(folder)
    try:
        make_folder(path)
        refused = _rename_one(path / _probe())
    except OSError as error:
        raise NotWritable(folder, name, reason(error)) from error
    if refused is not None:
        raise ValueError(
            f"{name}: got {os.fspath(folder)}, where folders cannot be renamed ({refused});"
            " allowed: a folder where they can; a bucket needs a hierarchical namespace, or"
            " gcsfuse --rename-dir-limit=200000."
        )


def _rename_one(probe: epath.Path) -> str | None:
    """Makes a folder and removes it; why one in it, with a file, cannot be renamed."""
    before = probe / "before"
    before.mkdir(parents=True)
    try:
        (before / "file").write_text("")
        try:
            before.rename(probe / "after")
        except OSError as error:
            return reason(error)
    finally:
        probe.rmtree()
    return None


def _probe() -> str:
    """A name that no other process takes: those of two containers may have one number."""
    return f".writable.{secrets.token_hex(8)}"


def check_may_write(folder: str | os.PathLike[str], name: str = "--workdir") -> None:
    """As `check_writable`, as far as that can be found out without making anything.

    Of a bucket only the name is looked at.

    Raises:
      NotWritable: this user cannot write there. ValueError: a bucket cannot have that name.
    """
    if is_bucket(folder):
        return _check_bucket_name(os.fspath(folder), name)
    path = Path(folder).absolute()
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
    except OSError as error:  # a name that is too long, a folder that is closed to this user
        raise NotWritable(folder, name, reason(error)) from error
    problem = None
    if not there.is_dir():
        problem = errno.EEXIST if there == path else errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem is not None:
        raise NotWritable(folder, name, os.strerror(problem))


def check_replaceable(folder: str | os.PathLike[str], name: str = "--workdir") -> None:
    """As `check_may_write`, for a policy that replaces the contents of a folder.

    If the folder is a link, the folder that it points to is meant.

    Raises:
      ValueError: it holds something that is no policy, or cannot be replaced.
    """
    target = Path(os.path.realpath(folder))
    for place in (target.parent, target):  # it is written next to it, then renamed
        check_may_write(place, name)
    policy = any(any(target.glob(pattern)) for pattern in _OF_POLICY)
    if target.is_mount() or (any(target.glob("*")) and not policy):
        raise ValueError(
            f"{name}: got {os.fspath(folder)}, which a policy cannot replace; allowed: a new or"
            " empty folder or one that holds a policy, and no mount point."
        )


def _check_bucket_name(folder: str, name: str) -> None:
    if not _BUCKET.fullmatch(folder):
        raise ValueError(f"{name}: got {folder}; allowed: gs://BUCKET/PATH, or {_MOUNT}.")


def _check_bucket(folder: str, name: str) -> None:
    """Writes as arrays are written, and reads, lists and removes as manifests are."""
    _check_bucket_name(folder, name)
    probe = _probe()
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it raises all that it logs
    try:
        path = epath.Path(folder) / probe
        path.exists()
        store = tensorstore.KvStore.open(f"{folder.rstrip('/')}/").result(timeout=_TIMEOUT_S)
        store.write(probe, b"1").result(timeout=_TIMEOUT_S)
        path.read_text()
        path.unlink()
    except ImportError:
        raise ValueError(
            f"{name}: got {folder}, but gcsfs is not installed; allowed: pip install"
            f" 'seeupo_jax[gcs]', or {_MOUNT}."
        ) from None
    except Exception as error:  # of whichever of the libraries that talk to it
        raise ValueError(
            f"{name}: got {folder} ({reason(error)}); allowed: a bucket that exists and whose"
            f" objects this account may create, get, list and delete, or {_MOUNT}."
        ) from error


@contextlib.contextmanager
def keep_root_logger() -> Generator[None]:
    """Leaves the root logger without handlers, if it has none, whatever Orbax logs meanwhile.

    absl, which Orbax logs with, calls `logging.basicConfig` where the root logger has no handler,
    and an application's own call would then do nothing. Meanwhile the root logger has the handler
    that Python uses where there is none.
    """
    root, handler = logging.root, logging.lastResort
    if root.handlers or handler is None:
        yield
        return
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def quiet_threads() -> None:
    """Keeps traces of errors that are also raised off the standard error.

    Orbax logs those of its threads. After one of its writes has failed, it closes its loop: Python
    then prints a trace for each other write that TensorStore's threads report, and asyncio logs
    each other task that failed.
    """
    logging.getLogger("absl").addFilter(_is_new)
    logging.getLogger("asyncio").addFilter(_is_not_orbax)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


class _UnraisableHook:
    """Python's hook for what a thread cannot raise, but for what `quiet_threads` says."""

    def __init__(self, hook: Callable[[Any], object]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        late = isinstance(unraisable.exc_value, RuntimeError) and unraisable.object is None
        if not (late and str(unraisable.exc_value) == "Event loop is closed"):
            self._hook(unraisable)


def _is_new(record: logging.LogRecord) -> bool:
    return "_SignalingThread.run()" not in str(record.msg)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """False for the error of a task that failed in Orbax."""
    trace = record.exc_info[2] if record.exc_info else None
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace))
    return not any(name.startswith("orbax.") for name in modules)
