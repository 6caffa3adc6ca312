"""The write-ahead log of an iteration: each trajectory as soon as it is finished.

A killed run samples again only what it had not finished. A file is a header and a record for each
trajectory; each is framed by a mark and its length, and packed as `stored_trajectories` does. Every
append is synced before it returns, since the worker that played a conversation forgets it then: a
conversation lasts seconds, an fsync milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from seeupo_jax.durable_files import write_atomically
from seeupo_jax.errors import name_file, reason
from seeupo_jax.rollout.stored_trajectories import is_whole, pack, remove_files, unpack, with_json
from seeupo_jax.types import Trajectory

_LOGGER = logging.getLogger(__name__)
_FRAME = struct.Struct("<4sQ")  # a mark, and how many packed bytes follow
_MARK = b"roll"


class LoggedMember(NamedTuple):
    """A finished trajectory of an iteration.

    group: from 0. sampled_by: fingerprints of the policies that sampled it, by their versions.
    """

    group: int
    member: int
    trajectory: Trajectory
    sampled_by: Mapping[int, str]


class LoggedIteration(NamedTuple):
    """What is stored of an iteration.

    tasks: of each group. trajectories: by group and member. origins: likewise, the fingerprints of
    the policies that sampled, by their versions.
    """

    tasks: tuple[str, ...]
    trajectories: dict[tuple[int, int], Trajectory]
    origins: dict[tuple[int, int], Mapping[int, str]]


class _Unusable(ValueError):
    """A file that is not used; the text ends a sentence on it."""


class RolloutLog:
    """Append-only files by iteration, which only process 0 of a run uses; of any of its threads.

    What cannot be written, as on a full disk, is logged in one sentence, and the run goes on.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sampling_hash: str,
        *,
        log: Callable[[str], None] = _LOGGER.warning,
    ):
        """Opens a folder, that of `RolloutStore`, which need not exist yet.

        Args:
          sampling_hash: of the settings that, with the parameters, determine the sampling.
          log: takes one sentence for each file that cannot be written or read, or is damaged.
        """
        self._folder, self._sampling_hash, self._log = Path(folder), sampling_hash, log
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}  # of each iteration's file, bytes that are whole
        self._failing: set[int] = set()  # iterations of which it was said, until a write succeeds

    def begin(self, iteration: int, tasks: Sequence[str]) -> None:
        """Begins the file of an iteration whose tasks are drawn; an older one is replaced."""
        header = {"iteration": iteration, "tasks": tuple(tasks), "made_by": self._sampling_hash}

        def write(file: Path) -> int:
            data = _frame(header)
            write_atomically(file, data)
            return len(data)

        with self._lock:
            self._ends.pop(iteration, None)
            self._write(iteration, write)

    def append(self, iteration: int, members: Sequence[LoggedMember]) -> None:
        """Adds members to an iteration that was begun; they are on the disk when it returns."""

        def write(file: Path) -> int:
            stored = with_json([member.trajectory for member in members])
            records = [
                member._replace(trajectory=trajectory)._asdict()
                for member, trajectory in zip(members, stored, strict=True)
            ]
            return _append(file, self._ends[iteration], b"".join(map(_frame, records)))

        with self._lock:
            if iteration in self._ends:  # else its beginning could not be written
                self._write(iteration, write)

    def load(self, iteration: int) -> LoggedIteration | None:
        """What is stored of an iteration, equal to the bit; `append` continues it.

        A truncated or damaged end is dropped, with one sentence. In `info` and messages, values
        that JSON cannot hold have become text, and tuples and sets lists.

        Returns: None where nothing is stored, or what was sampled with other settings, which is one
          sentence: such an iteration is to `begin`.
        """
        file = self._file(iteration)
        with self._lock:
            try:
                return self._load(iteration, file)
            except FileNotFoundError:
                return None
            except OSError as error:
                ending = f"cannot be read ({error.strerror})"
            except _Unusable as error:
                ending = str(error)
            except (LookupError, TypeError, ValueError):  # whole, yet of another form
                ending = "was written by another version of this program"
        self._log(f"{file} {ending}; its trajectories are discarded and sampled again.")
        return None

    def remove(self, iteration: int) -> None:
        """Removes the file of an iteration that `RolloutStore` has."""
        with self._lock:
            self._ends.pop(iteration, None)
            self._file(iteration).unlink(missing_ok=True)

    def forget(self, up_to_iteration: int) -> None:
        """Removes the files of all iterations up to this one: a checkpoint covers them."""
        with self._lock:
            remove_files(self._folder, "log", up_to_iteration)

    def _file(self, iteration: int) -> Path:
        return self._folder / f"{iteration}.log"

    def _write(self, iteration: int, write: Callable[[Path], int]) -> None:
        """Writes to a file, which returns its end; the first of several failures is logged."""
        file = self._file(iteration)
        try:
            self._ends[iteration] = write(file)
            self._failing.discard(iteration)
        except (OSError, TypeError, ValueError, RecursionError) as error:
            if iteration not in self._failing:
                self._failing.add(iteration)
                self._log(
                    f"{file} could not be written ({reason(error)}): if the run is killed, it will"
                    f" sample conversations of iteration {iteration} again."
                )

    def _load(self, iteration: int, file: Path) -> LoggedIteration:
        data = memoryview(file.read_bytes())
        begun, lost = _frames(data)
        if not begun:
            raise _Unusable("changed after it was written")
        header = unpack(begun[0])
        if (header["iteration"], header["made_by"]) != (iteration, self._sampling_hash):
            raise _Unusable(
                "was sampled with another seed, environment, model, chat or rollout than the"
                " configuration has now"
            )
        logged = LoggedIteration(header["tasks"], {}, {})
        for record in begun[1:]:
            member = LoggedMember(**unpack(record))
            key = (member.group, member.member)
            logged.trajectories[key] = member.trajectory  # the last one: others were discarded
            logged.origins[key] = member.sampled_by
        self._ends[iteration] = end = sum(_FRAME.size + len(frame) for frame in begun)
        if lost:  # overwritten by what is appended
            self._log(
                f"{file} is damaged after {len(logged.trajectories)} conversations, as after a"
                f" power cut: its last {len(data) - end} bytes are dropped, and the conversations"
                f" in them are sampled again (at least {lost})."
            )
        return logged


