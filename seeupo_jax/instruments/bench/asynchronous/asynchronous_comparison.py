"""Seconds per iteration of the same run, with samplers that wait for slow environments.

Every way has the same number of devices and the same tasks. `synchronous`: all devices sample, then
all train. `devices`: half of them sample while the others train (`rollout.devices`), for each of
`--lags`. `workers`: two trainer processes and two processes with `--role=rollout`, with as many
devices each. An episode waits from 0 to `--seconds`, and one in twenty four times as long as any
other (`SlowDesk`). The first iterations compile programs and fill the pipeline: they are left out.
With a lag, the groups of `max_lag` + 1 iterations are played at once, and then as many iterations
follow each other without waiting: what is timed is a multiple of that.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.flags import Flags, integer, names, one_of, output_file, positive
from seeupo_jax.instruments.bench.asynchronous.slow_desk import SlowDesk
from seeupo_jax.metrics.metrics_log import read_metrics

DEVICES = 8  # of all processes together
PROCESSES = 2  # of the trainer, and as many workers
TARGET = 0.5  # of the synchronous run's seconds per iteration
SYNCHRONOUS, SPLIT, WORKERS = "synchronous", "devices", "workers"
_ENVIRONMENT = f"{SlowDesk.__module__}:{SlowDesk.__name__}"
_SHOWN = ("rollout/policy_lag_mean", "rollout/mixed_versions", "sweep/importance_ess")
_CORRECTION = "algorithm.importance={'method': 'truncate', 'per': 'token', 'clip': 2.0}"


@dataclass(frozen=True)
class Way:
    """A way to run: fields of the trainer, and its processes."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    workers: int = 0

    def timed(self, iterations: int) -> int:
        """So many iterations or a few more: the next multiple of those that are played at once."""
        at_once = self.fields.get("rollout.max_lag", 0) + 1
        return math.ceil(iterations / at_once) * at_once


def add_flags(parser: Flags) -> None:
    """The delays, the size of the run, and the ways to run it."""
    ways = (SYNCHRONOUS, SPLIT, WORKERS)
    words = f"some of {', '.join(ways)}; default: all"
    parser.flag("ways", words, _some_of(ways), default=ways)
    parser.flag("lags", "values of rollout.max_lag; default: 1,4", _lags, default=(1, 4))
    parser.flag("seconds", "an episode waits at most, but for slow ones", positive, default=30.0)
    parser.flag("tasks", "groups of an iteration", integer(1), default=16)
    parser.flag("group_size", "episodes of a group", integer(2), default=8)
    parser.flag("iterations", "that are timed, at least", integer(1), default=6)
    parser.flag("skip", "first iterations that are not", integer(0), default=3)
    parser.flag("seed", "of the run", integer(0), default=0)
    parser.flag("json", "also write the figures to this file", output_file)


def _some_of(allowed: Sequence[str]) -> Any:
    def read(value: str) -> tuple[str, ...]:
        given = names(value)
        for name in given:
            one_of(*allowed)(name)
        return tuple(given)

    return read


def _lags(value: str) -> tuple[int, ...]:
    return tuple(integer(1)(name) for name in names(value))


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Runs every way, one after the other, and prints their seconds per iteration.

    Raises:
      ValueError: a run failed.
    """
    load = round(os.getloadavg()[0], 2)  # before there is ours
    measured: dict[str, dict[str, float]] = {}
    for name, way in _ways(flags).items():
        print(f"{name} ...", flush=True)
        measured[name] = _measure(flags, way)
    figures: dict[str, Any] = {
        "benchmark": "asynchronous",
        "seconds": flags.seconds,
        "episodes": flags.tasks * flags.group_size,
        "load_before": load,
        "target": TARGET,
        "ways": measured,
    }
    base = measured.get(SYNCHRONOUS)
    for name, of_way in measured.items():
        if base is not None and name != SYNCHRONOUS:
            of_way["ratio"] = of_way["iteration_s"] / base["iteration_s"]
    _print(figures)
    return figures


def _ways(flags: argparse.Namespace) -> dict[str, Way]:
    ways = {SYNCHRONOUS: Way()} if SYNCHRONOUS in flags.ways else {}
    for lag in flags.lags:
        stale = {"rollout.max_lag": lag}
        if SPLIT in flags.ways:
            ways[f"{SPLIT}, lag {lag}"] = Way(stale | {"rollout.devices": DEVICES // 2})
        if WORKERS in flags.ways:
            ways[f"{WORKERS}, lag {lag}"] = Way(stale, processes=PROCESSES, workers=PROCESSES)
    return ways


def _measure(flags: argparse.Namespace, way: Way) -> dict[str, float]:
    """Means over the timed iterations of one way."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        workdir = Path(folder, "run")
        if way.workers:
            way = replace(way, fields={**way.fields, "rollout.port": _free_port()})
        trainers = [
            _start(started, Path(folder, f"trainer{number}.log"), line, way)
            for number, line in enumerate(_trainer_lines(flags, way, workdir))
        ]
        line = _command(flags, way, workdir)
        for number in range(way.workers):
            log = Path(folder, f"worker{number}.log")
            _start(started, log, [*line, "--role=rollout"], way)
        for process, log in trainers:
            if process.wait():
                said = log.read_text(encoding="utf-8").strip().splitlines() or ["nothing"]
                raise ValueError(
                    f"bench asynchronous: a run ended with {process.returncode}, and"
                    f" said last: {said[-1]}"
                )
        lines = [line for line in read_metrics(workdir) if "rollout/reward_mean" in line]
    return _means(lines[flags.skip :])


