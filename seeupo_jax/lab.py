"""Measures how algorithms converge on problems whose optimum is known.

    python -m seeupo_jax.lab [--problem=NAME | --problem_file=P.npz] [--recipes=a,b] [--seeds=16]
      [--iterations=150] [--groups=16] [--group_size=16] [--lr=3.0] [--clip=0.2] [--inner_epochs=4]
      [--weight_clip=none] [--advantage_clip=none] [--optimizer=sgd] [--policy=tables|shared]
      [--exact] [--lag=0] [--turn_tokens=1] [--json=OUT] [--plot=OUT.svg|OUT.png]
    python -m seeupo_jax.lab --bias=0,1,2,4,8 [--importance_clip=2] [--importance_low=0.5] [...]

Prints one table per problem with one line per recipe: the final value over the optimum (mean over
the seeds, of several with its 95% interval), the share of seeds that end at 95% of it or above, the
iterations to get there (median over all seeds), the share of iterations in which the value fell,
and the largest fall. A recipe is a name or, with choices changed,
`seeupo:ratio=product:order=forward`. Values are always exact. With --exact the updates use
expectations instead of samples, with --lag=L the policy of L iterations before samples.

With --bias it prints, for each lag, how the policy gradient of stale trajectories differs from the
on-policy one: without a correction, with ratios to the sampler, and with importance weights.
An invalid argument ends with exit code 2 and one sentence.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from rich.console import Console
from rich.progress import track

from seeupo_jax.configuration.fields import allowed_values, build, parse
from seeupo_jax.configuration.flags import Flags, Wrong, output_file, path
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.instruments.lab import bias_report
from seeupo_jax.instruments.lab import report as lab_report
from seeupo_jax.instruments.lab.gradient_bias import BiasSettings, check_bias, measure_bias
from seeupo_jax.instruments.lab.laboratory import (
    LabSettings,
    Result,
    check_rewards,
    check_turns,
    compile_experiment,
    experiment,
)
from seeupo_jax.instruments.lab.problems import PROBLEMS, Problem, load_problem
from seeupo_jax.parallel.host_cores import usable_cores
from seeupo_jax.trajectories.json_lines import write_json

_OF_BIAS = "seeupo_noscale"
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
    "lag": "Iterations between the policy that samples and the one that is trained.",
    "turn_tokens": "Actions of a problem that are the tokens of one turn.",
    "importance_clip": "With --bias, the weights' `clip`.",
    "importance_low": "With --bias, the `low` of mask and reject.",
}


def _flags() -> Flags:
    flags = Flags("lab", __doc__)
    flags.flag("problem", "comma-separated names; default: all.")
    flags.flag("problem_file", "an .npz with mean and probability.", path)
    flags.flag("recipes", f"comma-separated names; default: {_RECIPES}, with --bias {_OF_BIAS}.")
    flags.switch("exact", "expectations instead of samples.")
    flags.flag("bias", "comma-separated lags; measure the bias at them instead.", _lags)
    flags.flag("json", "also write the figures to this file.", output_file)
    flags.flag("plot", "also draw the curves: .svg or .png.", output_file)
    # Read as text and checked with the settings, so that all wrong values have one form of error.
    for settings in (LabSettings, BiasSettings):
        hints = typing.get_type_hints(settings)
        for field in dataclasses.fields(settings):
            if field.name in _HELP:
                allowed = allowed_values(field, hints[field.name])
                words = f"{_HELP[field.name].rstrip('.')}; {allowed}"
                flags.flag(field.name, words, default=str(field.default).lower())
    return flags


def _lags(value: str) -> tuple[int, ...]:
    try:
        return tuple(int(lag) for lag in value.split(","))
    except ValueError:
        raise Wrong(value, "comma-separated whole numbers") from None


@safe_output()
@file_sentences()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
        values = {name: parse(vars(given)[name], f"--{name}") for name in _HELP}
        settings = _settings(LabSettings, values, exact=given.exact)
        weights = _settings(BiasSettings, values)
        settings.make_optimizer()
        recipes = (given.recipes or (_RECIPES if given.bias is None else _OF_BIAS)).split(",")
        for recipe in recipes:
            settings.algorithm(recipe)
        problems = _problems(given)
        for problem, recipe in itertools.product(problems, recipes):
            check_turns(problem, settings)
            if given.bias is None:
                check_rewards(problem, recipe, settings)
            else:
                check_bias(problem, recipe, settings, given.bias, weights)
        if given.plot is not None and given.plot.suffix not in lab_report.PLOT_SUFFIXES:
            allowed = " or ".join(lab_report.PLOT_SUFFIXES)
            raise ValueError(f"--plot: got {given.plot.name!r}; allowed: a file ending {allowed}.")
    console, report = Console(), cast(Any, lab_report if given.bias is None else bias_report)
    if given.bias is None:
        results, compile_s, run_s = _run(problems, recipes, settings)
        took = f"compiled in {compile_s:.1f} s, ran in {run_s:.1f} s"
    else:
        measure = functools.partial(
            measure_bias, settings=settings, lags=given.bias, weights=weights
        )
        results, run_s = _each(measure, problems, recipes)
        took = f"compiled and ran in {run_s:.1f} s"
    console.print(report.tables(results))
    console.print(took)
    write_json(given.json, report.json_values(results))
    if given.plot is not None:
        report.draw(results, given.plot)


def _settings(kind: Any, values: Mapping[str, Any], **more: Any) -> Any:
    own = {
        field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values
    }
    return build(kind, own | more, "lab")


def _run(
    problems: Sequence[Problem], recipes: Sequence[str], settings: LabSettings
) -> tuple[dict[str, dict[str, Result]], float, float]:
    """The results by problem and recipe, seconds of compilation and seconds of all runs.

    A run keeps one core busy, so there are as many at a time as there are cores.
    """
    kinds = {(problem.mean.shape, problem.turn_mean is not None) for problem in problems}
    programs = [(shape, name, settings, turns) for shape, turns in kinds for name in recipes]
    start = time.perf_counter()
    with ThreadPoolExecutor(usable_cores()) as pool:
        compiling = pool.map(lambda each: compile_experiment(*each), programs)
        for _ in track(compiling, "compiling", len(programs), console=Console(stderr=True)):
            pass
    compile_s = time.perf_counter() - start
    results, run_s = _each(functools.partial(experiment, settings=settings), problems, recipes)
    return results, compile_s, run_s


def _each(
    measure: Callable[[Problem, str], Any], problems: Sequence[Problem], recipes: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], float]:
    """What is measured by problem and recipe, and the seconds of all."""
    pairs = [(problem, name) for problem in problems for name in recipes]
    start = time.perf_counter()
    with ThreadPoolExecutor(usable_cores()) as pool:
        running = pool.map(lambda each: measure(*each), pairs)
        done = list(track(running, "running", len(pairs), console=Console(stderr=True)))
    results: dict[str, dict[str, Any]] = {problem.name: {} for problem in problems}
    for (problem, name), result in zip(pairs, done, strict=True):
        results[problem.name][name] = result
    return results, time.perf_counter() - start


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
