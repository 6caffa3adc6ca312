"""The trajectories of an iteration in a file, so that a killed sweep is repeated on the same ones.

A file is the SHA-256 of what follows, then zlib's compression of an `.npz`: the tokens, turns and
log-probabilities of all segments end to end, the rewards of trajectories and of turns, and as JSON
whatever is text or counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seeupo_jax.parallel.distributed import from_first
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.trajectories.json_lines import plain, write_whole
from seeupo_jax.types import Segment, Trajectory

_LOGGER = logging.getLogger(__name__)
_DIGEST_BYTES = 32
_COMPRESSION = 1  # of zlib: log-probabilities hardly compress, and the rest does at any level
_ARRAYS = {"tokens_L": np.int32, "turn_L": np.int32, "logp_L": np.float32}  # of a segment
_OTHER = ("segments", "reward", "turn_rewards")  # fields of a trajectory that are not kept as JSON


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
        """Keeps a collection: writes it in the background, all of it or nothing.

        A collection that cannot be written is reported and not kept: the only cost is that a killed
        sweep samples again.

        Args:
          made_by: names the settings that decide, with the parameters, what is sampled.
          sampled_by: names the parameters that sampled, by a fingerprint.
        """
        if jax.process_index() == 0:
            origin = {"made_by": made_by, "sampled_by": sampled_by}
            self._pending = self._writer.submit(self._save, iteration, collected, origin)

    def wait(self) -> None:
        """Returns when every collection that was saved is on the disk, or was told not to be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finishes what is being written, and ends the background thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _save(self, iteration: int, collected: Collected, origin: Mapping[str, str]) -> None:
        file = self._file(iteration)
        try:
            write_whole(file, _pack(iteration, collected, origin))
        except (OSError, ValueError, RecursionError) as error:
            self._log(
                f"{file} could not be written ({error}): a sweep that is killed will sample again."
            )

    def load(self, iteration: int, made_by: str = "", sampled_by: str = "") -> Collected | None:
        """The iteration's collection, bit for bit; None where there is none that can be used.

        One that other settings or parameters sampled than those named cannot.

        Of `info` and messages what JSON cannot hold has become text, and tuples and sets lists.
        """
        self.wait()
        first = jax.process_index() == 0
        loaded = self._load(iteration, made_by, sampled_by) if first else None
        return from_first(loaded, Collected, Trajectory, Segment)

    def forget(self, up_to_iteration: int) -> None:
        """Removes the collections of all iterations up to this one: a checkpoint covers them."""
        self.wait()
        if jax.process_index() != 0 or not self._folder.is_dir():
            return
        for file in self._folder.iterdir():
            number = file.name.partition(".")[0]  # of `N.rollouts`, and of what is left of a write
            if number.isdecimal() and int(number) <= up_to_iteration:
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
            notes, arrays = _unpack(data)
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
            return _collected(notes, arrays)
        except (LookupError, TypeError, ValueError):  # whole, and yet of another form
            return self._throw_away(file, "was written by another version of this program")

    def _throw_away(self, file: Path, reason: str) -> None:
        self._log(f"{file} {reason}; its trajectories are discarded and sampled again.")


def _pack(iteration: int, collected: Collected, origin: Mapping[str, str]) -> bytes:
    trajectories = collected.sampled
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    arrays = {name: _join(segments, name, kind) for name, kind in _ARRAYS.items()}
    arrays["lengths"] = np.array([len(segment.tokens_L) for segment in segments], np.int64)
    arrays["rewards"] = np.array([trajectory.reward for trajectory in trajectories], np.float64)
    turns = [trajectory.turn_rewards for trajectory in trajectories]
    arrays["turn_rewards"] = np.array([*itertools.chain(*turns)], np.float64)
    notes = {
        "iteration": iteration,
        **origin,
        "collected": _fields(collected, without=("trajectories", "left_out")),
        "left_out": len(collected.left_out),
        "trajectories": [_fields(trajectory, without=_OTHER) for trajectory in trajectories],
        "segments": [len(trajectory.segments) for trajectory in trajectories],
        "turns": [len(rewards) for rewards in turns],
    }
    arrays["notes"] = np.frombuffer(json.dumps(plain(notes, finite=False)).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    body = zlib.compress(file.getbuffer(), _COMPRESSION)
    return hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    file = io.BytesIO(zlib.decompress(memoryview(data)[_DIGEST_BYTES:]))
    with np.load(file, allow_pickle=False) as stored:
        arrays = dict(stored)
    return json.loads(arrays.pop("notes").tobytes()), arrays


def _collected(notes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Collected:
    ends = np.cumsum(arrays["lengths"])[:-1]
    parts = (np.split(arrays[name], ends) for name in _ARRAYS)
    segments = (Segment(*part) for part in zip(*parts, strict=True))
    turn_rewards = iter(arrays["turn_rewards"].tolist())
    trajectories = []
    for index, fields in enumerate(notes["trajectories"]):
        own = tuple(next(segments) for _ in range(notes["segments"][index]))
        fields = fields | {
            "messages": tuple(fields["messages"]),
            "reward": float(arrays["rewards"][index]),
            "turn_rewards": tuple(itertools.islice(turn_rewards, notes["turns"][index])),
        }
        trajectories.append(Trajectory(segments=own, **fields))
    kept = len(trajectories) - notes["left_out"]
    return Collected(
        trajectories=tuple(trajectories[:kept]),
        left_out=tuple(trajectories[kept:]),
        **notes["collected"],
    )


def _join(segments: Sequence[Segment], name: str, kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *(vars(segment)[name] for segment in segments)])


def _fields(value: Any, without: Sequence[str]) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(value))
    return {name: vars(value)[name] for name in names if name not in without}
