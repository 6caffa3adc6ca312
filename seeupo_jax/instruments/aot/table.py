"""A table of reports that `python -m seeupo_jax.aot --json=FILE` wrote, in Markdown.

python -m seeupo_jax.instruments.aot.table FILE ...
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.config_file import PACKAGE
from seeupo_jax.configuration.flags import Flags, Wrong
from seeupo_jax.errors import sentence_errors
from seeupo_jax.metrics.statistics import markdown_table
from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.trajectories.json_lines import read_file

_HEAD = (
    "config",
    "slice",
    "sweep, GiB",
    "rollout, GiB",
    "of GiB",
    "fits",
    "FLOPs / 6·P·tokens",
    "longest turn at best, s",
    "bound by",
    "iteration at best, s",
    "at published efficiency, s",
)
_KEYS = {"command", "config_file", "fits", "hbm_bytes", "iteration", "programs", "topology"}
_KEYS |= {"efficiency"}  # earlier versions' estimates have none


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """A row a report, and the command of each row below."""
    rows = markdown_table(_HEAD, map(row, reports))
    commands = [f"python -m seeupo_jax.aot {report['command']}" for report in reports]
    return "\n".join((rows, "", "```bash", *commands, "```"))


def row(report: Mapping[str, Any]) -> tuple[str, ...]:
    """A report's cells."""
    programs = report["programs"]
    turn = programs.get("sweep/turn")
    done = turn is not None and turn["error"] is None
    line = turn["roofline"] if done else None
    made = report["iteration"]
    return (
        _name(report),
        report["topology"],
        _peak(programs, "sweep"),
        _peak(programs, "rollout"),
        f"{report['hbm_bytes'] / GIB:.2f}",
        "yes" if report["fits"] else "no",
        f"{turn['executed_flops'] / turn['six_nd_flops']:.2f}" if done else "",
        _span(line["step_s"], line["serial_s"]) if done else "",
        line["bound"] if done else "",
        "" if made is None else _span(made["step_s"], made["serial_s"]),
        "" if made is None else f"{made['published_s']:,.0f}",
    )


def _name(report: Mapping[str, Any]) -> str:
    """The configuration, and the model that the command named instead of its own."""
    file = Path(report["config_file"].removeprefix(PACKAGE)).stem
    model = re.search(r"--config\.model\.path=(\S+)", report["command"])
    return file if model is None else f"{file}, {Path(model[1]).name}"


def _peak(programs: Mapping[str, Any], phase: str) -> str:
    """The most that any program of a phase needs, and which."""
    mine = {kind: each for kind, each in programs.items() if kind.startswith(phase)}
    failed = [kind for kind, each in mine.items() if each["error"] is not None]
    if failed:
        return f"too much ({failed[0].partition('/')[2]})"
    if not mine:
        return ""
    top = max(mine, key=lambda kind: mine[kind]["peak"])
    return f"{mine[top]['peak'] / GIB:.1f} ({top.partition('/')[2]})"


def _span(least: float, most: float) -> str:
    return f"{least:,.0f} to {most:,.0f}"


def _report(name: str) -> dict[str, Any]:
    report = read_file(Path(name))
    if report is None or not _KEYS <= report.keys():
        raise Wrong(name, "a file that python -m seeupo_jax.aot --json=FILE wrote")
    return report


def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        flags = Flags("aot.table", __doc__)
        flags.add_argument("reports", metavar="FILE", nargs="+", type=_report, help="a report.")
        given = flags.read(arguments[1:])
    print(table(given.reports))


if __name__ == "__main__":
    main()
