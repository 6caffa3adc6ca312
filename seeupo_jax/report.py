"""HTML pages of a run: its results and learning curves, and every trajectory that it stored.

    python -m seeupo_jax.report --workdir=DIR [--compare DIR2 DIR3 ...] [--output=FILE.html]

The run may be finished, still training, or copied from another machine; the pages need no network.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from seeupo_jax.configuration.flags import Flags, names, output_file, path
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.reports.html_report import report_file, write_report
from seeupo_jax.reports.run_data import check_run, load_runs
from seeupo_jax.reports.trajectory_pages import write_pages
from seeupo_jax.trajectories.reader import FOLDER, find_shards


def _flags() -> Flags:
    flags = Flags("report", __doc__)
    flags.flag("workdir", "the folder of the run.", path, required=True)
    flags.flag(
        "compare",
        "folders of other runs to compare with.",
        _folders,
        action="extend",
        nargs="+",
        default=[],
        metavar="A,B,...",
    )
    flags.flag("output", "the file to write; default: WORKDIR/report.html.", output_file)
    return flags


def _folders(value: str) -> list[str]:
    """Folders with commas between them, or one that has commas in its name."""
    return [value] if os.path.exists(value) else names(value)


@safe_output()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with file_sentences(), sentence_errors():
        given = _flags().read(arguments[1:])
        workdir = given.workdir
        compare = [Path(folder) for listed in given.compare for folder in listed]
        check_run("workdir", workdir)
        for folder in compare:
            check_run("compare", folder)
        runs = load_runs([workdir, *compare])
        file = report_file(workdir, given.output)
        pages = _write_pages(workdir, file)
        write_report(runs, file)
        print(f"wrote {file} ({file.stat().st_size / 2**20:.1f} MiB)")
        if isinstance(pages, Exception):
            raise pages
        if pages is not None:
            print(f"wrote {pages}")


def _write_pages(workdir: Path, report: Path) -> Path | ValueError | OSError | None:
    """Before the report, which has a link to them; their error waits until it is written.

    Pages of trajectories that are all removed are written too: they would show the earlier ones.
    """
    if not find_shards(workdir) and not (workdir / FOLDER / "index.html").exists():
        return None
    back = quote(os.fsencode(os.path.relpath(report, workdir / FOLDER)))
    try:
        return write_pages(workdir, report=back)
    except (ValueError, OSError) as error:
        return error


if __name__ == "__main__":
    main()
