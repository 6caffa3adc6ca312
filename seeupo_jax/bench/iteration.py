"""A whole iteration, ours beside PyTorch's: conversations are sampled, then swept over.

Each side samples its own tokens and sweeps over those, of the lengths that are given: the work is
the same, the numbers are not. `bench update` compares the numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seeupo_jax.bench import comparison, machine
from seeupo_jax.bench.comparison import OURS, Timing, side
from seeupo_jax.bench.inputs import Inputs, prepared
from seeupo_jax.bench.jax_runner import OurSweeps
from seeupo_jax.bench.rollout import converse, generate, make_engine
from seeupo_jax.bench.settings import Settings
from seeupo_jax.bench.torch_runner import TorchSweeps, torch_sweeps
from seeupo_jax.bench.workloads import Actions, trajectory_lines

KEPT = "KV cache kept"  # a contender's name ends so whose rollout does not send conversations again

Parts = tuple[float, float]  # seconds of the rollout and of the sweep


def run(settings: Settings) -> dict[str, Any]:
    """Measures and prints; the figures.

    Raises:
      ValueError: a wrong setting.
    """
    if not settings.torch:
        raise ValueError("--torch: got none; allowed: a way to run what ours is measured against.")
    parts: dict[str, list[Parts]] = {}
    with prepared(settings, machine.fast_dtype(machine.only_device())) as inputs:
        about = comparison.about("iteration", settings, inputs.arch, inputs.work)
        sides = {OURS: _ours(OurSweeps(inputs), inputs)}
        for name, sweeps in torch_sweeps(inputs).items():
            sides[name] = _of_torch(sweeps, inputs, kept=False)
            sides[f"{name}, {KEPT}"] = _of_torch(sweeps, inputs, kept=True)
    for contend in sides.values():
        contend(-1)  # compiles

    def timed(name: str) -> Callable[[int], float]:
        def contend(number: int) -> float:
            parts.setdefault(name, []).append(sides[name](number))
            return sum(parts[name][-1])

        return contend

    timings = comparison.alternate({name: timed(name) for name in sides}, settings.repeats)
    kept = comparison.fastest(timings, [name for name in timings if name.endswith(KEPT)])
    figures = about | {
        **comparison.against_torch(timings, settings.torch),
        "over_kept": comparison.ratio(timings[kept], timings[OURS]),
        "contenders": {
            name: timing.as_json()
            | {
                "tokens_per_second": inputs.work.tokens / timing.median,
                "rollout_s": Timing(tuple(rollout for rollout, _ in parts[name])).median,
                "sweep_s": Timing(tuple(sweep for _, sweep in parts[name])).median,
            }
            for name, timing in timings.items()
        },
    }
    columns = {
        "median s": side("median_s", "{:.3f}"),
        "least": side("least_s", "{:.3f}"),
        "most": side("most_s", "{:.3f}"),
        "rollout s": side("rollout_s", "{:.3f}"),
        "sweep s": side("sweep_s", "{:.3f}"),
        "tokens/s": side("tokens_per_second", "{:.0f}"),
    }
    over = {"over_kept": "the same with the KV cache kept from turn to turn"}
    comparison.print_figures(figures, "an iteration", columns, comparison.RECIPE_WORDS | over)
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
