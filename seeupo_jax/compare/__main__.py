"""Trains every recipe with every seed on one budget, and compares what they came to.

    python -m seeupo_jax.compare --config=configs/compare_order_desk.py --workdir=runs/compare \\
        [--recipes=seeupo,grpo,gspo,rloo,seeupo_forward] [--seeds=5] [--config.FIELD=VALUE ...] \\
        [--plot=OUT.svg] [--json=OUT.json]

Every recipe has its run with seed 0 before any has one with seed 1. SIGTERM or Ctrl-C stops
the run under way, saved; the same command goes on from there, and leaves out what is finished.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from seeupo_jax.checkpoint import check_writable
from seeupo_jax.cli import parse_flags, read_config
from seeupo_jax.compare import figures
from seeupo_jax.compare.runs import PlannedRun, plan, train_all
from seeupo_jax.errors import sentence_errors
from seeupo_jax.stop import Stopped

_RECIPES = flags.DEFINE_list(
    "recipes", ["seeupo", "grpo", "gspo", "rloo", "seeupo_forward"], "Names of recipes."
)
_SEEDS = flags.DEFINE_integer("seeds", 5, "Runs of each recipe; their seeds count from 0.", 1)
_EQUAL_STEPS = flags.DEFINE_bool(
    "equal_steps",
    True,
    "Recipes that update all turns at once split each iteration's trajectories into"
    " rollout.max_turns minibatches, to make as many optimizer steps as those that go turn by turn."
    " False: the configuration's algorithm.minibatches_per_turn for every recipe.",
)
_DRAW_ONLY = flags.DEFINE_bool("draw_only", False, "Train nothing; draw what is there.")
_PLOT = flags.DEFINE_string("plot", None, "An .svg, .png or .pdf; default: WORKDIR/comparison.svg.")
_JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")


def main(_: Sequence[str]) -> None:
    with sentence_errors():
        _, workdir = read_config()
        plot = workdir / "comparison.svg" if _PLOT.value is None else Path(_PLOT.value)
        if plot.suffix not in figures.PLOT_SUFFIXES:
            allowed = ", ".join(figures.PLOT_SUFFIXES)
            raise ValueError(f"--plot: got {str(plot)!r}; allowed: a name that ends in {allowed}.")
        for flag, file in (("--plot", plot), ("--json", _JSON.value)):
            if file is not None:
                check_writable(Path(file).absolute().parent, flag)
        runs = plan(
            Path(flags.FLAGS.config).absolute(),
            flags.FLAGS.override,
            workdir,
            recipes=_RECIPES.value,
            seeds=_SEEDS.value,
            equal_steps=_EQUAL_STEPS.value,
        )
    try:
        failed = 0 if _DRAW_ONLY.value else train_all(runs)
    except Stopped as stopped:
        print(stopped)
        return
    compare(runs, plot)
    if failed:
        sys.exit(f"error: {failed} of {len(runs)} runs failed; the same command tries them again.")


def compare(runs: Sequence[PlannedRun], plot: Path) -> None:
    """Draws, writes and prints what the runs have recorded."""
    from rich.console import Console

    lines = figures.read_lines(runs)
    figures.draw(lines, plot)
    if _JSON.value is not None:
        about = {"config": flags.FLAGS.config, "overrides": flags.FLAGS.override}
        values = {**about, **figures.figures(lines)}
        Path(_JSON.value).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    # Where there is no terminal, lines are as long as they need to be.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(figures.table(lines, k=runs[0].config.evaluation.k))
    console.print(f"wrote {plot}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    app.run(main, argv=parse_flags(sys.argv))
