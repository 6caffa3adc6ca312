"""Test programs that run in several processes which find each other, as on several hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loaded_python import LoadedPython
from places import ROOT, SUPPORT

# The older way to compile what XLA fuses, which newer versions do not have, takes half of the time
# for programs as small as tests'; and such a program in 32 parts takes a tenth more than in one.
QUICK_XLA = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10.")
    else ""
)
PYTHONPATH = os.pathsep.join(map(str, (SUPPORT / "without_torch", SUPPORT, ROOT)))


# Below those that Linux gives to connections (32,768 on), so that nothing takes a port between its
# choice and its use; each worker of the tests tries them in an order of its own.
_PORTS = itertools.cycle(random.Random(os.getpid()).sample(range(20_000, 32_000), 4_000))


def free_port() -> int:
    """A port of this machine that nobody listens on, another one at each call."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise AssertionError("a cycle of ports does not end")


def environment(devices: int = 1) -> dict[str, str]:
    """Of a process that has so many devices, and keeps every program that it compiles."""
    return os.environ | {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": PYTHONPATH,
        "XLA_FLAGS": f"{QUICK_XLA} --xla_force_host_platform_device_count={devices}",
    }


def run_processes(
    program: str,
    processes: int,
    devices: int,
    folder: Path,
    *arguments: object,
    read: Callable[[bytes], Any],
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """What each process leaves in its file of `folder`, as `read` has it.

    Args:
      program: a file of the tests; its arguments are RANK COUNT PORT OUT and the rest.
      devices: of each. variables: of its environment, beside those of `environment`.
    """
    port = free_port()
    name = "_".join([Path(program).stem, *map(str, (processes, devices)), "{}"])
    files = [folder / name.format(rank) for rank in range(processes)]
    started = [
        LoadedPython(
            [sys.executable, SUPPORT / program]
            + [str(x) for x in (rank, processes, port, file, *arguments)],
            env=environment(devices) | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0 and "Traceback" not in output, output[-3000:]
    return [read(file.read_bytes()) for file in files]
