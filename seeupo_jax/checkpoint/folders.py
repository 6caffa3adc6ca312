"""The folders of a directory that are checkpoints, each named by its step, finished or not."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time

from etils import epath

from seeupo_jax.checkpoint.manifest import MANIFEST, is_checkpoint, remove_manifest
from seeupo_jax.checkpoint.storage import is_bucket
from seeupo_jax.durable_files import make_folder

_REMOVALS, _REMOVAL_S = 20, 0.1
_NAME = re.compile(r"(\d+)(?:\.(\d+))?")  # a step, and how often it had been saved before


class Folders:
    """Finds, makes and removes them by name; what else is in the directory stays."""

    def __init__(self, directory: epath.Path):
        """Opens a directory, which need not exist yet."""
        self._directory = directory

    def names(self) -> set[str]:
        """Folders of checkpoints, finished or not."""
        if not self._directory.is_dir():
            return set()
        named = (path for path in self._directory.iterdir() if _NAME.fullmatch(path.name))
        return {path.name for path in named if is_checkpoint(path)}

    def finished(self) -> dict[int, str]:
        """The finished steps, and in which folder the last save of each is."""
        finished = {n for n in self.names() if (self._directory / n / MANIFEST).exists()}
        return {step_of(name): name for name in sorted(finished, key=_attempt)}

    def make(self, step: int) -> str:
        """Makes the folder of a new checkpoint; a finished one of the same step stays."""
        names, finished = self.names(), self.finished()
        first = _attempt(finished[step]) + 1 if step in finished else 0
        for attempt in itertools.count(first):
            name = f"{step}.{attempt}" if attempt else str(step)
            if name in names:
                with contextlib.suppress(OSError):  # what stays there leaves the next name
                    self.remove(name)
            if not (self._directory / name).exists():  # else it is the user's
                break
        if not is_bucket(self._directory) and not self._directory.exists():
            make_folder(self._directory)
        (self._directory / name).mkdir(parents=True)
        return name

    def remove(self, name: str) -> None:
        """Removes a checkpoint so that it never counts while it is only half there.

        Of one that is a symbolic link only the link: what that points to may not be the run's.
        """
        folder = self._directory / name
        if os.path.islink(folder):
            return folder.unlink()
        remove_manifest(folder)
        folder.rmtree()

    def remove_unfinished(self) -> None:
        """Removes what failed saves have left, as far as it can be removed; it counts for nothing.

        Other threads of Orbax may still write there, and make again what is just removed.
        """
        for _ in range(_REMOVALS):
            with contextlib.suppress(Exception):
                unfinished = self.names() - set(self.finished().values())
                for name in unfinished:
                    self.remove(name)
                if not unfinished:
                    return
            time.sleep(_REMOVAL_S)


def step_of(name: str) -> int:
    """The step of a folder among `Folders.names`."""
    return int(_NAME.fullmatch(name)[1])


def _attempt(name: str) -> int:
    return int(_NAME.fullmatch(name)[2] or 0)
