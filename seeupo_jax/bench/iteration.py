"""A whole iteration, ours beside PyTorch's: conversations are sampled, then swept over.

Each side samples its own tokens and sweeps over those, of the lengths that are given: the work is
the same, the numbers are not. `bench update` compares the numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seeupo_jax.bench import comparison, machine
from seeupo_jax.bench.comparison import OURS, Timing, print_table
from seeupo_jax.bench.inputs import Inputs, prepared
from seeupo_jax.bench.rollout import converse, generate, make_engine
from seeupo_jax.bench.runners.jax_runner import OurSweeps
from seeupo_jax.bench.runners.torch_runner import TorchSweeps, torch_sweeps
from seeupo_jax.bench.settings import Settings
from seeupo_jax.bench.workloads import Actions, trajectory_lines
from seeupo_jax.planning.flops import parameters

KEPT = "KV cache kept"  # a contender's name ends so whose rollout does not send conversations again

Parts = tuple[float, float]  # seconds of the rollout and of the sweep


def run(settings: Settings) -> dict[str, Any]:
    """Measures and prints; the figures.

    Raises:
      ValueError: a wrong setting.
    """
    if not settings.torch:
        raise ValueError("--torch: got none; allowed: a way to run what ours is measured against.")
    device = machine.only_device()
    about, parts = machine.describe(device), {}
    with prepared(settings, machine.fast_dtype(device)) as inputs:
        sides = {OURS: _ours(OurSweeps(inputs), inputs)}
        for name, sweeps in torch_sweeps(inputs).items():
            sides[name] = _of_torch(sweeps, inputs, kept=False)
            sides[f"{name}, {KEPT}"] = _of_torch(sweeps, inputs, kept=True)
    for side in sides.values():
        side(-1)  # compiles

    def timed(name: str) -> Callable[[int], float]:
        def contend(number: int) -> float:
            parts.setdefault(name, []).append(sides[name](number))
            return sum(parts[name][-1])

        return contend

    timings = comparison.alternate({name: timed(name) for name in sides}, settings.repeats)
    kept = comparison.fastest(timings, [name for name in timings if name.endswith(KEPT)])
    figures = {
        "benchmark": "iteration",
        "command": settings.command("iteration"),
        **comparison.against_torch(timings, settings.torch),
        "over_kept": comparison.ratio(timings[kept], timings[OURS]),
        "workload": comparison.describe(inputs.work),
        "contenders": {
            name: timing.as_json()
            | {
                "tokens_per_second": inputs.work.tokens / timing.median,
                "rollout_s": Timing(tuple(rollout for rollout, _ in parts[name])).median,
                "sweep_s": Timing(tuple(sweep for _, sweep in parts[name])).median,
            }
            for name, timing in timings.items()
        },
        "model": settings.model,
        "parameters": parameters(inputs.arch),
        "dtype": inputs.arch.dtype,
        "machine": about,
    }
    _print(figures)
    return figures


def _swept(sweeps: OurSweeps | TorchSweeps, inputs: Inputs, actions: Actions) -> float:
    """Seconds of a sweep over what was sampled; writing and reading it is not timed."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "sampled.jsonl")
        made = trajectory_lines(inputs.work, actions, seed=inputs.settings.seed)
        lines.write_text("\n".join(made) + "\n")
        return sweeps.run(lines)


def _ours(sweeps: OurSweeps, inputs: Inputs) -> Callable[[int], Parts]:
    engine = make_engine(sweeps.policy.network, inputs.work, inputs.settings)
    engine.compile(sweeps.params())

    def contend(number: int) -> Parts:
        seed = inputs.settings.seed + number + 1
        played = converse(engine, sweeps.params(), inputs.work, seed)
        return played.seconds, _swept(sweeps, inputs, played.actions)

    return contend


def _of_torch(sweeps: TorchSweeps, inputs: Inputs, *, kept: bool) -> Callable[[int], Parts]:
    def contend(number: int) -> Parts:
        model, copying = sweeps.sampler()
        seed = inputs.settings.seed + number + 1
        result = generate(model, inputs.work, seed=seed, kept=kept)
        return result.seconds + copying, _swept(sweeps, inputs, result.actions)

    return contend


def _print(figures: Mapping[str, Any]) -> None:
    comparison.print_summary(figures, "an iteration")
    print(f"{figures['over_kept']['ratio']:.2f}x the same with the KV cache kept from turn to turn")
    rows = [("contender", "median s", "least", "most", "rollout s", "sweep s", "tokens/s")]
    for name, f in figures["contenders"].items():
        keys = ("median_s", "least_s", "most_s", "rollout_s", "sweep_s")
        rows.append((name, *(f"{f[key]:.3f}" for key in keys), f"{f['tokens_per_second']:.0f}"))
    print_table(rows)
