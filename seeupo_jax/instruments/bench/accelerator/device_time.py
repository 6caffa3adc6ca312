"""Where the device's time goes in a sweep and in a rollout: by compiled program and by kernel."""

from __future__ import annotations

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seeupo_jax.benchmarks import machine
from seeupo_jax.benchmarks.jax_runner import JaxSweeps
from seeupo_jax.benchmarks.rollout import converse, make_engine
from seeupo_jax.benchmarks.settings import BenchSettings
from seeupo_jax.benchmarks.workloads import prepared
from seeupo_jax.instruments.bench.accelerator.runner import Record

KERNELS = 12  # that are listed, those that take longest
_NAME = 60  # characters of a kernel's name: those of templates have hundreds
_DEVICES = ("/device:GPU:", "/device:TPU:")  # libtpu adds one of its own, that has no kernels
_LINES = ("Stream", "XLA Ops")  # of a GPU's and of a TPU's events; others sum them up
_CONTAINERS = ("while", "call", "conditional")  # whose parts have events of their own
_NUMBERS = re.compile(r"[._]\d+\b")


class Event(NamedTuple):
    """A kernel's run on a device, in seconds.

    program: its compiled program; "-" if the trace does not name it.
    """

    program: str
    kernel: str
    start: float
    end: float


def device_time(record: Record, settings: BenchSettings, rehearse: bool) -> None:
    """Traces a second sweep and a second rollout of the same conversations."""
    dtype = machine.fast_dtype(jax.devices()[0])
    with prepared(settings, dtype) as inputs:
        work = inputs.work
        about = {"model": settings.model, "workload": work.name, "dtype": dtype, "runs": {}}
        sweeps = JaxSweeps(inputs)
        engine = make_engine(sweeps.policy.network, work, settings)
        engine.compile(sweeps.params())
        runs: dict[str, Callable[[], Any]] = {
            "sweep": sweeps.run,
            "rollout": lambda: converse(engine, sweeps.params(), work, settings.seed),
        }
        for name, run in runs.items():
            run()  # compiles programs that are not compiled yet
            about["runs"][name] = traced(run)
            record.put(figures=about)


def traced(run: Callable[[], Any]) -> dict[str, Any]:
    """Runs under the profiler: `summary` of its events, and the `seconds` that it took."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
        (file,) = Path(folder).rglob("*.xplane.pb")
        trace = jax.profiler.ProfileData.from_file(str(file))
        return {"seconds": seconds, **summary([*events(trace.planes)])}


def events(planes: Iterable[Any]) -> Iterator[Event]:
    """Events of the first device of a trace; of XLA's own threads where there are CPUs only."""
    planes = list(planes)
    device = min((plane.name for plane in planes if plane.name.startswith(_DEVICES)), default="")
    read = [plane for plane in planes if not device or plane.name == device]
    lines = [line for plane in read for line in plane.lines]
    if device:
        lines = [line for line in lines if line.name.startswith(_LINES)]
    for event in (event for line in lines for event in line.events):
        stats = dict(event.stats)
        kernel = _NUMBERS.sub("", event.name)
        if kernel not in _CONTAINERS and (device or "hlo_op" in stats):
            start, program = 1e-9 * event.start_ns, str(stats.get("hlo_module", "-"))
            yield Event(program, kernel[:_NAME], start, start + 1e-9 * event.duration_ns)


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Seconds in which any event ran, their number, and those that take longest.

    Returns: `busy_s`, `events`, and `programs` and `kernels`, each a list of dictionaries of
      `program`, `kernel` (of kernels only), `seconds` and `events`, the longest first.
    """
    busy, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        busy += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return {
        "busy_s": busy,
        "events": len(events),
        "programs": _sums(events, ("program",)),
        "kernels": _sums(events, ("program", "kernel"))[:KERNELS],
    }


def _sums(events: Sequence[Event], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Events with the same values of `keys`, together."""
    each: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for event in events:
        each[tuple(getattr(event, key) for key in keys)].append(event.end - event.start)
    rows = [
        dict(zip(keys, names, strict=True)) | {"seconds": sum(seconds), "events": len(seconds)}
        for names, seconds in each.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])
