"""One piece, in this process: `python -m seeupo_jax.bench.accelerator --piece=NAME --out=DIR`.

`bench accelerator` starts it for each piece; start it by hand to examine one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Sequence

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
from seeupo_jax.configuration.flags import Flags, path, whole  # noqa: E402
from seeupo_jax.errors import sentence_errors  # noqa: E402
from seeupo_jax.runtime.cli import prepare_xla  # noqa: E402

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def main(argv: Sequence[str]) -> None:
    """The command; exit code 1 where the piece failed, which its record says too."""
    with sentence_errors():
        names = (device.PROBE, *pieces.BY_NAME)
        parser = Flags("bench.accelerator", __doc__)
        parser.flag("piece", f"one of {', '.join(names)}", required=True)
        parser.flag("out", "the folder of results", path, required=True)
        parser.flag("size", "0 is the largest", whole(0), default=0)
        parser.switch("rehearse", "the smallest sizes")
        flags = parser.read(argv[1:])
        if flags.piece not in names:
            raise ValueError(f"--piece: got {flags.piece!r}; allowed: {', '.join(names)}.")
    _die_with_parent()
    record = Record.begin(flags.out / f"{flags.piece}.json", rehearsal=flags.rehearse)
    try:
        prepare_xla()
        if flags.piece == device.PROBE:
            device.probe(record)
        else:
            piece = pieces.BY_NAME[flags.piece]
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
