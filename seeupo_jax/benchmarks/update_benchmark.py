"""One sweep in JAX and in the PyTorch baseline: same weights, same trajectories, same numbers.

The first sweep of every contender starts from the same weights and must give the same losses, KL,
weights M, gradient norms and parameters, or nothing is timed. The second sweep measures memory.
Then the contenders alternate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seeupo_jax.benchmarks import comparison, machine
from seeupo_jax.benchmarks.comparison import JAX, Alone, SweepOutcome, side, torch_name
from seeupo_jax.benchmarks.jax_runner import Ablation, JaxSweeps, ablations
from seeupo_jax.benchmarks.settings import BenchSettings
from seeupo_jax.benchmarks.torch_runner import TorchSweeps, torch_sweeps
from seeupo_jax.benchmarks.workloads import Inputs, prepared
from seeupo_jax.planning.flops import parameters
from seeupo_jax.planning.program_flops import Flops
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.types import Trajectory, learnable

METRICS = ("sweep/padding_fraction", "sweep/shared_fraction", "sweep/steps", "sweep/tokens")
_ALLOWED = 1.15  # of the budget's formula: padding, attention and the refresh


def without_name(technique: str) -> str:
    """The name of a contender without a technique, for people."""
    return f"{JAX} without {technique}"


def run(
    settings: BenchSettings,
    *,
    strict: bool = True,
    alone: Alone | None = None,
) -> dict[str, Any]:
    """Checks, measures and prints; the figures.

    Args:
      strict: nothing is timed where the sides do not compute the same; otherwise their differences
        are among the figures, for the caller to judge.
      alone: is given the figures of our side before the others begin.

    Raises:
      ValueError: a wrong setting; or, if strict, the sides do not compute the same.
    """
    device, ablated = machine.only_device(), ablations(settings.without)
    with prepared(settings, machine.fast_dtype(device)) as inputs:
        contenders = Contenders(inputs, device.platform, strict)
        contenders.add(JAX, JaxSweeps(inputs))
        if alone is not None:
            alone(contenders.figures({}))
        for name, ablation in ablated.items():
            contenders.add(without_name(name), JaxSweeps(inputs, ablation))
        for name, contender in torch_sweeps(inputs).items():
            contenders.add(name, contender)
    figures = contenders.figures(ablated)
    _print(figures)
    return figures


class Contenders:
    """Contenders after their first sweep from the same weights, with its comparison.

    Args:
      strict: as in `run`.
    """

    def __init__(self, inputs: Inputs, platform: str, strict: bool) -> None:
        self._inputs, self._platform, self._strict = inputs, platform, strict
        self._about = comparison.about("update", inputs.settings, inputs.arch, inputs.work)
        self._contenders: dict[str, JaxSweeps | TorchSweeps] = {}
        self._sides: dict[str, dict[str, Any]] = {}
        self._differences: dict[str, dict[str, float]] = {}
        self._moved: dict[str, float] = {}
        self._jax_outcome: SweepOutcome | None = None

    def add(self, name: str, contender: JaxSweeps | TorchSweeps) -> None:
        """Runs its first sweep, which is compared with JAX's, added first; a second for its memory.

        Raises:
          ValueError: if strict, where it does not compute the same as JAX.
        """
        began, dtype = time.perf_counter(), self._inputs.arch.dtype
        start = None if self._jax_outcome is not None else contender.tensors()
        if isinstance(contender, JaxSweeps):
            side = _costs(contender, contender.recorded())
        else:
            contender.run()
            side = {"positions": contender.positions}
        outcome = contender.outcome()
        _log(f"{name}: first sweep", began)
        if self._jax_outcome is None:
            self._jax_outcome, self._moved = outcome, comparison.moved(start, outcome)
        else:
            differences = self._differences[name] = comparison.differences(
                self._jax_outcome, outcome
            )
            if self._strict:
                allowed = comparison.bounds(self._moved, dtype)
                comparison.require_same(differences, name, allowed)
        grown, held = machine.memory_growth(contender.run, self._platform), contender.state_bytes
        peak = None if grown is None else held + grown
        self._sides[name] = side | {"state_bytes": held, "peak_bytes": peak}
        self._contenders[name] = contender

    def figures(self, ablated: Mapping[str, Ablation]) -> dict[str, Any]:
        """Times all that were added, one sweep each in turn.

        Args:
          ablated: of our contenders without a technique, the techniques.
        """
        arch, work, settings = self._inputs.arch, self._inputs.work, self._inputs.settings
        timings = comparison.alternate(
            {name: lambda _, each=each: each.run() for name, each in self._contenders.items()},
            settings.repeats,
        )
        sides = {
            name: self._sides[name]
            | timing.as_json()
            | {"tokens_per_second": work.tokens / timing.median}
            for name, timing in timings.items()
        }
        jax_side = self._contenders[JAX]
        pools = Pools.of(jax_side.trajectories)
        ways = [way for way in settings.torch if torch_name(way) in timings]
        figures = self._about | {
            **comparison.against_torch(timings, ways),
            "budgets": budgets(arch, pools),
            "pools": vars(pools),
            "row_lengths": list(jax_side.learner.shapes.lengths),
            "contenders": sides,
            "without": {
                name: _contribution(sides[without_name(name)], sides[JAX])
                | {"words": ablation.words}
                for name, ablation in ablated.items()
            },
            "verified": {
                "bounds": comparison.bounds(self._moved, arch.dtype),
                "differences": dict(self._differences),
                "moved": self._moved,
            },
        }
        if self._platform != "cpu":
            figures["matmul_peak"] = peak = machine.matmul_peak(arch.dtype)
            figures["mfu"] = flops_once(sides[JAX]) / timings[JAX].median / peak
        return figures


def _log(what: str, began: float) -> None:
    print(f"{what} in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def _costs(contender: JaxSweeps, calls: list[Any]) -> dict[str, Any]:
    """FLOPs and tokens of a sweep, from the arguments of its programs."""
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


def flops_once(jax_side: Mapping[str, Any]) -> float:
    """FLOPs of a sweep without those recomputed in backward passes, as budgets and MFU count."""
    return jax_side["flops"] - jax_side["flops_again"]


def _contribution(without: Mapping[str, Any], jax_side: Mapping[str, Any]) -> dict[str, Any]:
    """How many times as much a sweep costs without a technique."""
    measures = {"time": "median_s", "computed": "positions", "flops": "flops"}
    return {name: without[of] / jax_side[of] for name, of in measures.items()}


@dataclass(frozen=True)
class Pools:
    """Tokens of a sweep's trajectories.

    whole: of all of them to their last action, a group's prompt once. pools: of each turn's
    trajectories to the end of that turn, the prompt of those of a group once; the sum over turns.
    rows: the same with the prompt in every row.
    """

    whole: int
    pools: int
    rows: int

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Pools:
        """The pools of trajectories of one segment each."""
        trained = [t for t, keep in zip(trajectories, learnable(trajectories), strict=True) if keep]
        turn = [t.segments[0].turn_L for t in trained]
        prompt = [int(np.argmax(turn_L >= 0)) for turn_L in turn]

        def tokens(action: list[np.ndarray]) -> tuple[int, int]:
            """Tokens up to the last of these of each: with a group's prompt once, and in all."""
            end = [int(np.flatnonzero(is_L)[-1]) + 1 if is_L.any() else 0 for is_L in action]
            there = [i for i, e in enumerate(end) if e]
            once = {trained[i].group: prompt[i] for i in there}
            return sum(end[i] - prompt[i] for i in there) + sum(once.values()), sum(end)

        turns = range(max(t.turns for t in trained))
        shared, rows = zip(*(tokens([turn_L == t for turn_L in turn]) for t in turns), strict=True)
        return cls(tokens([turn_L >= 0 for turn_L in turn])[0], sum(shared), sum(rows))