def _means(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the seconds of an iteration and its parts, and of how old its samples are."""
    waited = [line["time/rollout_s"] for line in lines]
    swept = [line["time/sweep_s"] for line in lines]
    both = [sum(pair) for pair in zip(waited, swept, strict=True)]
    shown = {
        name: statistics.fmean(line[name] for line in lines if name in line)
        for name in _SHOWN
        if any(name in line for line in lines)
    }
    return {
        "iteration_s": statistics.fmean(both),
        "longest_s": max(both),
        "rollout_s": statistics.fmean(waited),
        "sweep_s": statistics.fmean(swept),
    } | shown


def _trainer_lines(flags: argparse.Namespace, way: Way, workdir: Path) -> list[list[str]]:
    line = _command(flags, way, workdir)
    if way.processes == 1:
        return [line]
    cluster = [f"--coordinator=localhost:{_free_port()}", f"--num_processes={way.processes}"]
    return [[*line, *cluster, f"--process_id={number}"] for number in range(way.processes)]


def _command(flags: argparse.Namespace, way: Way, workdir: Path) -> list[str]:
    conversations = flags.tasks * flags.group_size * (1 + way.fields.get("rollout.max_lag", 0))
    fields = {
        "iterations": flags.skip + way.timed(flags.iterations),
        "seed": flags.seed,
        "env.name": _ENVIRONMENT,
        "env.options.seconds": flags.seconds,
        "env.workers": conversations,
        "env.timeout_s": math.ceil(2 * SlowDesk.slow_times * flags.seconds) + 60,
        "rollout.tasks": flags.tasks,
        "rollout.group_size": flags.group_size,
        "rollout.concurrency": conversations,
        "rollout.deterministic": False,
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "checkpoint.export": False,
        "telemetry.display": "plain",
    } | way.fields
    texts = [f"--config.{name}={value}" for name, value in fields.items()]
    texts += [f"--config.{_CORRECTION}"] if "rollout.max_lag" in way.fields else []
    line = [sys.executable, "-m", "seeupo_jax.train", "--config=package:quickstart"]
    return [*line, f"--workdir={workdir}", *texts]


def _start(
    started: contextlib.ExitStack, log: Path, line: Sequence[str], way: Way
) -> tuple[subprocess.Popen[str], Path]:
    """Starts a process with its part of the devices; it is killed with the stack."""
    parts = way.processes + way.workers
    devices = f"--xla_force_host_platform_device_count={DEVICES // parts}"
    xla = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    file = started.enter_context(log.open("w", encoding="utf-8"))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla}
    process = subprocess.Popen(line, env=environment, stdout=file, stderr=file, text=True)
    started.callback(_end, process)
    return process, log


def _end(process: subprocess.Popen[str], patience_s: float = 10.0) -> None:
    """Asks a process to end, and ends it."""
    deadline = time.monotonic() + patience_s
    process.terminate()
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.wait()


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as probe:
        return probe.getsockname()[1]


def _print(figures: Mapping[str, Any]) -> None:
    print(f"{figures['episodes']} episodes an iteration, which wait up to {figures['seconds']:g} s")
    print(f"{'':20}{'s/iteration':>12}{'waiting':>9}{'sweep':>8}{'of sync':>9}{'lag':>6}{'ess':>6}")
    for name, way in figures["ways"].items():
        ratio = f"{way['ratio']:9.2f}" if "ratio" in way else f"{'':9}"
        lag, _, ess = (f"{way[key]:6.2f}" if key in way else f"{'':6}" for key in _SHOWN)
        print(
            f"{name:20}{way['iteration_s']:12.1f}{way['rollout_s']:9.1f}{way['sweep_s']:8.2f}"
            f"{ratio}{lag}{ess}"
        )
