"""The same rollouts and sweeps in one process and in several, by the idle time of their devices.

The work and the number of devices are the same for every number of processes: 4 devices of one
process, 2 of each of two, 1 of each of four. So a program computes the same, and takes all the
cores of this machine, however many processes there are; what differs is the host's work between
programs. The devices of a process are idle if the host does not give them their next program in
time, for example because it waits for the others. One process shows how much of that the work has
of itself; what several have more is the price of their agreements.

Weights and trajectories are random and the same. The first rollout and the first
sweep are compared with those of one process: all samples to the last bit, and the values of all
steps within rounding, since a sum over four devices is made in another order within a process than
between processes. Then both ways to agree are measured alternately.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.benchmarks import machine
from seeupo_jax.benchmarks.comparison import TOLERANCES, greatest
from seeupo_jax.benchmarks.settings import MODELS, BenchSettings
from seeupo_jax.benchmarks.workloads import prepared
from seeupo_jax.cli.command_line import add_cluster_flags, prepare_xla
from seeupo_jax.configuration.flags import (
    Flags,
    Wrong,
    integer,
    names,
    one_of,
    output_file,
    positive,
)
from seeupo_jax.instruments.bench.processes.device_idle import (
    CHANNEL,
    ROLLOUT,
    SWEEP,
    WAYS,
    IdleTimes,
    ProcessWork,
)
from seeupo_jax.parallel import cluster
from seeupo_jax.parallel.distributed import gather
from seeupo_jax.planning.flops import parameters

DEVICES = 4  # of all processes together
ALLOWED = 0.05  # of the time, that devices are idle more than with one process
_COUNTS = ("1", "2", "4")  # whose devices are as many
_XLA_DEVICES = "--xla_force_host_platform_device_count"


def _counts(value: str) -> tuple[int, ...]:
    given = names(value)
    for name in given:
        if name not in _COUNTS:
            raise Wrong(name, f"some of {', '.join(_COUNTS)}")
    return tuple(sorted({1, *map(int, given)}))


def add_flags(parser: Flags) -> None:
    """The work, the numbers of processes, and the flags of each of them."""
    sizes = f"random weights of a size: {', '.join(MODELS)}"
    words = "how many, some of 2,4, beside 1, which is always measured; default: 2,4"
    parser.flag("processes", words, _counts, default=(1, 2, 4))
    parser.flag("model", sizes, one_of(*MODELS), default="tiny")
    parser.flag("scale", "of the lengths of the workload `long`", positive, default=0.5)
    parser.flag("turns", "of every conversation", integer(2), default=6)
    parser.flag("groups", "prompts, for every device", integer(1), default=1)
    parser.flag("group_size", "conversations that begin with each prompt", integer(2), default=4)
    parser.flag("decode_steps", "tokens that a dispatch decodes at most", integer(1), default=8)
    parser.flag("repeats", "timed rollouts and sweeps of each kind", integer(1), default=5)
    parser.flag("seed", "of weights, tokens and rewards", integer(0), default=0)
    parser.flag("json", "also write the figures to this file", output_file)
    add_cluster_flags(parser)


def run(flags: argparse.Namespace) -> dict[str, Any] | None:
    """Measures and prints; the figures.

    With a flag of `add_cluster_flags` it is one of the processes that another one has started.

    Raises:
      ValueError: a process failed, or several do not compute what one does.
    """
    if {flags.coordinator, flags.process_id, flags.num_processes} != {None}:
        return _as_one_of_several(flags)
    load = round(os.getloadavg()[0], 2)  # before there is ours
    measured = {count: _start(flags, count) for count in flags.processes}
    one = measured[1]
    figures: dict[str, Any] = {
        "benchmark": "processes",
        "settings": one["settings"],
        "parameters": one["parameters"],
        "machine": one["machine"] | {"load_before": load},
        "allowed": ALLOWED,
        "of_processes": {
            str(count): _against_one(of_count, one, count) for count, of_count in measured.items()
        },
    }
    figures["kept"] = _most(figures) <= ALLOWED
    _print(figures)
    return figures


def _start(flags: argparse.Namespace, count: int) -> dict[str, Any]:
    """The figures of so many processes on this machine."""
    print(f"{count} of {DEVICES // count} devices each ...", flush=True)
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    cluster_flags = {"num_processes": count}
    if count > 1:
        cluster_flags["coordinator"] = f"localhost:{port}"
    passed = ("model", "scale", "turns", "groups", "group_size", "decode_steps", "repeats", "seed")
    given = {name: getattr(flags, name) for name in passed} | cluster_flags
    line = [sys.executable, "-m", "seeupo_jax.bench", "processes"]
    line += [f"--{name}={value}" for name, value in given.items()]
    xla = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_DEVICES}={DEVICES // count}"
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        file, processes = Path(folder, "figures.json"), []
        for number in range(count):
            own = [f"--process_id={number}"] if count > 1 else []
            own += [f"--json={file}"] if number == 0 else []
            log = started.enter_context(Path(folder, f"{number}.log").open("w+", encoding="utf-8"))
            process = subprocess.Popen([*line, *own], env=variables, stdout=log, stderr=log)
            started.callback(process.kill)
            processes.append((process, log))
        for number, (process, log) in enumerate(processes):
            if process.wait():
                log.seek(0)
                said = log.read().strip().splitlines() or ["nothing"]
                raise ValueError(
                    f"bench processes: process {number} of {count} ended with"
                    f" {process.returncode}, and said last: {said[-1]}"
                )
        return json.loads(file.read_text(encoding="utf-8"))


def _as_one_of_several(flags: argparse.Namespace) -> dict[str, Any] | None:
    """Measures as one process; process 0 has the figures of all."""
    timeout_s = flags.cluster_timeout_s
    place = cluster.find_process_place(
        flags.coordinator, flags.process_id, flags.num_processes, timeout_s=timeout_s
    )
    # A thread that waits for the end of a program is to see it at once, whatever the host does.
    sys.setswitchinterval(1e-4)
    prepare_xla()
    with cluster.exit_on_error():
        if place is not None:
            cluster.join(place, {}, timeout_s=timeout_s)
        settings = _settings(flags)
        with prepared(settings, "float32") as inputs:
            work = ProcessWork(inputs)
        ways = list(WAYS)[: 1 if place is None else len(WAYS)]
        each: dict[tuple[str, str], list[list[IdleTimes]]] = {}
        for part, way in list(itertools.product((ROLLOUT, SWEEP), ways)) * flags.repeats:
            every = gather(tuple(work.measure(part, way)))
            each.setdefault((part, way), []).append([IdleTimes(*one) for one in every])
        if jax.process_index():
            return None
    return {
        "settings": {"workload": "long", "model": flags.model, "groups": settings.groups}
        | {name: getattr(flags, name) for name in ("scale", "turns", "group_size", "decode_steps")},
        "parameters": parameters(inputs.arch),
        "devices": jax.device_count(),
        "machine": machine.describe(jax.devices()[0]),
        "results": work.results,
        "parts": [{"part": part, "way": way, **_figures(e)} for (part, way), e in each.items()],
    }


def _settings(flags: argparse.Namespace) -> BenchSettings:
    return BenchSettings(
        workload="long",
        model=flags.model,
        scale=flags.scale,
        turns=flags.turns,
        groups=flags.groups * DEVICES,
        group_size=flags.group_size,
        decode_steps=flags.decode_steps,
        seed=flags.seed,
        repeats=flags.repeats,
    )


def _figures(each: Sequence[Sequence[IdleTimes]]) -> dict[str, Any]:
    """Of one part and way; each: [repeat][process]. The process counts whose devices idle most."""
    most = [max(every, key=lambda times: times.idle) for every in each]
    return {
        "idle": statistics.median(times.idle for times in most),
        "each_idle": [times.idle for times in most],
        "idle_s": statistics.median(times.idle_s for times in most),
        "busy_s": statistics.median(times.busy_s for times in most),
        "agreements": most[0].agreements,
        "agreement_ms": statistics.median(
            1e3 * times.agreeing_s / max(1, times.agreements) for every in each for times in every
        ),
    }


def _against_one(of_count: Mapping[str, Any], one: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Whether the results are those of one process, and how much longer devices idle.

    Raises:
      ValueError: the results differ.
    """
    results, wanted = of_count["results"], one["results"]
    pairs = list(zip(results["steps"], wanted["steps"], strict=True))
    differences = [
        greatest(a[name], b[name]) for a, b in pairs for name in ("loss", "kl", "weights")
    ]
    most = max(differences)
    if results["rollout_hash"] != wanted["rollout_hash"] or not most <= TOLERANCES["float32"]:
        raise ValueError(
            f"bench processes: {count} processes sample or update otherwise than one does (steps"
            f" differ by {most:.2g}; allowed: {TOLERANCES['float32']:g}, and the same samples)."
        )
    alone = {row["part"]: row["idle"] for row in one["parts"]}
    parts = [row | {"over_one": row["idle"] - alone[row["part"]]} for row in of_count["parts"]]
    same = results["sweep_hash"] == wanted["sweep_hash"]
    return {
        "devices": of_count["devices"],
        "parts": parts,
        "same_bits": same,
        "largest_difference": most,
    }


def _most(figures: Mapping[str, Any]) -> float:
    """The most that devices idle over one process, with the side channel."""
    return max(
        row["over_one"]
        for of_count in figures["of_processes"].values()
        for row in of_count["parts"]
        if row["way"] == CHANNEL
    )


def _print(figures: Mapping[str, Any]) -> None:
    print(f"{'processes':10}{'part':9}{'agreement':19}{'idle':>7}{'over one':>10}{'ms each':>9}")
    for count, of_count in figures["of_processes"].items():
        for row in of_count["parts"]:
            way = row["way"] if count != "1" else "-"
            print(
                f"{count:10}{row['part']:9}{way:19}{row['idle']:7.1%}{row['over_one']:+10.1%}"
                f"{row['agreement_ms']:9.2f}"
            )
    for count, of_count in figures["of_processes"].items():
        same = "the same bits" if of_count["same_bits"] else "the same to rounding"
        difference = of_count["largest_difference"]
        print(f"{count}: the same samples; a sweep {same} ({difference:.1g} at most)")
    kept = "kept" if figures["kept"] else "not kept"
    print(f"overlap {kept}: {_most(figures):+.1%} over one process; allowed: {ALLOWED:+.0%}")
