"""One sweep, ours beside the PyTorch baseline's: same weights, same trajectories, same numbers.

The first sweep of every contender starts from the same weights and must give the same losses, KL,
weights M and parameters, or nothing is timed. The second tells its memory. Then they take turns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.bench import machine, swept_fields, synthetic, workloads
from seeupo_jax.bench.flop_budget import Pools, budgets
from seeupo_jax.bench.interleave import Timing, alternate, fastest, print_table, ratio
from seeupo_jax.bench.runners import bench_models, same_update
from seeupo_jax.bench.runners.ablations import chosen
from seeupo_jax.bench.runners.jax_runner import OurSweeps
from seeupo_jax.bench.runners.torch_runner import TorchSweeps, use_every_core
from seeupo_jax.bench.settings import RECIPE, Settings, command
from seeupo_jax.bench.workload import Workload
from seeupo_jax.planning import peak_memory
from seeupo_jax.planning.flops import parameters
from seeupo_jax.planning.program_flops import Flops
from seeupo_jax.policy.architecture import Architecture

OURS = "seeupo_jax"
METRICS = ("sweep/padding_fraction", "sweep/shared_fraction", "sweep/steps", "sweep/tokens")


def torch_name(way: str) -> str:
    """Of a contender, for people."""
    return f"PyTorch, {way}"


def without_name(technique: str) -> str:
    """Of a contender, for people."""
    return f"{OURS} without {technique}"


@dataclass
class _Contest:
    """What one run compares, and what the contenders' first sweeps were found to be.

    figures: of each contender, by name, as they go into the JSON.
    """

    settings: Settings
    work: Workload
    arch: Architecture
    device: jax.Device
    contenders: dict[str, Any]
    figures: dict[str, dict[str, Any]]


def run(settings: Settings, *, strict: bool = True) -> dict[str, Any]:
    """Checks, measures and prints; the figures.

    Args:
      strict: nothing is timed where the sides do not compute the same; otherwise their differences
        are among the figures, for the caller to judge.

    Raises:
      ValueError: a wrong setting; or, if strict, the sides do not compute the same.
    """
    device = bench_models.only_device()
    arch = bench_models.architecture(settings.model, bench_models.activations(device.platform))
    ablations = chosen(settings.without)
    about = machine.describe(device)
    work = workloads.make(settings, arch.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        model, lines = Path(folder, "model"), Path(folder, "trajectories.jsonl")
        bench_models.write(arch, model, seed=settings.seed)
        acted = synthetic.random_actions(work, settings.seed)
        synthetic.write(synthetic.records(work, acted, seed=settings.seed), lines)
        values = swept_fields.values(settings, turns=work.turns, dtype=arch.dtype)
        contenders: dict[str, Any] = {OURS: OurSweeps(model, lines, values)}
        for name, ablation in ablations.items():
            contenders[without_name(name)] = OurSweeps(model, lines, values, ablation)
        contenders |= torch_sweeps(model, lines, values, settings, device)
    started = time.perf_counter()
    contest = _Contest(settings, work, arch, device, contenders, {name: {} for name in contenders})
    verified = _verify(contest, strict)
    _measure_memory(contest)
    _tell("checked, counted and weighed", started)
    timings = alternate(
        {name: lambda _, each=each: each.run() for name, each in contenders.items()},
        settings.repeats,
    )
    figures = _figures(contest, timings) | {"verified": verified, "machine": about}
    _print(figures)
    return figures


def torch_sweeps(
    model: Path, lines: Path, values: Mapping[str, Any], settings: Settings, device: jax.Device
) -> dict[str, TorchSweeps]:
    """The baseline's contenders."""
    if not settings.torch:
        return {}
    use_every_core(machine.cores())
    on = bench_models.torch_device(device.platform)
    return {
        torch_name(way): TorchSweeps(model, lines, values, settings, device=on, way=way)
        for way in settings.torch
    }


def _verify(contest: _Contest, strict: bool) -> dict[str, Any]:
    """Every contender's first sweep, against ours; and what ours cost.

    Returns: by contender the greatest differences, and under `moved` what the sweep itself changed.
    """
    ours = contest.contenders[OURS]
    start = ours.tensors()
    outcome, found = None, {}
    for name, contender in contest.contenders.items():
        began = time.perf_counter()
        if isinstance(contender, OurSweeps):
            done, calls = contender.recorded()
            _tell(f"{name}: first sweep, compiled", began)
            contest.figures[name] |= _costs(contender, calls)
        else:
            contender.run()
            done = contender.outcome()
            _tell(f"{name}: first sweep", began)
            contest.figures[name]["positions"] = contender.positions
        if outcome is None:
            outcome = done
            continue
        if strict:
            same_update.require_same(outcome, done, (OURS, name), contest.arch.dtype)
        found[name] = same_update.differences(outcome, done)
    return {
        "tolerance": same_update.TOLERANCES[contest.arch.dtype],
        "differences": found,
        "moved": same_update.moved(start, outcome),
    }


