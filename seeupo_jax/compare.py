"""Trains recipes, or values of any field, with every seed on the same budget, and compares them.

    python -m seeupo_jax.compare --config=configs/compare_order_desk.py --workdir=runs/compare \\
        [--recipes=seeupo,grpo,gspo,rloo,seeupo_forward] [--seeds=5] [--config.FIELD=VALUE ...] \\
        [--sweep=optimizer.learning_rate=1e-4,2e-4 ...] [--plot=OUT.svg] [--json=OUT.json]

    python -m seeupo_jax.compare --study --config=configs/study_order_desk.py --workdir=DIR \\
        [--results=docs/convergence/order_desk] [--limit_minutes=60] [--explain | --draw_only]

--sweep trains a field's values instead of recipes, or, with --recipes too, each with every recipe;
several --sweep are combined. Everything is trained with seed 0 before seed 1. SIGTERM or Ctrl-C
saves and stops the current run; rerunning the command resumes it and skips finished runs. Runs are
trained to their end: stop_after_idle is none, unless the configuration says another number than 10,
or the command any.

--study trains what get_study() of the configuration's file describes: tuning, runs with fresh
seeds, ablations, a stability map. Its finished runs are kept in the folder --results, and its page
is the Markdown file of the same name next to it. Several processes may train one study.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from seeupo_jax.cli.command_line import add_run_flags, check_places, read_config
from seeupo_jax.comparison import figures
from seeupo_jax.comparison.runs import PlannedRun, plan, train_all
from seeupo_jax.configuration.flags import Flags, integer, names, output_file, path, positive
from seeupo_jax.display.terminal import SafeStream, safe_output
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.instruments.study import study_command as study
from seeupo_jax.parallel.stop_signal import Stopped
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
        integer(1),
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
    flags.switch("study", "train the study that get_study() of the configuration's file describes.")
    words = "with --study: the folder of finished runs; default: WORKDIR/results."
    flags.flag("results", words, path)
    words = "with --study: after so many minutes no further run is started; default: all are."
    flags.flag("limit_minutes", words, positive)
    flags.switch("explain", "with --study: print what is left to run, and run nothing.")
    words = "an .svg, .png or .pdf; default: WORKDIR/comparison.svg."
    flags.flag("plot", words, output_file)
    flags.flag("json", "also write the figures to this file.", output_file)
    return flags


@safe_output()
@file_sentences()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
        _check_flags(given, arguments)
    if given.study:
        return study.run(given)
    with sentence_errors():
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
        if recipes is not None and not recipes:
            raise ValueError("--recipes: got none; allowed: at least one name.")
        if recipes is None and not given.sweep:
            recipes = names(_DEFAULT_RECIPES)
        runs = plan(
            given.config,
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


def _check_flags(given: argparse.Namespace, arguments: Sequence[str]) -> None:
    """ValueError where a flag goes without --study, or with it, that is not read there."""
    only = ("results", "limit_minutes", "explain")
    without = ("recipes", "sweep", "seeds", "equal_steps", "plot", "json")
    # What does not begin with -- is the value of the flag before it; argparse takes no others.
    flags = [text.removeprefix("--") for text in arguments[1:] if text.startswith("--")]
    typed = {text.partition("=")[0].removeprefix("no") for text in flags}
    unread = [name for name in (without if given.study else only) if name in typed]
    if unread:
        allowed = "without --study, whose file says it" if given.study else "with --study"
        raise ValueError(f"--{unread[0]}: got one; allowed {allowed}.")


def compare(runs: Sequence[PlannedRun], given: argparse.Namespace, plot: Path) -> None:
    """Draws, writes and prints what the runs have recorded."""
    from rich.console import Console

    lines = figures.read_lines(runs)
    figures.draw(figures.success_chart(lines), plot)
    about = {"config": given.config, "overrides": given.override, "sweep": given.sweep}
    write_json(given.json, about | figures.figures(lines))
    # Where there is no terminal, lines are as long as they need to be.
    console = Console(width=None if SafeStream().isatty() else 160)
    console.print(figures.table(lines, k={run.config.evaluation.k for run in runs}))
    print(f"wrote {plot}")


if __name__ == "__main__":
    main()
