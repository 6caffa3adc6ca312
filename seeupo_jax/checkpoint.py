"""Checkpoints: the training state and its JSON notes, found whole or not at all.

A checkpoint is a folder named by its step: `state/`, written by Orbax, and `manifest.json`, which
lists the notes, every leaf's shape and every file's size and SHA-256. The manifest is written last:
a folder without one is a save that was interrupted, and counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import textwrap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

_LOGGER = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_STATE = "state"


class _Damaged(Exception):
    """Why a checkpoint cannot be used, as the end of a sentence that starts with its name."""


class Checkpoints:
    """The checkpoints of one run: saved while training goes on, restored after a check.

    Every process of a multi-process run calls every method, on a directory that all of them see.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int,
        *,
        log: Callable[[str], None] = _LOGGER.warning,
        verify: bool = True,
    ):
        """Opens a directory, which need not exist yet.

        Args:
          directory: where the checkpoints are, or will be.
          keep: how many of the newest to keep, at least 1.
          log: takes one sentence for every checkpoint that is passed over.
          verify: hash the files when saving (in the background) and again when restoring. It reads
            the whole checkpoint once more each time, about 1 s a gigabyte; without it only missing
            files and wrong sizes are found.
        """
        self._directory = epath.Path(directory)
        self._keep = keep
        self._log = log
        self._verify = verify
        self._damaged: set[int] = set()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Saves a checkpoint in the background, after the one before it has finished.

        When it returns, `state` has been read and its buffers may be donated. A checkpoint of the
        same step is replaced; when this one is whole, those beyond `keep`, interrupted ones and
        those that `restore` found damaged are removed.

        Args:
          step: its number, >= 0.
          state: a pytree of jax arrays, typed random keys included.
          extra: notes that JSON can hold: configuration, iteration, position in the data.

        Raises:
          OSError: the save before it failed.
          TypeError: JSON cannot hold `extra`.
        """
        leaves = _named_leaves(state)
        manifest = {
            "step": step,
            # Through text, so that what is sealed is what a reader gets (tuples become lists).
            "extra": json.loads(json.dumps(extra)),
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
        }
        self.wait()
        folder = self._directory / str(step)
        if jax.process_index() == 0:
            _remove(folder)
            folder.mkdir(parents=True)
        written = ocp.save_async(folder / _STATE, leaves, overwrite=True)
        self._pending = self._writer.submit(self._finish, step, written, manifest)

    def wait(self) -> None:
        """Returns when the save under way is on disk.

        Raises:
          OSError: it failed; the sentence names the step and the reason.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finishes the save under way and ends the background thread; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def latest(self) -> int | None:
        """The newest step whose save was finished, or None."""
        return max(self._finished(), default=None)

    def restore(
        self, example: Any, *, partial: bool = False
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Loads the newest checkpoint that is whole.

        Args:
          example: a tree like the state that was saved, of arrays or `jax.ShapeDtypeStruct`; what
            is loaded gets its shardings (without one: the first device).
          partial: load only the leaves that `example` has, for instance {"params": ...}.

        Returns:
          (step, state, extra), or None when there is no checkpoint.

        Raises:
          ValueError: the newest checkpoint is of another model or optimizer, or all are damaged.
        """
        self.wait()
        reasons = []
        for step in self._candidates():
            try:
                return self._load(step, example, partial)
            except _Damaged as reason:
                self._damaged.add(step)
                reasons.append(f"checkpoint {step} {reason}")
                self._log(f"{self._directory}: {reasons[-1]}; it is passed over.")
        if reasons:
            raise ValueError(
                f"{self._directory}: all checkpoints are damaged: {'; '.join(reasons)}; remove them"
                " to start again, or choose a new workdir."
            )
        return None

    def _finish(self, step: int, written: ocp.AsyncResponse, manifest: dict[str, Any]) -> None:
        """Waits for Orbax, then makes the folder a checkpoint and removes old ones."""
        try:
            written.result()
            if jax.process_index() == 0:
                folder = self._directory / str(step)
                manifest["files"] = _list_files(folder, self._verify)
                _write_manifest(folder / _MANIFEST, manifest)
                self._prune(step)
        except Exception as error:
            raise OSError(
                f"checkpoint {step} could not be written to {self._directory}: {_reason(error)}"
            ) from error

    def _prune(self, newest: int) -> None:
        good = sorted(self._finished() - self._damaged - {newest}, reverse=True)
        keep = {newest, *good[: self._keep - 1]}
        for step in self._folders() - keep:
            _remove(self._directory / str(step))
        self._damaged.clear()

    def _folders(self) -> set[int]:
        if not self._directory.is_dir():
            return set()
        return {int(path.name) for path in self._directory.iterdir() if path.name.isdecimal()}

    def _finished(self) -> set[int]:
        return {n for n in self._folders() if (self._directory / str(n) / _MANIFEST).exists()}

    def _candidates(self) -> list[int]:
        """The finished steps, newest first; says which newer saves were interrupted."""
        finished = sorted(self._finished(), reverse=True)
        for step in sorted(self._folders().difference(finished), reverse=True):
            self._log(f"{self._directory}: checkpoint {step} was not finished; it is passed over.")
        return finished

    def _load(self, step: int, example: Any, partial: bool) -> tuple[int, Any, dict[str, Any]]:
        folder = self._directory / str(step)
        manifest = _read_manifest(folder / _MANIFEST)
        wanted = _named_leaves(example)
        _check_leaves(step, manifest["leaves"], wanted, partial)
        verified = _check_files(folder, manifest["files"], self._verify)
        context = ocp.Context()
        context.pytree.loading.partial_load = partial
        try:
            with context:
                leaves = ocp.load(folder / _STATE, {k: _abstract(v) for k, v in wanted.items()})
        except Exception as error:
            if verified:  # the files are as they were written: whatever failed, it is not damage
                raise
            raise _Damaged(f"cannot be read ({_reason(error)})") from error
        placed = [_commit_like(leaf, leaves[name]) for name, leaf in wanted.items()]
        state = jax.tree.unflatten(jax.tree.structure(example), placed)
        return step, state, manifest["extra"]


def check_writable(workdir: str | os.PathLike[str]) -> None:
    """Makes the folder where it is missing and writes a file there for a moment.

    Raises:
      ValueError: this user cannot write there.
    """
    folder = epath.Path(workdir)
    probe = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"--workdir: got {os.fspath(workdir)} ({error.strerror}); allowed: a folder that can be"
            " made and written to."
        ) from error


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, so that what is on disk does not depend on classes of containers."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
    assert len(leaves) == len(paths), "two leaves have the same path"
    return leaves


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _commit_like(example: Any, leaf: jax.Array) -> jax.Array:
    """The leaf, as free to move as the example is.

    Orbax commits what it loads to its devices: a step count committed to one device cannot enter a
    program together with parameters on a mesh, where a fresh one can.
    """
    if not isinstance(example, jax.Array) or example.committed:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def _check_leaves(
    step: int, saved: Mapping[str, str], wanted: Mapping[str, Any], partial: bool
) -> None:
    extra = [] if partial else [name for name in saved if name not in wanted]
    for name in [*wanted, *extra]:
        there = saved[name] if name in saved else "missing"
        here = _describe(wanted[name]) if name in wanted else "missing"
        if there != here:
            raise ValueError(
                f"checkpoint {step} is of another model or optimizer: {name} is {there} in it and"
                f" {here} in this run; allowed: the configuration it was saved with, or a new"
                " workdir."
            )


def _list_files(folder: epath.Path, verify: bool) -> dict[str, dict[str, Any]]:
    files = {}
    for parent, _, names in (folder / _STATE).walk():
        for name in names:
            path = parent / name
            digest = _digest(path) if verify else None
            key = path.relative_to(folder).as_posix()
            files[key] = {"bytes": path.stat().length, "sha256": digest}
    return files


def _check_files(folder: epath.Path, files: Mapping[str, Mapping[str, Any]], verify: bool) -> bool:
    """Raises `_Damaged` unless every file is as it was written; returns whether all were hashed."""
    for name, file in files.items():
        path = folder / name
        if not path.is_file():
            raise _Damaged(f"lacks its file {name}")
        size = path.stat().length
        if size != file["bytes"]:
            raise _Damaged(f"has {size} bytes in {name} where {file['bytes']} were written")
        if verify and file["sha256"] is not None and _digest(path) != file["sha256"]:
            raise _Damaged(f"has a file {name} that changed after it was written")
    return verify and all(file["sha256"] is not None for file in files.values())


def _digest(path: epath.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_manifest(path: epath.Path, manifest: Mapping[str, Any]) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"sha256": _seal(manifest), "manifest": manifest}, indent=1))
    unfinished.replace(path)


def _read_manifest(path: epath.Path) -> dict[str, Any]:
    try:
        sealed = json.loads(path.read_text())
        if sealed["sha256"] == _seal(sealed["manifest"]):
            return sealed["manifest"]
    except (ValueError, TypeError, LookupError):
        pass  # not JSON, or JSON of another form: damaged just as a broken seal is
    raise _Damaged(f"has a {_MANIFEST} that changed after it was written")


def _remove(folder: epath.Path) -> None:
    """Removes a checkpoint so that it never counts while it is only half there."""
    if folder.is_dir():
        (folder / _MANIFEST).unlink(missing_ok=True)
        folder.rmtree()


def _reason(error: BaseException) -> str:
    # Tensorstore appends its whole specification to what went wrong.
    return textwrap.shorten(str(error), 200, placeholder=" ...")
