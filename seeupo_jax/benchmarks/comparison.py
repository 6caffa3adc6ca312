"""Comparison of contenders: equality of their results, their speed, and the printed summary."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seeupo_jax.benchmarks import machine
from seeupo_jax.benchmarks.settings import PACKED, RECIPE, BenchSettings
from seeupo_jax.benchmarks.workloads import Workload
from seeupo_jax.planning.flops import parameters
from seeupo_jax.policy.architecture import Architecture

Figures = dict[str, Any]  # of a run, as they go into the JSON
Alone = Callable[[Figures], None]  # takes the figures of our side before another begins
OfSide = Callable[[Figures, str], str]  # of a run's figures and a contender's name

JAX = "seeupo_jax"
# Ratios in addition to the one against the baseline, by the way that it ran.
OVER = {RECIPE: "over_recipe", PACKED: "over_packed"}
OVER_WORDS = {
    "over_recipe": "the reference's recipe, with the turns that it pads",
    "over_packed": "the baseline with the common beginnings of a group computed once",
}
# Float32 differs by the order of sums; bfloat16 by about 1% of a log-probability (8 bits), which
# the ratios' exponent and Adam's quotient carry on.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
_SHARE = 0.5  # of what a sweep itself did; in bfloat16 0.23 of its way were seen in parameters


def torch_name(way: str) -> str:
    """A PyTorch contender's name, for people."""
    return f"PyTorch, {way}"


@dataclass(frozen=True)
class SweepOutcome:
    """A sweep's steps, plain values by name, and the weights after it by their names in files."""

    steps: Sequence[Mapping[str, Any]]
    tensors: Mapping[str, np.ndarray]


def differences(one: SweepOutcome, other: SweepOutcome) -> dict[str, float]:
    """The greatest difference of each kind of number, against 1 or the number if that is larger.

    Gradient norms before clipping are compared relative to the norm, since clipping hides them from
    the parameters. Results that cannot be compared (other steps, other tensors, a missing number)
    differ infinitely.
    """
    same = [step["turns"] for step in one.steps] == [step["turns"] for step in other.steps]
    pairs = list(zip(one.steps, other.steps, strict=True)) if same else []
    largest = {
        name: max((greatest(a[name], b[name]) for a, b in pairs), default=np.inf)
        for name in ("loss", "kl", "weights")
    }
    norms = (off_norm(a["grad_norm"], b["grad_norm"]) for a, b in pairs)
    largest["grad_norm"] = max(norms, default=np.inf)
    same = one.tensors.keys() == other.tensors.keys()
    each = [greatest(one.tensors[n], other.tensors[n]) for n in one.tensors] if same else []
    return largest | {"parameters": max(each, default=np.inf)}


def moved(start: Mapping[str, np.ndarray], after: SweepOutcome) -> dict[str, float]:
    """How far a sweep itself changed weights and parameters, and its greatest loss and KL:
    without that nothing would be shown."""
    weights = [step["weights"] for step in after.steps]
    return {
        "loss": max(abs(step["loss"]) for step in after.steps),
        "kl": max(abs(step["kl"]) for step in after.steps),
        "weights": max(greatest(weights[-1], first) for first in weights),
        "parameters": max(greatest(after.tensors[name], start[name]) for name in start),
    }


def bounds(moved: Mapping[str, float], dtype: str) -> dict[str, float]:
    """Bounds on the differences between sides that compute the same, by name.

    The bound follows from the activations' type, and is at most half of the sweep's own change, or
    a side that does nothing would pass; it is at least float32's bound. Gradient norms, whose
    differences are relative, have the type's bound.

    Args:
      moved: as `moved` gives it.
    """
    least, most = TOLERANCES["float32"], TOLERANCES[dtype]
    allowed = {name: max(least, min(most, _SHARE * size)) for name, size in moved.items()}
    return allowed | {"grad_norm": most}


def require_same(measured: Mapping[str, float], name: str, allowed: Mapping[str, float]) -> None:
    """Raises ValueError where JAX and a side differ by more than `bounds` allows."""
    wrong = [
        f"{of} by {difference:.2g}, allowed: {allowed[of]:.2g}"
        for of, difference in measured.items()
        if not difference <= allowed[of]
    ]
    if wrong:
        raise ValueError(
            f"bench: from the same weights {JAX} and {name} differ: {'; '.join(wrong)}. Nothing was"
            " timed."
        )


def off_norm(one: float | None, other: float | None) -> float:
    """The difference of two norms, against the other; None is no number."""
    size = other if other is not None and other > 0 else 1.0
    return greatest(*(np.nan if norm is None else norm / size for norm in (one, other)))


