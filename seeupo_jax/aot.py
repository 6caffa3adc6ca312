"""Memory and work of a configuration on a TPU slice, by compiling its programs; needs no TPU.

    python -m seeupo_jax.aot --config=FILE.py [--config.FIELD=VALUE ...] --topology=v5p:4x4x4

Exits 0 when the run fits and no program holds a score matrix or logits of whole rows; 1 when not;
2 with one sentence when the configuration or the topology is invalid.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from seeupo_jax.cli.command_line import add_config_flags
from seeupo_jax.configuration.config_file import read_layouts
from seeupo_jax.configuration.flags import Flags, names, output_file
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.instruments.aot.tune import tune, with_fields
from seeupo_jax.parallel.program_cache import keep_no_programs
from seeupo_jax.planning.aot.measure import CompiledFigures, measure
from seeupo_jax.planning.aot.report import Report
from seeupo_jax.planning.aot.search import search
from seeupo_jax.planning.chips import parse_topology
from seeupo_jax.planning.slices.slice_programs import (
    KINDS,
    Setup,
    choose_programs,
    list_programs,
    prepare,
)
from seeupo_jax.trajectories.json_lines import write_json


@safe_output()
@file_sentences()
def main(arguments: Sequence[str] = sys.argv) -> int:
    """Prints the report; returns the exit status."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
    jax.config.update("jax_platforms", "cpu")
    keep_no_programs()
    with sentence_errors():
        config = load_config(given.config, given.override)
        setup = prepare(config, parse_topology(given.topology))
        _check_kinds(setup, given.programs or ())
        setup, figures = (setup, {}) if given.tune is None else _tuned(setup, given.tune)
        programs = choose_programs(list_programs(setup), given.programs)
    report = Report(setup, given.config)
    print(report.head() + "\n\ncompiling", flush=True)
    for program in programs:
        program_figures = figures.get(program.kind)
        if program_figures is None or program_figures.name != program.name:
            program_figures = measure(setup, program)
        report.add(program, program_figures)
        print(f"  {program_figures.name}: {program_figures.compile_s:.0f} s", flush=True)
    print("\n" + report.text())
    largest = search(setup, report.figures) if given.search else {}
    for name, value in largest.items():
        print(f"largest {name} that fits: {value}")
    write_json(given.json, report.values() | {"search": largest, "command": _command(arguments)})
    return 0 if report.fits and not report.held else 1


def _check_kinds(setup: Setup, wanted: Sequence[str]) -> None:
    """ValueError where no layout, of which `--tune` may choose another, has such a program."""
    programs = list_programs(setup)
    kinds = {*KINDS, *(program.kind for program in programs)}
    choose_programs(programs, [name for name in wanted if name.partition(" ")[0] not in kinds])


def _tuned(setup: Setup, file: Path) -> tuple[Setup, dict[str, CompiledFigures]]:
    """The run in its shortest layout, which the file says of its slice then, and its figures.

    Raises:
      ValueError: a file that is no list of layouts, or nothing fits.
    """
    layouts = read_layouts(file) if file.exists() else {}
    tuned = tune(setup, lambda line: print(line, flush=True))
    if tuned is None:
        raise ValueError(
            f"--tune: none of the layouts that were compiled fits on {setup.topology}; allowed:"
            ' a larger slice, or what docs/tpu.md lists under "If it does not fit".'
        )
    write_json(file, layouts | {str(setup.topology): tuned.fields})
    print(f"wrote {file}: {setup.topology}: {json.dumps(tuned.fields)}\n")
    setup = prepare(with_fields(setup.given, tuned.fields), setup.topology)
    return setup, tuned.figures


def _command(arguments: Sequence[str]) -> str:
    """The command line without `--json`, which only names the output."""
    before = [None, *arguments[1:]]  # the flag whose value an argument may be
    pairs = zip(before, arguments[1:], strict=False)
    return shlex.join(b for a, b in pairs if a != "--json" and b.partition("=")[0] != "--json")


def _flags() -> Flags:
    flags = Flags("aot", __doc__)
    add_config_flags(flags)
    flags.flag("topology", "v5e:4x8, v5p:4x4x4, v6e:16x16*2, v5p-128, ...", required=True)
    flags.flag("programs", f"of these only: {', '.join(KINDS)}, or full names.", names)
    flags.switch("search", "also find the largest that fits.")
    flags.flag(
        "tune", "find the layout of the shortest iteration; it goes to this file.", output_file
    )
    flags.flag("json", "also write all figures to this file.", output_file)
    return flags


if __name__ == "__main__":
    sys.exit(main())
