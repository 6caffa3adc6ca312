"""Trains recipes, or values of any field, with every seed on the same budget, and compares them.

    python -m seeupo_jax.compare --config=configs/compare_order_desk.py --workdir=runs/compare \\
        [--recipes=seeupo,grpo,gspo,rloo,seeupo_forward] [--seeds=5] [--config.FIELD=VALUE ...] \\
        [--sweep=optimizer.learning_rate=1e-4,2e-4 ...] [--plot=OUT.svg] [--json=OUT.json]

--sweep trains a field's values instead of recipes, or, with --recipes too, each with every recipe;
several --sweep are combined. Everything is trained with seed 0 before seed 1. SIGTERM or Ctrl-C
saves and stops the current run; rerunning the command resumes it and skips finished runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from seeupo_jax.compare import figures
from seeupo_jax.compare.runs import PlannedRun, plan, train_all
from seeupo_jax.configuration.config_file import find_config
from seeupo_jax.configuration.flags import Flags, names, output_file, whole
from seeupo_jax.errors import sentence_errors
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.runtime.cli import add_run_flags, check_places, read_config
from seeupo_jax.trajectories.json_lines import write_json

_DEFAULT_RECIPES = "seeupo,grpo,gspo,rloo,seeupo_forward"


def _flags() -> Flags:
    flags = Flags("compare", __doc__)
    add_run_flags(flags)
    flags.flag(
        "recipes",
        f"names of recipes; default: {_DEFAULT_RECIPES}, or with --sweep the configuration's"
        " algorithm alone.",
        names,
    )
    flags.flag(
        "sweep",
        "a field and values to train it with, as optimizer.learning_rate=1e-4,2e-4; several are"
        " combined.",
        action="append",
        default=[],
        metavar="FIELD=VALUE,VALUE,...",
    )
    flags.flag(
        "seeds",
        "runs of each recipe or combination; their seeds count from 0.",
        whole(1),
        default=5,
    )
    flags.switch(
        "equal_steps",
        "recipes that update all turns at once split each iteration's trajectories into"
        " rollout.max_turns minibatches, to make as many optimizer steps as those that go turn by"
        " turn (default). False: the configuration's algorithm.minibatches_per_turn for every"
        " recipe.",
        default=True,
    )
    flags.switch("draw_only", "train nothing; draw the existing results.")
    words = "an .svg, .png or .pdf; default: WORKDIR/comparison.svg."
    flags.flag("plot", words, output_file)
    flags.flag("json", "also write the figures to this file.", output_file)
    return flags


def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
        config, workdir = read_config(given), given.workdir
        if given.draw_only and not workdir.is_dir():
            raise ValueError(
                f"--workdir: got {workdir}, which is not there; allowed with --draw_only: the"
                " folder of a comparison."
            )
        check_places(config, workdir)
        plot = workdir / "comparison.svg" if given.plot is None else given.plot
        if plot.suffix not in figures.PLOT_SUFFIXES:
            allowed = ", ".join(figures.PLOT_SUFFIXES)
            raise ValueError(f"--plot: got {plot.name!r}; allowed: a name that ends in {allowed}.")
        recipes = given.recipes
        if recipes is None and not given.sweep:
            recipes = names(_DEFAULT_RECIPES)
        runs = plan(
            find_config(given.config).absolute(),
            given.override,
            workdir,
            recipes=recipes,
            seeds=given.seeds,
            equal_steps=given.equal_steps,
            sweep=given.sweep,
        )
    try:
        failed = 0 if given.draw_only else train_all(runs)
    except Stopped as stopped:
        print(stopped)
        return
    compare(runs, given, plot)
    if failed:
        sys.exit(f"error: {failed} of {len(runs)} runs failed; rerun the command to retry them.")


def compare(runs: Sequence[PlannedRun], given: argparse.Namespace, plot: Path) -> None:
    """Draws, writes and prints what the runs have recorded."""
    from rich.console import Console

    lines = figures.read_lines(runs)
    figures.draw(lines, plot)
    about = {"config": given.config, "overrides": given.override, "sweep": given.sweep}
    write_json(given.json, about | figures.figures(lines))
    # Where there is no terminal, lines are as long as they need to be.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(figures.table(lines, k=runs[0].config.evaluation.k))
    console.print(f"wrote {plot}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
