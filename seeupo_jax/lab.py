"""Measures how algorithms converge on problems whose optimum is known.

    python -m seeupo_jax.lab [--problem=NAME | --problem_file=P.npz] [--recipes=a,b] [--seeds=16]
      [--iterations=150] [--groups=16] [--group_size=16] [--lr=3.0] [--clip=0.2] [--inner_epochs=4]
      [--weight_clip=none] [--advantage_clip=none] [--optimizer=sgd] [--policy=tables|shared]
      [--exact] [--json=OUT] [--plot=OUT.svg|OUT.png]

Prints one table per problem with one line per recipe: the final value over the optimum (mean over
the seeds, of several with its 95% interval), the share of seeds that end at 95% of it or above, the
iterations to get there (median over all seeds), the share of iterations in which the value fell,
and the largest fall. A recipe is a name or, with choices changed,
`seeupo:ratio=product:order=forward`. Values are always exact. With --exact the updates use
expectations instead of samples. An invalid argument ends with exit code 2 and one sentence.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
import typing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.progress import track

from seeupo_jax.configuration.fields import allowed_values, build, parse
from seeupo_jax.configuration.flags import Flags, output_file, path
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.instruments.lab import report as lab_report
from seeupo_jax.instruments.lab.laboratory import (
    LabSettings,
    Result,
    check_rewards,
    compile_experiment,
    experiment,
)
from seeupo_jax.instruments.lab.problems import PROBLEMS, Problem, load_problem
from seeupo_jax.parallel.host_cores import usable_cores
from seeupo_jax.trajectories.json_lines import write_json

_RECIPES = "seeupo,seeupo_forward,seeupo_random,seeupo_unweighted,seeupo_group_std,grpo,gspo"
_HELP = {
    "seeds": "Runs per recipe, each with its own trajectories.",
    "iterations": "Iterations per run.",
    "groups": "Groups per iteration.",
    "group_size": "Trajectories per group.",
    "lr": "Learning rate of the logits.",
    "clip": "Clip range of the ratio, [1 - clip, 1 + clip]; none: no bound.",
    "inner_epochs": "Full-batch optimizer steps on each turn; 1 where there is no ratio.",
    "weight_clip": "Clip range of the cumulative ratio, as for clip; none: Eq. 8.",
    "advantage_clip": "Bound on standardised advantages; none: Eq. 9.",
    "optimizer": "sgd is plain gradient ascent; any other of optax by name.",
    "policy": "tables: separate logits for each turn; shared: one small network for all turns.",
}


def _flags() -> Flags:
    flags = Flags("lab", __doc__)
    flags.flag("problem", "comma-separated names; default: all.")
    flags.flag("problem_file", "an .npz with mean and probability.", path)
    flags.flag("recipes", "comma-separated names.", default=_RECIPES)
    flags.switch("exact", "expectations instead of samples.")
    flags.flag("json", "also write the figures to this file.", output_file)
    flags.flag("plot", "also draw the curves: .svg or .png.", output_file)
    # Read as text and checked with the settings, so that all wrong values have one form of error.
    hints = typing.get_type_hints(LabSettings)
    for field in dataclasses.fields(LabSettings):
        if field.name in _HELP:
            words = f"{_HELP[field.name].rstrip('.')}; {allowed_values(field, hints[field.name])}"
            flags.flag(field.name, words, default=str(field.default).lower())
    return flags


@safe_output()
@file_sentences()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
        values = {name: parse(vars(given)[name], f"--{name}") for name in _HELP}
        settings = build(LabSettings, values | {"exact": given.exact}, "lab")
        settings.make_optimizer()
        recipes = given.recipes.split(",")
        for recipe in recipes:
            settings.algorithm(recipe)
        problems = _problems(given)
        for problem, recipe in itertools.product(problems, recipes):
            check_rewards(problem, recipe, settings)
        if given.plot is not None and given.plot.suffix not in lab_report.PLOT_SUFFIXES:
            allowed = " or ".join(lab_report.PLOT_SUFFIXES)
            raise ValueError(f"--plot: got {given.plot.name!r}; allowed: a file ending {allowed}.")
    console = Console()
    results, compile_s, run_s = _run(problems, recipes, settings)
    console.print(lab_report.tables(results))
    console.print(f"compiled in {compile_s:.1f} s, ran in {run_s:.1f} s")
    write_json(given.json, lab_report.json_values(results))
    if given.plot is not None:
        lab_report.draw(results, given.plot)


def _run(
    problems: Sequence[Problem], recipes: Sequence[str], settings: LabSettings
) -> tuple[dict[str, dict[str, Result]], float, float]:
    """The results by problem and recipe, seconds of compilation and seconds of all runs.

    A run keeps one core busy, so there are as many at a time as there are cores.
    """
    kinds = {(problem.mean.shape, problem.turn_mean is not None) for problem in problems}
    programs = [(shape, name, settings, turns) for shape, turns in kinds for name in recipes]
    pairs = [(problem, name) for problem in problems for name in recipes]
    with ThreadPoolExecutor(usable_cores()) as pool:
        start = time.perf_counter()
        compiling = pool.map(lambda each: compile_experiment(*each), programs)
        for _ in track(compiling, "compiling", len(programs), console=Console(stderr=True)):
            pass
        compiled = time.perf_counter()
        running = pool.map(lambda each: experiment(*each, settings), pairs)
        done = list(track(running, "running", len(pairs), console=Console(stderr=True)))
        end = time.perf_counter()
    results: dict[str, dict[str, Result]] = {problem.name: {} for problem in problems}
    for (problem, name), result in zip(pairs, done, strict=True):
        results[problem.name][name] = result
    return results, compiled - start, end - compiled


def _problems(given: argparse.Namespace) -> list[Problem]:
    """The problems of the flags.

    Raises:
      ValueError: both flags, an unknown name, or a file without a problem.
    """
    if given.problem_file is not None:
        if given.problem is not None:
            raise ValueError("--problem: got --problem_file too; allowed: one of the two.")
        return [load_problem(given.problem_file)]
    names = list(PROBLEMS) if given.problem is None else given.problem.split(",")
    for name in names:
        if name not in PROBLEMS:
            raise ValueError(f"--problem: got {name!r}; allowed: {', '.join(PROBLEMS)}.")
    return [PROBLEMS[name]() for name in names]


if __name__ == "__main__":
    main()
