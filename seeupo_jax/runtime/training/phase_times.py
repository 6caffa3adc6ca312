"""Times and compiled programs of a run's phases, and how the run was started."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import Progress
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.metrics.run_manifest import Launch, write_run_manifest
from seeupo_jax.runtime.build import Policy


class PhaseTimes:
    """Seconds and programs since they were last taken; close it in the end.

    spent: by the names of metrics.
    """

    def __init__(self, progress: Progress):
        self._progress, self._compilations = progress, Compilations()
        self.spent: Counter[str] = Counter()

    def close(self) -> None:
        """Stops counting."""
        self._compilations.close()

    def take(self) -> Counter[str]:
        """The counts so far, which start anew."""
        taken = Counter(self.spent)
        self.spent.clear()
        return taken

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of an iteration: shown, timed, and its compilations counted."""
        self._progress.phase(name)
        with self.counted(name):
            yield

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds that something takes to `time/NAME_s` of the iteration under way."""
        began = time.perf_counter()
        yield
        self.spent[f"time/{name}_s"] += time.perf_counter() - began

    @contextlib.contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """As `phase`, for a phase that is shown already."""
        with self.apart(name) as spent:
            yield
        self.spent.update(spent)

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[dict[str, float]]:
        """As `counted`, into the metrics that it yields, which have their values in the end."""
        programs, compiling = self._compilations.programs, self._compilations.seconds
        began, spent = time.perf_counter(), {}
        yield spent
        spent[f"time/{name}_s"] = time.perf_counter() - began
        spent[f"{name}/programs_compiled"] = self._compilations.programs - programs
        spent["time/compile_s"] = self._compilations.seconds - compiling


def write_description(
    workdir: Path, config: Config, launch: Launch, policy: Policy, params: Any, *, resumed: bool
) -> None:
    """Leaves in WORKDIR/run.json how a run was begun, and with what.

    Args:
      params: those that train. resumed: whether the run resumes from a checkpoint.
    """
    devices, path = policy.mesh.devices, config.model.path
    write_run_manifest(
        workdir,
        resumed=resumed,
        launch=launch,
        config=to_dict(config),
        devices={
            "platform": devices.flat[0].platform,
            "kind": devices.flat[0].device_kind,
            "count": devices.size,
            "processes": jax.process_count(),
        },
        model={
            "name": "randomly initialised" if path is None else path,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.merged(params))),
        },
    )
