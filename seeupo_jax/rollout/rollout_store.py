"""Stores an iteration's trajectories in a file: a killed sweep resumes with the same ones."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax

from seeupo_jax.durable_files import write_atomically
from seeupo_jax.parallel.distributed import broadcast_from_primary
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.stored_trajectories import (
    TYPES,
    Damaged,
    pack,
    remove_files,
    unpack,
    with_json,
)

_LOGGER = logging.getLogger(__name__)


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
        self,
        iteration: int,
        collected: Collected,
        made_by: str = "",
        sampled_by: str = "",
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        """Stores a collection: writes it atomically in the background.

        A collection that cannot be written is reported: a killed sweep then samples again.

        Args:
          made_by: fingerprint of the settings that, with the parameters, determine the sampling.
          sampled_by: fingerprint of the parameters that sampled.
          on_saved: called in the background in process 0, once the collection is on the disk.
        """
        if jax.process_index() == 0:
            origin = {"made_by": made_by, "sampled_by": sampled_by}
            self._pending = self._writer.submit(self._save, iteration, collected, origin, on_saved)

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

    def _save(
        self,
        iteration: int,
        collected: Collected,
        origin: Mapping[str, str],
        on_saved: Callable[[], None],
    ) -> None:
        file = self._file(iteration)
        try:
            rounds = {n: with_json(vars(collected)[n]) for n in ("trajectories", "left_out")}
            notes = {"iteration": iteration, **origin, "collected": replace(collected, **rounds)}
            write_atomically(file, pack(notes))
        except (OSError, TypeError, ValueError, RecursionError) as error:
            self._log(
                f"{file} could not be written ({error}): a sweep that is killed will sample again."
            )
        else:
            on_saved()

    def load(self, iteration: int, made_by: str = "", sampled_by: str = "") -> Collected | None:
        """The iteration's collection, equal to the bit; None if there is no usable one.

        A collection of other settings or parameters is not usable. In `info` and messages, values
        that JSON cannot hold have become text, and tuples and sets lists.
        """
        self.wait()
        first = jax.process_index() == 0
        loaded = self._load(iteration, made_by, sampled_by) if first else None
        return broadcast_from_primary(loaded, *TYPES)

    def sampled_by(self, iteration: int, made_by: str = "") -> str | None:
        """The `sampled_by` of the iteration's collection; None: none of these settings is stored.

        Nothing is said of one that cannot be read.
        """
        self.wait()
        found = None
        if jax.process_index() == 0:
            with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
                notes = unpack(self._file(iteration).read_bytes())
                if (notes["iteration"], notes["made_by"]) == (iteration, made_by):
                    found = notes["sampled_by"]
        return broadcast_from_primary(found)

    def forget(self, up_to_iteration: int) -> None:
        """Removes the collections of all iterations up to this one: a checkpoint covers them."""
        self.wait()
        if jax.process_index() == 0:
            remove_files(self._folder, "rollouts", up_to_iteration)

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
        try:
            notes = unpack(data)
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
        except Damaged as error:
            return self._throw_away(file, str(error))
        except (LookupError, TypeError, ValueError):  # whole, yet of another form
            return self._throw_away(file, "was written by another version of this program")

    def _throw_away(self, file: Path, reason: str) -> None:
        self._log(f"{file} {reason}; its trajectories are discarded and sampled again.")