def greatest(one: Any, other: Any) -> float:
    """NaN, or None, is the same as NaN, and infinitely far from a number."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if one.shape != other.shape:
        return np.inf
    both = np.isnan(one) & np.isnan(other)
    relative = np.abs(one - other) / np.maximum(1, np.abs(other))
    return float(np.where(both, 0, np.where(np.isnan(relative), np.inf, relative)).max(initial=0))


@dataclass(frozen=True)
class Timing:
    """Seconds of every run of a contender."""

    each: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.each)

    def as_json(self) -> dict[str, Any]:
        return {
            "median_s": self.median,
            "least_s": min(self.each),
            "most_s": max(self.each),
            "each_s": list(self.each),
        }


def timed(call: Callable[[], Any]) -> Callable[[int], float]:
    """A call as `alternate` takes it: whatever the round, the seconds that it takes."""

    def seconds(_: int) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return seconds


def alternate(contenders: Mapping[str, Callable[[int], float]], repeats: int) -> dict[str, Timing]:
    """Runs every contender once a round, in every other round the last one first.

    A noisy machine slows all of them.

    Args:
      contenders: from the number of the round to the seconds that it took.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(repeats):
        names = list(contenders)
        for name in names if number % 2 == 0 else names[::-1]:
            seconds[name].append(contenders[name](number))
    return {name: Timing(tuple(each)) for name, each in seconds.items()}


def fastest(timings: Mapping[str, Timing], names: Sequence[str]) -> str:
    """The one of `names` with the least median."""
    return min(names, key=lambda name: timings[name].median)


def ratio(slower: Timing, faster: Timing) -> dict[str, float]:
    """The ratio of the medians, and the least and greatest ratio of a round."""
    rounds = [a / b for a, b in zip(slower.each, faster.each, strict=True)]
    return {
        "ratio": slower.median / faster.median,
        "ratio_least": min(rounds),
        "ratio_most": max(rounds),
    }


def against_torch(
    timings: Mapping[str, Timing], ways: Sequence[str], over: Mapping[str, str] = OVER
) -> dict[str, Any]:
    """Ours against the baseline: as fast as it goes, and in the ways that have ratios of their own.

    Args:
      over: the names of those ratios by way.
    """
    torch_sides = [torch_name(way) for way in ways if way not in over]
    comparison: dict[str, Any] = {"against": None} | dict.fromkeys(over.values())
    if torch_sides:
        comparison["against"] = against = fastest(timings, torch_sides)
        comparison |= ratio(timings[against], timings[JAX])
    for way in set(ways) & set(over):
        comparison[over[way]] = ratio(timings[torch_name(way)], timings[JAX])
    return comparison


def about(
    benchmark: str, settings: BenchSettings, arch: Architecture, work: Workload
) -> dict[str, Any]:
    """The subject of a measurement as plain values, with the machine in its current state."""
    prompts = [len(prompt) for prompt in work.prompts]
    turns = [len(c.lengths) for c in work.conversations]
    return {
        "benchmark": benchmark,
        "command": settings.command(benchmark),
        "workload": {
            "name": work.name,
            "conversations": len(work.conversations),
            "group_size": work.group_size,
            "tokens": work.tokens,
            "sampled": work.sampled,
            "prompt": [min(prompts), max(prompts)],
            "turns": [min(turns), max(turns)],
            "longest": work.max_context,
        },
        "model": settings.model,
        "parameters": parameters(arch),
        "dtype": arch.dtype,
        "machine": machine.describe(machine.only_device()),
    }


def side(key: str, form: str, unit: float = 1) -> OfSide:
    """A contender's figure in a format and a unit; `?` where it was not measured."""

    def cell(figures: Figures, name: str) -> str:
        value = figures["contenders"][name][key]
        return "?" if value is None else form.format(value / unit)

    return cell


def print_figures(
    figures: Figures, what: str, columns: Mapping[str, OfSide], over: Mapping[str, str]
) -> None:
    """The ratios, then the benchmark's description, and a table of the contenders.

    Args:
      what: one run of a contender, in words.
      columns: the table's headers, and the functions of their cells.
      over: other ratios among the figures, with their descriptions.
    """
    work, sides, against = figures["workload"], figures["contenders"], figures["against"]
    result = f"{JAX} {sides[JAX]['median_s']:.3g} s {what}"
    if against is not None:
        result = (
            f"{figures['ratio']:.2f}x ({figures['ratio_least']:.2f} to"
            f" {figures['ratio_most']:.2f} by rounds): {result},"
            f" {against} {sides[against]['median_s']:.3g} s"
        )
    print(result)
    for name, words in over.items():
        if figures[name] is not None:
            print(f"{figures[name]['ratio']:.2f}x {words}")
    print(
        f"{work['name']}: {work['conversations']} conversations in groups of"
        f" {work['group_size']}, {work['tokens']} tokens, {work['turns'][1]} turns at most, prompts"
        f" of {work['prompt'][0]} to {work['prompt'][1]}; model {figures['model']},"
        f" {figures['dtype']}, {figures['machine']['device']}"
    )
    rows = [["contender", *columns]]
    rows += [[name, *(cell(figures, name) for cell in columns.values())] for name in sides]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        print(first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)))
