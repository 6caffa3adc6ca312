"""What a configuration needs on a TPU slice, from compiling its programs for one: no TPU is used.

    python -m seeupo_jax.aot --config=FILE.py [--config.FIELD=VALUE ...] --topology=v5p:4x4x4

Exits 0 when the run fits and no program holds a score matrix or logits of whole rows; 1 when not;
2 with one sentence when a configuration or a topology cannot be.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from seeupo_jax.aot.chips import parse_topology
from seeupo_jax.aot.measure import measure
from seeupo_jax.aot.programs import KINDS, choose_programs, list_programs, prepare
from seeupo_jax.aot.report import Report
from seeupo_jax.aot.search import search
from seeupo_jax.cli import parse_flags
from seeupo_jax.config import load_config
from seeupo_jax.errors import sentence_errors


def main(arguments: Sequence[str]) -> int:
    """Prints the report; returns the exit status."""
    flags = _flags(parse_flags(arguments))
    jax.config.update("jax_platforms", "cpu")
    # A slice's programs cannot be loaded here, so neither from a cache of them.
    jax.config.update("jax_enable_compilation_cache", False)
    with sentence_errors():
        config = load_config(flags.config, flags.override)
        setup = prepare(config, parse_topology(flags.topology))
        wanted = flags.programs.split(",") if flags.programs else None
        programs = choose_programs(list_programs(setup), wanted)
    report = Report(setup, flags.config)
    print(report.head() + "\n\ncompiling", flush=True)
    for program in programs:
        figures = report.add(program, measure(setup, program))
        print(f"  {figures.name}: {figures.compile_s:.0f} s", flush=True)
    print("\n" + report.text())
    found = search(setup, report.figures) if flags.search else {}
    for name, value in found.items():
        print(f"largest {name} that fits: {value}")
    if flags.json is not None:
        values = report.values() | {"search": found, "command": _command(arguments)}
        Path(flags.json).write_text(json.dumps(values, indent=2) + "\n")
    return 0 if report.fits and not report.held else 1


def _command(arguments: Sequence[str]) -> str:
    """What was asked for, without what is only about where it goes."""
    return shlex.join(each for each in arguments[1:] if not each.startswith("--json"))


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m seeupo_jax.aot", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="a Python file with get_config()")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        help="FIELD.SUB=VALUE on top of the config; --config.FIELD.SUB=VALUE is the same",
    )
    parser.add_argument("--topology", required=True, help="v5e:4x8, v5p:4x4x4, v6e:16x16*2, ...")
    parser.add_argument("--programs", help=f"of these only: {', '.join(KINDS)}, or full names")
    parser.add_argument("--search", action="store_true", help="also find the largest that fits")
    parser.add_argument("--json", help="also write all figures to this file")
    return parser.parse_args(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
