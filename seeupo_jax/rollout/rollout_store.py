"""Stores an iteration's trajectories in a file: a killed sweep resumes with the same ones.

A file is the SHA-256 of its remainder, then the encoding of `parallel.codec`, compressed by zlib.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.durable_files import write_atomically
from seeupo_jax.parallel.codec import decode, encode
from seeupo_jax.parallel.distributed import broadcast_from_primary
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.trajectories.json_lines import plain
from seeupo_jax.types import Segment, Trajectory

_LOGGER = logging.getLogger(__name__)
_DIGEST_BYTES = 32
_COMPRESSION = 1  # of zlib: log-probabilities hardly compress, and the rest does at any level
_NAME = re.compile(r"(\d+)\.rollouts(\.([0-9a-f]+\.)?tmp)?")  # .tmp: remains of an unfinished write
_TYPES = (Collected, Trajectory, Segment)


class RolloutStore:
    """Collections by iteration, in a folder that only process 0 needs to see.

    Every process of a multi-process run calls every method.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, log: Callable[[str], None] = _LOGGER.warning
    ):
        """Opens a folder, which need not exist yet.

        Args:
          log: takes one sentence for every collection that cannot be written or read.
        """
        self._folder = Path(folder)
        self._log = log
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._pending: Future[None] | None = None  # the last save; those before it are over then

    def save(
        self, iteration: int, collected: Collected, made_by: str = "", sampled_by: str = ""
    ) -> None:
        """Stores a collection: writes it atomically in the background.

        A collection that cannot be written is reported: a killed sweep then samples again.

        Args:
          made_by: fingerprint of the settings that, with the parameters, determine the sampling.
          sampled_by: fingerprint of the parameters that sampled.
        """
        if jax.process_index() == 0:
            origin = {"made_by": made_by, "sampled_by": sampled_by}
            self._pending = self._writer.submit(self._save, iteration, collected, origin)

    def wait(self) -> None:
        """Returns when every collection that was saved is on the disk, or was reported as lost."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finishes pending writes and ends the background thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _save(self, iteration: int, collected: Collected, origin: Mapping[str, str]) -> None:
        file = self._file(iteration)
        try:
            write_atomically(file, _pack(iteration, collected, origin))
        except (OSError, TypeError, ValueError, RecursionError) as error:
            self._log(
                f"{file} could not be written ({error}): a sweep that is killed will sample again."
            )

    def load(self, iteration: int, made_by: str = "", sampled_by: str = "") -> Collected | None:
        """The iteration's collection, equal to the bit; None if there is no usable one.

        A collection of other settings or parameters is not usable. In `info` and messages, values
        that JSON cannot hold have become text, and tuples and sets lists.
        """
        self.wait()
        first = jax.process_index() == 0
        loaded = self._load(iteration, made_by, sampled_by) if first else None
        return broadcast_from_primary(loaded, *_TYPES)

    def forget(self, up_to_iteration: int) -> None:
        """Removes the collections of all iterations up to this one: a checkpoint covers them."""
        self.wait()
        if jax.process_index() != 0 or not self._folder.is_dir():
            return
        for file in self._folder.iterdir():
            name = _NAME.fullmatch(file.name)
            if name is not None and int(name[1]) <= up_to_iteration and file.is_file():
                file.unlink(missing_ok=True)

    def _file(self, iteration: int) -> Path:
        return self._folder / f"{iteration}.rollouts"

    def _load(self, iteration: int, made_by: str, sampled_by: str) -> Collected | None:
        file = self._file(iteration)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._throw_away(file, f"cannot be read ({error.strerror})")
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            return self._throw_away(file, "changed after it was written")
        try:
            notes = decode(zlib.decompress(memoryview(data)[_DIGEST_BYTES:]), _TYPES)
            if (notes["iteration"], notes["made_by"]) != (iteration, made_by):
                return self._throw_away(
                    file,
                    "was sampled with another seed, environment, model, chat or rollout than the"
                    " configuration has now",
                )
            if notes["sampled_by"] != sampled_by:
                return self._throw_away(
                    file,
                    f"was sampled by other parameters ({notes['sampled_by'][:8]}) than those that"
                    f" iteration {iteration} is to be sampled by ({sampled_by[:8]}), as after a"
                    " change of the learning rate, the recipe or the optimizer",
                )
            return notes["collected"]
        except (LookupError, TypeError, ValueError, zlib.error):  # whole, yet of another form
            return self._throw_away(file, "was written by another version of this program")

    def _throw_away(self, file: Path, reason: str) -> None:
        self._log(f"{file} {reason}; its trajectories are discarded and sampled again.")


def _pack(iteration: int, collected: Collected, origin: Mapping[str, str]) -> bytes:
    rounds = {name: _with_json(vars(collected)[name]) for name in ("trajectories", "left_out")}
    notes = {"iteration": iteration, **origin, "collected": replace(collected, **rounds)}
    body = zlib.compress(encode(notes, _TYPES), _COMPRESSION)
    return hashlib.sha256(body).digest() + body


def _with_json(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Trajectories with the values of messages and `info` converted to JSON's."""

    def as_json(value: Any) -> Any:
        return json.loads(json.dumps(plain(value, finite=False)))

    return tuple(
        replace(t, messages=tuple(as_json(t.messages)), info=as_json(t.info)) for t in trajectories
    )
