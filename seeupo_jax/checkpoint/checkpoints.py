"""Checkpoints: the training state and its JSON notes, found whole or not at all.

A checkpoint is a folder named by its step: `state/`, written by Orbax, and `manifest.json`, which
lists the notes, every leaf's shape and every file's size and SHA-256. The manifest is written last:
a folder without one is a save that was interrupted, and counts for nothing. A step that is saved
again goes to `STEP.1`, `STEP.2` and so on, so that it is there at every moment. Files, and folders
with anything else in them, are the user's and stay, whatever their names.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from etils import epath

from seeupo_jax.checkpoint.folders import Folders, step_of
from seeupo_jax.checkpoint.leaves import (
    abstract,
    check_leaves,
    commit_like,
    describe,
    named_leaves,
)
from seeupo_jax.checkpoint.manifest import (
    STATE,
    DamagedCheckpoint,
    check_files,
    list_files,
    read_manifest,
    read_score,
    sync_written_by,
    write_manifest,
)
from seeupo_jax.checkpoint.process_sync import ocp, on_all, on_primary, wait_for
from seeupo_jax.checkpoint.storage import Folder, absolute, is_bucket, quiet_threads
from seeupo_jax.errors import WriteError, reason
from seeupo_jax.parallel.distributed import gather

_LOGGER = logging.getLogger(__name__)


class SaveError(WriteError):
    """A checkpoint could not be written; the text is a sentence that says which one is left."""


class Checkpoints:
    """The checkpoints of one run: saved in the background, restored after a check.

    Every process of a multi-process run calls every method, on a directory that all of them see.
    Process 0 writes manifests, removes what is not kept, and decides what is restored.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int,
        keep_best: int = 1,
        *,
        measured: Callable[[Mapping[str, Any]], object] = lambda extra: None,
        log: Callable[[str], None] = _LOGGER.warning,
    ):
        """Opens a directory, which need not exist yet.

        Args:
          directory: where the checkpoints are, or will be: a folder, or gs://BUCKET/PATH.
          keep: how many of the newest to keep, at least 1.
          keep_best: how many of the others to keep, those with the best scores.
          measured: the conditions that a score was measured under, from its notes. Scores with the
            conditions of the newest are compared; others rank below these.
          log: takes one sentence for every checkpoint that is passed over, on process 0.
        """
        quiet_threads()
        path = absolute(directory)
        self._directory = epath.Path(path) if is_bucket(path) else Folder(path)
        self._folders = Folders(self._directory)
        self._keep, self._keep_best = keep, keep_best
        self._measured, self._log = measured, log
        self._damaged: set[str] = set()  # names of folders
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[tuple[float, str] | None] | None = None
        self._saving = -1  # the step of the latest save

    def save(
        self, step: int, state: Any, extra: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Saves a checkpoint in the background, after the one before it has finished.

        When it returns, `state` has been read and may be donated. Once the checkpoint is on disk,
        an older one of the same step, those beyond `keep` and `keep_best`, interrupted and damaged
        ones are removed. One that cannot be is named in a sentence, and the next save tries again.

        Args:
          step: its number, >= 0.
          state: a pytree of jax arrays, typed random keys included.
          extra: notes that JSON can hold: configuration, iteration, position in the data.
          score: larger is better; None and NaN are never the best.

        Raises:
          SaveError: this save or the one before it failed, on whichever process.
          TypeError: JSON cannot hold `extra`.
        """
        leaves = named_leaves(state)
        manifest = {
            "step": step,
            "score": None if score is None or math.isnan(score) else float(score),
            # Through text, so that what is sealed is what a reader gets (tuples become lists).
            "extra": json.loads(json.dumps(extra)),
            "leaves": {name: describe(leaf) for name, leaf in leaves.items()},
        }
        self.wait()
        began = time.monotonic()
        try:
            folder = self._directory / on_primary(lambda: self._folders.make(step))
            written = on_all(lambda: ocp.save_async(folder / STATE, leaves, overwrite=True))
        except (OSError, ValueError) as error:
            sentence = self._sentence(step, error)
            if jax.process_index() == 0:
                self._folders.remove_unfinished()
            raise SaveError(sentence) from error
        self._saving = step
        self._pending = self._writer.submit(self._finish, folder, written, manifest, began)

    def wait(self) -> None:
        """Returns when the save under way is on disk.

        Raises:
          SaveError: it failed, on whichever process.
        """
        if self._pending is not None:
            failures = [failure for failure in gather(self._settle()) if failure is not None]
            if failures:
                _, sentence = min(failures)  # the first: others failed for want of that process
                raise SaveError(sentence)

    def close(self) -> None:
        """Finishes the save under way, waiting for no other process, and ends the thread.

        Raises:
          SaveError: the save failed on this process.
        """
        try:
            failure = self._settle()
        finally:
            self._writer.shutdown()
        if failure is not None:
            raise SaveError(failure[1])

    def clear(self) -> None:
        """Removes all checkpoints, and the directory if nothing else is in it; on process 0."""
        for name in self._folders.names():
            self._remove(name)
        with contextlib.suppress(OSError, ValueError):  # something else is, or it is in a bucket
            self._directory.rmdir()

    def latest(self) -> int | None:
        """The newest step whose save was finished, or None; one under way does not count."""
        return on_primary(self.finished)

    def newest(
        self,
        example: Any,
        *,
        step: int | None = None,
        partial: bool = False,
        optional: bool = False,
    ) -> tuple[int, dict[str, Any]] | None:
        """Step and notes of what `restore` would load, as far as that is known without hashes.

        Files are there and as large as they were written; none but the manifest is read.

        Raises:
          ValueError: as `restore`.
        """
        return on_primary(lambda: self._newest(named_leaves(example), step, partial, optional))

    def _newest(
        self, wanted: Mapping[str, Any], step: int | None, partial: bool, optional: bool
    ) -> tuple[int, dict[str, Any]] | None:
        reasons: list[str] = []
        for number, name in self._candidates(step):
            folder = self._directory / name
            try:
                manifest = read_manifest(folder)
                check_leaves(number, manifest["leaves"], wanted, partial)
                check_files(folder, manifest["files"], hashes=False)
            except DamagedCheckpoint as damage:
                reasons.append(self._pass_over(number, damage, step))
            else:
                return number, manifest["extra"]
        return self._none(reasons, step, optional)

    def finished(self) -> int | None:
        """As `latest`, but as this process alone sees it: no other need call it."""
        steps = set(self._folders.finished())
        if self._pending is not None and not self._pending.done():
            steps.discard(self._saving)  # what it covers may be removed only when it is durable
        return max(steps, default=None)

    def best(self) -> int | None:
        """The finished step with the best score, of equals the newer; None where none has one.

        It is the best of those that were measured as the newest score was.
        """
        return on_primary(lambda: next(iter(self._best_first(self._good())), None))

    def score(self, step: int) -> float | None:
        """That of a finished step; None where it has none."""

        def read() -> float | None:
            scored = read_score(self._directory / self._folders.finished()[step])
            return None if scored is None else scored[0]

        return on_primary(read)

    def restore(
        self,
        example: Any,
        *,
        step: int | None = None,
        partial: bool = False,
        optional: bool = False,
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Loads the newest checkpoint that is whole, or a given one.

        Args:
          example: a tree like the state that was saved, of arrays or `jax.ShapeDtypeStruct`; what
            is loaded gets its shardings (without one: the first device).
          step: which one; None: the newest that is whole.
          partial: load only the parts that `example` has, for instance {"params": ...}.
          optional: the run can do without: None, after the sentences, where all are damaged.

        Returns:
          (step, state, extra), or None when there is no checkpoint.

        Raises:
          ValueError: the newest checkpoint is of another model or optimizer, all are damaged, or
            there is none of the given step.
        """
        self.wait()
        reasons: list[str] = []
        for number, name in on_primary(lambda: self._candidates(step)):
            try:
                return self._load(number, name, example, partial)
            except DamagedCheckpoint as damage:
                self._damaged.add(name)
                reasons.append(self._pass_over(number, damage, step))
        return self._none(reasons, step, optional)

    def _pass_over(self, number: int, damage: DamagedCheckpoint, step: int | None) -> str:
        """Says that a checkpoint is damaged; how."""
        reason = f"checkpoint {number} {damage}"
        passed = "it is skipped" if step is None else "it cannot be used"
        self._warn(f"{self._directory}: {reason}; {passed}.")
        return reason

    def _none(self, reasons: Sequence[str], step: int | None, optional: bool) -> None:
        """ValueError where there are checkpoints, all of them damaged, and the run needs one."""
        if optional or not reasons:
            return
        if step is None:
            raise ValueError(
                f"{self._directory}: all checkpoints are damaged: {'; '.join(reasons)}; choose a"
                " new workdir to start again."
            )
        raise ValueError(f"{self._directory}: {reasons[0]}; allowed: an intact one.")

    def _finish(
        self,
        folder: epath.Path,
        written: ocp.AsyncResponse,
        manifest: dict[str, Any],
        began: float,
    ) -> tuple[float, str] | None:
        """Waits for Orbax, then makes the folder a checkpoint and removes old ones, in that order.

        Returns: after how many seconds it failed, and a sentence that says why; None: it did not.
        """
        try:
            wait_for(written, lambda: sync_written_by(jax.process_index(), folder))
            if jax.process_index() == 0:
                manifest["files"] = list_files(folder)
                write_manifest(folder, manifest)
                self._prune(manifest["step"])
        except Exception as error:
            sentence = self._sentence(manifest["step"], error)
            if jax.process_index() == 0:
                self._folders.remove_unfinished()
            return time.monotonic() - began, sentence
        return None

    def _settle(self) -> tuple[float, str] | None:
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def _sentence(self, step: int, error: Exception) -> str:
        try:
            good = max(self._good(), default=None)
            intact = "no other is there" if good is None else f"checkpoint {good} there is intact"
        except Exception:  # the directory cannot be read
            intact = "what is there cannot be read either"
        return (
            f"checkpoint {step} could not be written to {self._directory}: {reason(error)};"
            f" {intact}."
        )

    def _prune(self, newest: int) -> None:
        """Removes what is not kept; what cannot be removed is left for the next save's."""
        try:
            stale = self._stale(newest)
        except OSError as error:
            return self._warn(f"{self._directory}: nothing is removed: {reason(error)}.")
        self._damaged &= {name for name in stale if not self._remove(name)}

    def _stale(self, newest: int) -> set[str]:
        finished, good = self._folders.finished(), self._good()
        older = sorted(set(good) - {newest}, reverse=True)
        others = set(older[self._keep - 1 :])
        best = [step for step in self._best_first(good) if step in others][: self._keep_best]
        keep = {finished[step] for step in (newest, *older[: self._keep - 1], *best)}
        return self._folders.names() - keep

    def _remove(self, name: str) -> bool:
        """Removes a checkpoint, or says why it is left, which harms no other; whether it did."""
        try:
            self._folders.remove(name)
        except Exception as error:  # what a bucket raises is not always an OSError
            path = self._directory / name
            self._warn(f"{path} could not be removed: {reason(error)}; the next save tries again.")
            return False
        return True

    def _good(self) -> dict[int, str]:
        """The finished steps that were not found damaged."""
        return {
            k: name for k, name in self._folders.finished().items() if name not in self._damaged
        }

    def _best_first(self, steps: Mapping[int, str]) -> list[int]:
        """The checkpoints that have a score, the best first; those measured otherwise come last."""
        found = {step: read_score(self._directory / name) for step, name in steps.items()}
        scored = {step: each for step, each in found.items() if each is not None}
        measured = {step: self._measured(extra) for step, (_, extra) in scored.items()}
        newest = measured.get(max(measured, default=-1))
        ranks = {step: (measured[step] == newest, scored[step][0], step) for step in scored}
        return sorted(scored, key=ranks.__getitem__, reverse=True)

    def _candidates(self, step: int | None) -> list[tuple[int, str]]:
        """The finished steps, newest first; says which newer saves were interrupted."""
        finished = self._folders.finished()
        if step is not None and step not in finished:
            there = ", ".join(map(str, sorted(finished))) or "none"
            raise ValueError(f"step: got {step}; allowed: those in {self._directory}: {there}.")
        if step is not None:
            return [(step, finished[step])]
        unfinished = {step_of(name) for name in self._folders.names()}.difference(finished)
        for number in sorted(unfinished, reverse=True):
            self._warn(f"{self._directory}: checkpoint {number} was not finished; it is skipped.")
        return sorted(finished.items(), reverse=True)

    def _load(
        self, step: int, name: str, example: Any, partial: bool
    ) -> tuple[int, Any, dict[str, Any]]:
        folder = self._directory / name
        manifest = on_primary(lambda: read_manifest(folder))
        wanted = named_leaves(example)
        check_leaves(step, manifest["leaves"], wanted, partial)
        files = manifest["files"]
        local = sorted(files)[jax.process_index() :: jax.process_count()]
        on_all(lambda: check_files(folder, {key: files[key] for key in local}))
        verified = all(file["sha256"] is not None for file in files.values())
        context = ocp.Context()
        context.pytree.loading.partial_load = partial

        def load() -> dict[str, jax.Array]:
            try:
                with context:
                    return ocp.load(folder / STATE, {k: abstract(v) for k, v in wanted.items()})
            except Exception as error:
                if verified:  # the files are as they were written: whatever failed, it is no damage
                    raise
                raise DamagedCheckpoint(f"cannot be read ({reason(error)})") from error

        leaves = on_all(load)
        placed = [commit_like(leaf, leaves[key]) for key, leaf in wanted.items()]
        state = jax.tree.unflatten(jax.tree.structure(example), placed)
        return step, state, manifest["extra"]

    def _warn(self, sentence: str) -> None:
        if jax.process_index() == 0:
            self._log(sentence)
