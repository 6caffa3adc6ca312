"""The benchmarks' suites: lists of measurements whose figures make the page."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from seeupo_jax.benchmarks import benchmark_report
from seeupo_jax.checkpoint import check_may_write
from seeupo_jax.configuration.flags import Flags, one_of

_EAGER = "--torch=eager"  # where the others would take longer than all that is measured
_EACH = "--torch=none --without=all"
_POINT = f"update --workload=long {_EAGER} --scale=0.25"
# File -> command. One variable at a time around the same point of the workload `long`.
CPU: dict[str, str] = {
    "update_bfcl_tiny": "update --workload=bfcl --groups=4",
    "update_order_desk_tiny": "update --workload=order_desk --groups=16 --repeats=5",
    "update_bfcl_135m": f"update --workload=bfcl --model=135m {_EAGER} --scale=0.0625 --repeats=2",
    "update_order_desk_135m": f"update --workload=order_desk --model=135m {_EAGER} --repeats=5",
    "iteration_bfcl_tiny": f"iteration --workload=bfcl {_EAGER}",
    "iteration_order_desk_tiny": f"iteration --workload=order_desk --groups=4 {_EAGER}",
    "rollout_bfcl_tiny": "rollout --workload=bfcl",
    "rollout_order_desk_tiny": "rollout --workload=order_desk --groups=4",
    "sft_bfcl_tiny": "sft --workload=bfcl --groups=4",
    "sft_order_desk_tiny": "sft --workload=order_desk --groups=16",
    "techniques_bfcl_tiny": f"update --workload=bfcl {_EACH}",
    "techniques_order_desk_tiny": f"update --workload=order_desk --groups=16 {_EACH}",
    **{f"sizes_turns_{n}": f"{_POINT} --turns={n}" for n in (2, 4, 8, 16)},
    **{f"sizes_prompt_{n}": f"{_POINT} --turns=4 --prompt={n}" for n in (64, 256, 1024)},
    **{f"sizes_group_size_{n}": f"{_POINT} --turns=4 --group_size={n}" for n in (2, 4, 8)},
    "update_appworld_tiny": f"update --workload=appworld {_EAGER}",
    "update_long_tiny": f"{_POINT} --groups=4",
}
# Real lengths, and models of a size that is trained on one device.
ACCELERATOR: dict[str, str] = {
    f"{benchmark}_bfcl_{model}": f"{benchmark} --workload=bfcl --scale=1 --model={model}"
    for benchmark in ("update", "rollout", "iteration")
    for model in ("0.5b", "1.5b")
}
SUITES = {"cpu": CPU, "accelerator": ACCELERATOR}


def add_flags(parser: Flags) -> None:
    """Adds the flags of the page and of the selection of measurements."""
    benchmark_report.add_flags(parser)
    parser.flag("suite", f"one of {', '.join(SUITES)}", one_of(*SUITES), default="cpu")


def run(flags: argparse.Namespace) -> None:
    """Runs the measurements without figures, each in its own process, and writes the page.

    Raises:
      ValueError: the folder cannot be made; or a command failed, and the figures of those before it
        are kept.
    """
    check_may_write(flags.results, "--results")
    commands = SUITES[flags.suite]
    flags.results.mkdir(parents=True, exist_ok=True)
    benchmark_report.figures_in(flags.results)  # an unknown file is reported before hours of work
    for number, (name, command) in enumerate(commands.items(), 1):
        file = flags.results / f"{name}.json"
        if file.exists():
            print(f"{number}/{len(commands)} {name}: has its figures, {file}")
            continue
        print(f"{number}/{len(commands)} {name}: {command}", flush=True)
        measure(command, file)
    benchmark_report.run(flags)


def measure(command: str, file: Path) -> None:
    """Runs one command.

    Raises:
      ValueError: it failed.
    """
    line = [sys.executable, "-m", "seeupo_jax.bench", *command.split(), f"--json={file}"]
    done = subprocess.run(line)
    if done.returncode:
        raise ValueError(
            f"bench all: {command!r} ended with {done.returncode}; allowed: 0. Fix the"
            " cause and rerun the command to resume."
        )
