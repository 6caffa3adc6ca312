"""Pages of a run: what it came to and how, and every trajectory that it kept.

    python -m seeupo_jax.report --workdir=DIR [--compare DIR2 DIR3 ...] [--output=FILE.html]

The run may be finished, going on, or copied from another machine; the pages need no network.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from absl import app, flags

from seeupo_jax.errors import sentence_errors
from seeupo_jax.telemetry.html_report import write_report
from seeupo_jax.telemetry.pages import write_pages
from seeupo_jax.telemetry.trajectories import FOLDER, find_shards

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_COMPARE = flags.DEFINE_list(
    "compare", [], "Folders of other runs, drawn over it; more may follow."
)
_OUTPUT = flags.DEFINE_string("output", None, "The file to write; default: WORKDIR/report.html.")


def main(argv: Sequence[str]) -> None:
    with sentence_errors():
        more = argv[1:]
        if more and not _COMPARE.value:
            raise ValueError(f"got {more[0]!r} without a flag; allowed: --workdir, --compare.")
        workdir, compare = Path(_WORKDIR.value), [*_COMPARE.value, *more]
        file = write_report(workdir, compare=compare, output=_OUTPUT.value)
        print(f"wrote {file} ({file.stat().st_size / 2**20:.1f} MiB)")
        if find_shards(workdir):
            back = Path(os.path.relpath(file, workdir / FOLDER)).as_posix()
            print(f"wrote {write_pages(workdir, report=quote(back))}")


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    flags.FLAGS.set_gnu_getopt(True)  # folders may stand before other flags
    app.run(main, argv=sys.argv)