def _tell(what: str, began: float) -> None:
    print(f"{what} in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def _costs(contender: OurSweeps, calls: list[Any]) -> dict[str, Any]:
    """FLOPs and tokens of a sweep, by what its programs were given."""
    flops = contender.flops(calls)
    total = Flops()
    for each in flops.values():
        total = total.plus(each)
    return {
        "positions": sum(call.positions for call in calls),
        "flops": total.total,
        "flops_attention": total.attention,
        "flops_again": total.recomputed,
        "flops_by_program": {name: each.total for name, each in flops.items()},
        "metrics": {name: contender.metrics[name] for name in METRICS},
    }


def _measure_memory(contest: _Contest) -> None:
    for name, contender in contest.contenders.items():
        grown = peak_memory.growth(contender.run, contest.device.platform)
        held = contender.state_bytes
        contest.figures[name] |= {
            "state_bytes": held,
            "peak_bytes": None if grown is None else held + grown,
        }


def _figures(contest: _Contest, timings: Mapping[str, Timing]) -> dict[str, Any]:
    work, arch, settings = contest.work, contest.arch, contest.settings
    for name, timing in timings.items():
        contest.figures[name] |= timing.as_json()
        contest.figures[name]["tokens_per_second"] = work.tokens / timing.median
    compared = compare(timings, settings.torch)
    ours = contest.contenders[OURS]
    pools = Pools.of(ours.trajectories)
    figures = {
        "benchmark": "update",
        "command": command("update", settings),
        **compared,
        "workload": describe(work),
        "model": settings.model,
        "parameters": parameters(arch),
        "dtype": arch.dtype,
        "budgets": budgets(arch, pools),
        "pools": vars(pools),
        "row_lengths": list(ours.learner.shapes.lengths),
        "contenders": contest.figures,
        "without": {
            name: _contribution(contest.figures[without_name(name)], contest.figures[OURS])
            | {"words": switch.words}
            for name, switch in chosen(settings.without).items()
        },
    }
    if contest.device.platform != "cpu":
        peak = machine.matmul_peak(arch.dtype)
        figures["matmul_peak"] = peak
        figures["mfu"] = flops_once(contest.figures[OURS]) / timings[OURS].median / peak
    return figures


def flops_once(ours: Mapping[str, Any]) -> float:
    """Of a sweep, without what backward passes compute again: what goals and MFU are about."""
    return ours["flops"] - ours["flops_again"]


def compare(timings: Mapping[str, Timing], ways: Sequence[str]) -> dict[str, Any]:
    """Ours against the baseline: as fast as it goes, and by the reference's recipe."""
    own = [torch_name(way) for way in ways if way != RECIPE]
    against = fastest(timings, own) if own else None
    compared: dict[str, Any] = {"against": against, "over_recipe": None}
    if against is not None:
        compared |= ratio(timings[against], timings[OURS])
    if RECIPE in ways:
        compared["over_recipe"] = ratio(timings[torch_name(RECIPE)], timings[OURS])
    return compared


def _contribution(without: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, float]:
    """How many times as much a sweep costs without a technique."""
    return {
        name: without[of] / ours[of]
        for name, of in (("time", "median_s"), ("computed", "positions"), ("flops", "flops"))
    }


def describe(work: Workload) -> dict[str, Any]:
    """A workload's name and sizes as plain values."""
    prompts = [len(prompt) for prompt in work.prompts]
    turns = [len(c.lengths) for c in work.conversations]
    return {
        "name": work.name,
        "conversations": len(work.conversations),
        "group_size": work.group_size,
        "tokens": work.tokens,
        "sampled": work.sampled,
        "prompt": [min(prompts), max(prompts)],
        "turns": [min(turns), max(turns)],
        "longest": work.max_context,
    }


def summary(figures: Mapping[str, Any], what: str) -> str:
    """The ratio first, then what it is of."""
    work, ours = figures["workload"], figures["contenders"][OURS]
    against = figures["against"]
    beside = (
        f"{OURS} {ours['median_s']:.3g} s {what}"
        if against is None
        else f"{figures['ratio']:.2f}x ({figures['ratio_least']:.2f} to"
        f" {figures['ratio_most']:.2f} by rounds): {OURS} {ours['median_s']:.3g} s {what},"
        f" {against} {figures['contenders'][against]['median_s']:.3g} s"
    )
    recipe = figures.get("over_recipe")
    if recipe is not None:
        beside += f"\n{recipe['ratio']:.2f}x the reference's recipe, with the turns that it pads"
    return (
        f"{beside}\n{work['name']}: {work['conversations']} conversations in groups of"
        f" {work['group_size']}, {work['tokens']} tokens, {work['turns'][1]} turns at most, prompts"
        f" of {work['prompt'][0]} to {work['prompt'][1]}; model {figures['model']},"
        f" {figures['dtype']}, {figures['machine']['device']}"
    )


def _print(figures: Mapping[str, Any]) -> None:
    print(summary(figures, "a sweep"))
    head = ("contender", "median s", "least", "most", "tokens/s", "peak MiB", "computed tokens")
    rows = [head]
    for name, f in figures["contenders"].items():
        peak = "?" if f["peak_bytes"] is None else f"{f['peak_bytes'] / 2**20:.0f}"
        times = [f"{f[key]:.3f}" for key in ("median_s", "least_s", "most_s")]
        rows.append((name, *times, f"{f['tokens_per_second']:.0f}", peak, f"{f['positions']}"))
    print_table(rows)
    ours, budget = figures["contenders"][OURS], figures["budgets"]
    once = flops_once(ours)
    print(
        f"FLOPs per sweep: {once:.3g}, and {ours['flops_again']:.2g} recomputed in backward passes;"
        f" {once / budget['goal']:.2f} of the budget {budget['goal']:.3g};"
        f" the reference recipe costs {budget['recipe']:.3g}"
    )
    if "mfu" in figures:
        print(f"{figures['mfu']:.1%} of the measured matmul peak {figures['matmul_peak']:.3g}")
    for name, f in figures["without"].items():
        print(
            f"without {name}: {f['time']:.2f}x the time, {f['computed']:.2f}x the tokens,"
            f" {f['flops']:.2f}x the FLOPs"
        )