def _frame(value: object) -> bytes:
    packed = pack(value)
    return _FRAME.pack(_MARK, len(packed)) + packed


def _frames(data: memoryview) -> tuple[list[memoryview], int]:
    """The packed values of a file up to the first that is damaged; how many lie behind these."""
    whole: list[memoryview] = []
    lost = place = 0
    while place < len(data):
        head = bytes(data[place : place + _FRAME.size]).ljust(_FRAME.size, b"\0")
        mark, length = _FRAME.unpack(head)
        packed = data[place + _FRAME.size : place + _FRAME.size + length]
        fits = mark == _MARK and len(packed) == length
        if not lost and fits and is_whole(packed):
            whole.append(packed)
        else:
            lost += 1
        if not fits:
            break
        place += _FRAME.size + length
    return whole, lost


def _append(file: Path, end: int, data: bytes) -> int:
    """Writes bytes behind the first `end` of a file, and syncs it; returns the new end."""
    with name_file(file):
        descriptor = os.open(file, os.O_WRONLY)
        try:
            _write_at(descriptor, end, data)
            os.ftruncate(descriptor, end + len(data))  # of what failed before
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # room for others; the next append overwrites it
                os.ftruncate(descriptor, end)
            raise
        finally:
            os.close(descriptor)
    return end + len(data)


def _write_at(descriptor: int, place: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, place)
        place, rest = place + written, rest[written:]
