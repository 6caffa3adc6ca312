"""One piece, in this process: `python -m seeupo_jax.bench.accelerator NAME --out=DIR`.

`bench accelerator` starts it for each of them; by hand it is for looking into one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

# As in `bench/__main__.py`: both libraries are to find memory on a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from seeupo_jax.bench.accelerator import device, pieces  # noqa: E402
from seeupo_jax.bench.accelerator.record import (  # noqa: E402
    DONE,
    FAILED,
    SKIPPED,
    NotHere,
    Record,
    sentence,
)
from seeupo_jax.bench.settings import Parser  # noqa: E402
from seeupo_jax.cli import prepare_xla  # noqa: E402
from seeupo_jax.errors import sentence_errors  # noqa: E402

PROBE = "machine"  # the record of what the machine is, which every start writes anew
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def main(argv: Sequence[str]) -> None:
    """The command; exit code 1 where the piece failed, which its record says too."""
    with sentence_errors():
        parser = Parser(prog="python -m seeupo_jax.bench.accelerator", allow_abbrev=False)
        parser.add_argument("name", help=f"{PROBE}, {', '.join(pieces.BY_NAME)}")
        parser.add_argument("--out", type=Path, required=True, help="folder of results")
        parser.add_argument("--size", type=int, default=0, help="0 is the largest")
        parser.add_argument("--rehearse", action="store_true", help="the smallest sizes")
        flags = parser.parse_args(argv[1:])
        if flags.name not in (PROBE, *pieces.BY_NAME):
            allowed = ", ".join((PROBE, *pieces.BY_NAME))
            raise ValueError(f"bench accelerator: got {flags.name!r}; allowed: {allowed}.")
    _die_with_parent()
    record = Record.begin(flags.out / f"{flags.name}.json", rehearsal=flags.rehearse)
    try:
        prepare_xla()
        if flags.name == PROBE:
            device.probe(record)
        else:
            piece = pieces.BY_NAME[flags.name]
            pieces.run(piece, record, flags.size, rehearse=flags.rehearse)
    except NotHere as reason:
        record.put(status=SKIPPED, error=str(reason))
    except Exception as error:
        traceback.print_exc()
        record.put(status=FAILED, error=sentence(error))
        sys.exit(1)
    else:
        record.put(status=DONE, error=None)


def _die_with_parent() -> None:
    """An orphan would keep the device's memory."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
    if prctl is not None:
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv)