def budgets(arch: Architecture, pools: Pools) -> dict[str, float]:
    """The FLOPs that a sweep should cost, and those of the reference implementation's recipe.

    budget: 1.15 x [6 P tokens of every pool + 4 P tokens of the whole], a step's forward and
      backward pass, and one pass each for the old and the reference policy.
    recipe: 12 P tokens of every pool's rows: the step, and passes for the old, the reference and
      the new policy, of every turn.

    P is the number of parameters, a tied table counted once. P times the tokens is the usual
    estimate of a language model that computes logits everywhere; both sides need them at action
    tokens only and stay below it there. The estimate excludes attention, which the measurement
    includes.
    """
    P = parameters(arch)
    return {
        "budget": _ALLOWED * P * (6 * pools.pools + 4 * pools.whole),
        "recipe": 12.0 * P * pools.rows,
    }


def _print(figures: Mapping[str, Any]) -> None:
    columns = {
        "median s": side("median_s", "{:.3f}"),
        "least": side("least_s", "{:.3f}"),
        "most": side("most_s", "{:.3f}"),
        "tokens/s": side("tokens_per_second", "{:.0f}"),
        "peak MiB": side("peak_bytes", "{:.0f}", 2**20),
        "computed tokens": side("positions", "{:.0f}"),
    }
    comparison.print_figures(figures, "a sweep", columns, comparison.OVER_WORDS)
    jax_side, budget = figures["contenders"][JAX], figures["budgets"]
    once = flops_once(jax_side)
    print(
        f"FLOPs per sweep: {once:.3g}, and {jax_side['flops_again']:.2g} recomputed in backward"
        " passes;"
        f" {once / budget['budget']:.2f} of the budget {budget['budget']:.3g};"
        f" the reference recipe costs {budget['recipe']:.3g}"
    )
    if "mfu" in figures:
        print(f"{figures['mfu']:.1%} of the measured matmul peak {figures['matmul_peak']:.3g}")
    for name, f in figures["without"].items():
        print(
            f"without {name}: {f['time']:.2f}x the time, {f['computed']:.2f}x the tokens,"
            f" {f['flops']:.2f}x the FLOPs"
        )
