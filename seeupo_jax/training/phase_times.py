"""Times and compiled programs of a run's phases."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from seeupo_jax.display.progress import ProgressDisplay


class PhaseTimes:
    """Seconds and programs since they were last taken.

    spent: by the names of metrics.
    """

    def __init__(self, progress: ProgressDisplay):
        self._progress, self._compilations = progress, progress.compilations
        self.spent: Counter[str] = Counter()

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
