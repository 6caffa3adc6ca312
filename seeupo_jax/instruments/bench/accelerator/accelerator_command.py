"""`bench accelerator`: runs the remaining pieces within the budget, and writes the page."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seeupo_jax.checkpoint import check_may_write
from seeupo_jax.cli.command_line import prepare_xla
from seeupo_jax.configuration.flags import Flags, integer, one_of, output_file, path, positive
from seeupo_jax.errors import name_file
from seeupo_jax.instruments.bench.accelerator import pieces
from seeupo_jax.instruments.bench.accelerator.accelerator_page import page
from seeupo_jax.instruments.bench.accelerator.pieces import PIECES, PROBE
from seeupo_jax.instruments.bench.accelerator.runner import (
    DONE,
    FAILED,
    SKIPPED,
    STOPPED,
    BenchJob,
    NotHere,
    Record,
    read,
    sentence,
    work_through,
)

PAGE = "benchmarks_gpu.md"
DOCS = Path("docs")  # of the checkout that the command runs in
_PROBE_S = 120.0
_GPUS, _CHIPS = "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"


def add_flags(parser: Flags) -> None:
    """Adds the command's flags."""
    parser.flag("out", "the folder of results", path, required=True)
    parser.flag("minutes", "for all pieces together", positive, default=30.0)
    words = f"also write the page to this file; by default, in a checkout, {DOCS / PAGE}"
    parser.flag("page", words, output_file)
    parser.switch("rehearse", "all pieces on CPU in the smallest sizes")
    words = "only this one, in this process, without the page"
    parser.flag("piece", words, one_of(PROBE, *pieces.BY_NAME))
    parser.flag("size", "of --piece; 0 is the largest", integer(0), default=0)


def run(flags: argparse.Namespace) -> None:
    """Runs the remaining pieces, writes the page, and exits with 1 if a piece or a check failed.

    Raises:
      ValueError: no accelerator; a folder that cannot be made, or has another machine's results.
    """
    check_may_write(flags.out, "--out")
    if flags.piece is not None:
        return run_piece(flags)
    ends = time.monotonic() + 60 * flags.minutes
    environment = _environment(rehearse=flags.rehearse)
    device = _probe(environment, rehearse=flags.rehearse)
    _check_same(read_results(flags.out), device, flags)
    flags.out.mkdir(parents=True, exist_ok=True)
    if device["count"] > 1:  # the baseline uses one
        environment |= _first_device(device["platform"], environment)
    jobs, too_large = _jobs(flags, device)
    budget_s = ends - time.monotonic()
    reasons = too_large | work_through(jobs, flags.out, budget_s=budget_s, environment=environment)
    results, files = read_results(flags.out), [flags.out / PAGE]
    if flags.page is not None:
        files.append(flags.page)
    elif not flags.rehearse and (DOCS / "benchmarks.md").is_file():
        files.append(DOCS / PAGE)
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = page(PIECES, results, reasons, device, rehearsal=flags.rehearse)
        with name_file(file):
            file.write_text(text, encoding="utf-8")
        print(f"wrote {file}")
    if any(_went_wrong(values) for values in results.values()):
        sys.exit(1)


def run_piece(flags: argparse.Namespace) -> None:
    """Runs one piece; exits with 1 if it failed, which its record notes, too."""
    flags.out.mkdir(parents=True, exist_ok=True)
    record = Record.begin(flags.out / f"{flags.piece}.json", rehearsal=flags.rehearse)
    try:
        prepare_xla()
        pieces.run(flags.piece, record, flags.size, rehearse=flags.rehearse)
    except NotHere as reason:
        record.put(status=SKIPPED, error=str(reason))
    except Exception as error:
        traceback.print_exc()
        record.put(status=FAILED, error=sentence(error))
        sys.exit(1)
    else:
        record.put(status=DONE, error=None)


def _environment(*, rehearse: bool) -> dict[str, str]:
    """The environment variables of the pieces' processes."""
    environment = dict(os.environ)
    if rehearse:
        environment |= {"JAX_PLATFORMS": "cpu", _GPUS: ""}
        # Pieces have programs in common, all of them small.
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        # One device, however many others pretend to have.
        several = r"--xla_force_host_platform_device_count=\S*"
        environment["XLA_FLAGS"] = re.sub(several, "", environment.get("XLA_FLAGS", "")).strip()
    return environment


def _first_device(platform: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that leave a process the first of its devices."""
    if platform != "tpu":
        return {_GPUS: environment.get(_GPUS, "0").partition(",")[0]}
    one = dict.fromkeys(("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"), "1,1,1")
    return one | {_CHIPS: environment.get(_CHIPS, "0").partition(",")[0]}


def _probe(environment: Mapping[str, str], *, rehearse: bool) -> dict[str, Any]:
    """The machine, looked at in a process of its own: this one takes no device.

    Raises:
      ValueError: it has no accelerator, or JAX does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        job = BenchJob(PROBE, [_command(PROBE, out, 0, rehearse=rehearse)], _PROBE_S)
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
    results: Mapping[str, Mapping[str, Any]], device: Mapping[str, Any], flags: argparse.Namespace
) -> None:
    """Raises ValueError where the folder has results of another device, or of a rehearsal."""
    for name, values in results.items():
        of, other = None, values.get("device")
        if values.get("rehearsal") not in (None, flags.rehearse):
            of = "a rehearsal" if values["rehearsal"] else "measurements"
        elif other is not None and not flags.rehearse and other != device["device"]:
            of = f"{other}, not of {device['device']}"
        if of is not None:
            raise ValueError(
                f"--out: got {flags.out}, where {name}.json is of {of}; allowed: another folder."
            )


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """Records of pieces by name."""
    read_ = {piece.name: read(out / f"{piece.name}.json") for piece in PIECES}
    return {name: values for name, values in read_.items() if values is not None}


def _jobs(
    flags: argparse.Namespace, device: Mapping[str, Any]
) -> tuple[list[BenchJob], dict[str, str]]:
    """Pieces to run in the sizes that fit, and why the others are not."""
    jobs, too_large = [], {}
    for piece in PIECES:
        sizes, notes, limit_s, about_s = [0], [], pieces.REHEARSAL_LIMIT_S, 0.0
        if not flags.rehearse:
            alone = device["no_torch"] is not None
            sizes, notes = piece.fitting(device["free_bytes"], alone=alone)
            limit_s, about_s = pieces.LIMIT_S, piece.about_s
        if not sizes:
            too_large[piece.name] = " ".join(notes)
            continue
        lines = [_command(piece.name, flags.out, size, rehearse=flags.rehearse) for size in sizes]
        jobs.append(BenchJob(piece.name, lines, limit_s, about_s, tuple(notes)))
    return jobs, too_large


def _command(name: str, out: Path, size: int, *, rehearse: bool) -> list[str]:
    line = [sys.executable, "-m", "seeupo_jax.bench", "accelerator"]
    line += [f"--piece={name}", f"--out={out}", f"--size={size}"]
    return [*line, "--rehearse"] if rehearse else line


def _went_wrong(values: Mapping[str, Any]) -> bool:
    failed = values["status"] not in (DONE, SKIPPED, STOPPED)
    return failed or not all(check["passed"] for check in values.get("checks", ()))
