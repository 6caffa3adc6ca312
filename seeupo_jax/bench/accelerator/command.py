"""`bench accelerator`: what is left of the pieces, as far as the budget goes, and the page."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seeupo_jax.bench.accelerator import pieces
from seeupo_jax.bench.accelerator.device import PROBE
from seeupo_jax.bench.accelerator.page import page
from seeupo_jax.bench.accelerator.pieces import PIECES, Piece
from seeupo_jax.bench.accelerator.record import DONE, SKIPPED, STOPPED, read
from seeupo_jax.bench.accelerator.runner import Job, work_through
from seeupo_jax.configuration.flags import Flags, path, positive

PAGE = "benchmarks_gpu.md"
DOCS = Path("docs")  # of the checkout that the command runs in
_PROBE_S = 120.0
_GPUS, _CHIPS = "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"


def add_flags(parser: Flags) -> None:
    """Those of the command."""
    parser.flag("out", "the folder of results", path, required=True)
    parser.flag("minutes", "for all pieces together", positive, default=30.0)
    parser.flag(
        "page",
        f"also write the page to this file; by default, in a checkout, {DOCS / PAGE}",
        path,
    )
    parser.switch("rehearse", "all pieces on CPU in the smallest sizes")


def run(flags: argparse.Namespace) -> None:
    """Runs what is left, writes the page, and exits with 1 where a piece or a check failed.

    Raises:
      ValueError: no folder for the page; no accelerator; a folder with results of another machine.
    """
    ends = time.monotonic() + 60 * flags.minutes
    where, environment = _pages(flags), _environment(rehearse=flags.rehearse)
    device = _probe(environment, rehearse=flags.rehearse)
    _check_same(_found(flags.out), device, flags)
    flags.out.mkdir(parents=True, exist_ok=True)
    if device["count"] > 1:  # the baseline uses one
        environment |= _first_device(device["platform"], environment)
    jobs, too_large = _jobs(flags, device)
    budget_s = ends - time.monotonic()
    reasons = too_large | work_through(jobs, flags.out, budget_s=budget_s, environment=environment)
    found = _found(flags.out)
    text = page(PIECES, found, reasons, device, rehearsal=flags.rehearse)
    for file in where:
        file.write_text(text)
        print(f"wrote {file}")
    if any(_went_wrong(values) for values in found.values()):
        sys.exit(1)


def _pages(flags: argparse.Namespace) -> list[Path]:
    """Where the page goes.

    Raises:
      ValueError: a folder that is not there.
    """
    where = [flags.out / PAGE]
    if flags.page is not None:
        if not flags.page.parent.is_dir():
            raise ValueError(f"--page: got {flags.page}; allowed: a file in an existing folder.")
        where.append(flags.page)
    elif not flags.rehearse and (DOCS / "benchmarks.md").is_file():
        where.append(DOCS / PAGE)
    return where


def _environment(*, rehearse: bool) -> dict[str, str]:
    """Of the pieces' processes."""
    environment = dict(os.environ)
    if rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # Pieces have programs in common, all of them small.
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        # One device, however many others pretend to have.
        kept = re.sub(
            r"--xla_force_host_platform_device_count=\S*", "", environment.get("XLA_FLAGS", "")
        )
        environment["XLA_FLAGS"] = kept.strip()
    return environment


def _first_device(platform: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What leaves a process the first of the devices that it would have."""
    if platform != "tpu":
        return {_GPUS: environment.get(_GPUS, "0").partition(",")[0]}
    one = dict.fromkeys(("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"), "1,1,1")
    return one | {_CHIPS: environment.get(_CHIPS, "0").partition(",")[0]}


def _probe(environment: Mapping[str, str], *, rehearse: bool) -> dict[str, Any]:
    """The machine as `device.probe` finds it, in a process of its own: this one takes no device.

    Raises:
      ValueError: it has no accelerator, or JAX does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        job = Job(PROBE, [_command(PROBE, out, 0, rehearse=rehearse)], _PROBE_S)
        quiet = {"environment": environment, "report": lambda sentence: None}
        work_through([job], out, budget_s=_PROBE_S, **quiet)
        values = read(out / f"{PROBE}.json") or {}
    if values.get("status") != DONE:
        raise ValueError(f"bench accelerator: JAX does not start here: {values.get('error')}")
    device = values["figures"]
    if device["platform"] == "cpu" and not rehearse:
        raise ValueError(
            "bench accelerator: JAX finds no GPU or TPU here; allowed: a machine with one, or"
            " --rehearse, which runs all pieces on CPU in the smallest sizes."
        )
    return device


def _check_same(
    before: Mapping[str, Mapping[str, Any]], device: Mapping[str, Any], flags: argparse.Namespace
) -> None:
    """Raises ValueError where the folder has results of another device, or of a rehearsal."""
    for name, values in before.items():
        if values.get("rehearsal") not in (None, flags.rehearse):
            is_one = "a rehearsal" if values["rehearsal"] else "measurements"
            raise ValueError(
                f"--out: got {flags.out}, where {name}.json is of {is_one}; allowed: another"
                " folder."
            )
        other = values.get("device")
        if other is not None and not flags.rehearse and other != device["device"]:
            raise ValueError(
                f"--out: got {flags.out}, where {name}.json is of {other}, not of"
                f" {device['device']}; allowed: another folder."
            )


def _found(out: Path) -> dict[str, dict[str, Any]]:
    """Records of pieces by name."""
    read_ = {piece.name: read(out / f"{piece.name}.json") for piece in PIECES}
    return {name: values for name, values in read_.items() if values is not None}


def _jobs(flags: argparse.Namespace, device: Mapping[str, Any]) -> tuple[list[Job], dict[str, str]]:
    """Pieces to run in the sizes that fit, and why the others are not."""
    jobs, too_large = [], {}
    for piece in PIECES:
        free = None if flags.rehearse else device["free_bytes"]
        sizes, notes = piece.fitting(free, alone=device["no_torch"] is not None)
        if flags.rehearse:
            sizes, notes = [0], []
        if not sizes:
            too_large[piece.name] = " ".join(notes)
            continue
        jobs.append(_job(piece, sizes, tuple(notes), flags))
    return jobs, too_large


def _job(piece: Piece, sizes: list[int], notes: tuple[str, ...], flags: argparse.Namespace) -> Job:
    return Job(
        piece.name,
        [_command(piece.name, flags.out, size, rehearse=flags.rehearse) for size in sizes],
        limit_s=pieces.REHEARSAL_LIMIT_S if flags.rehearse else pieces.LIMIT_S,
        about_s=0.0 if flags.rehearse else piece.about_s,
        notes=notes,
    )


def _command(name: str, out: Path, size: int, *, rehearse: bool) -> list[str]:
    line = [sys.executable, "-m", "seeupo_jax.bench.accelerator", f"--piece={name}", f"--out={out}"]
    if size:
        line.append(f"--size={size}")
    return [*line, "--rehearse"] if rehearse else line


def _went_wrong(values: Mapping[str, Any]) -> bool:
    failed = values["status"] not in (DONE, SKIPPED, STOPPED)
    return failed or not all(check["passed"] for check in values.get("checks", ()))
