"""A whole iteration, ours beside PyTorch's: conversations are sampled, then swept over.

Each side samples its own tokens and sweeps over those, of the lengths that are given: the work is
the same, the numbers are not. `bench update` is what holds the numbers against each other.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seeupo_jax.bench import machine, swept_fields, synthetic, workloads
from seeupo_jax.bench.interleave import Timing, alternate, fastest, print_table, ratio
from seeupo_jax.bench.runners import bench_models, torch_imports
from seeupo_jax.bench.runners.jax_runner import OurSweeps
from seeupo_jax.bench.runners.sampling_runner import converse, make_engine
from seeupo_jax.bench.runners.torch_runner import TorchSweeps
from seeupo_jax.bench.settings import Settings, command
from seeupo_jax.bench.update import OURS, compare, describe, summary, torch_sweeps
from seeupo_jax.bench.workload import Workload
from seeupo_jax.planning.flops import parameters
from seeupo_jax.trajectories.stored import read_trajectories

PARTS = ("rollout", "sweep")
KEPT = "KV cache kept"  # a contender's name ends so whose rollout does not send conversations again

Parts = dict[str, dict[str, list[float]]]  # [contender][part], seconds of each run


def run(settings: Settings) -> dict[str, Any]:
    """Measures and prints; the figures.

    Raises:
      ValueError: a wrong setting.
    """
    if not settings.torch:
        raise ValueError("--torch: got none; allowed: a way to run what ours is measured against.")
    device = bench_models.only_device()
    arch = bench_models.architecture(settings.model, bench_models.activations(device.platform))
    about = machine.describe(device)
    work = workloads.make(settings, arch.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        model, lines = Path(folder, "model"), Path(folder, "trajectories.jsonl")
        bench_models.write(arch, model, seed=settings.seed)
        acted = synthetic.random_actions(work, settings.seed)
        synthetic.write(synthetic.records(work, acted, seed=settings.seed), lines)
        values = swept_fields.values(settings, turns=work.turns, dtype=arch.dtype)
        parts: Parts = {}
        ours = _ours(OurSweeps(model, lines, values), work, settings, lines, parts)
        contenders = {OURS: ours} | {
            name + suffix: _theirs(sweeps, work, settings, parts, name + suffix, kept=kept)
            for name, sweeps in torch_sweeps(model, lines, values, settings, device).items()
            for suffix, kept in (("", False), (f", {KEPT}", True))
        }
        for contend in contenders.values():
            contend(-1)  # compiles
        parts.clear()
        timings = alternate(contenders, settings.repeats)
    figures = _figures(timings, parts, work, settings)
    figures |= {
        "model": settings.model,
        "parameters": parameters(arch),
        "dtype": arch.dtype,
        "machine": about,
    }
    _print(figures)
    return figures


def _add(parts: Parts, name: str, rollout: float, sweep: float) -> float:
    own = parts.setdefault(name, {part: [] for part in PARTS})
    own["rollout"].append(rollout)
    own["sweep"].append(sweep)
    return rollout + sweep


def _records(work: Workload, actions: Any, settings: Settings) -> list[str]:
    return [json.dumps(r) for r in synthetic.records(work, actions, seed=settings.seed)]


def _ours(
    sweeps: OurSweeps, work: Workload, settings: Settings, lines: Path, parts: Parts
) -> Callable[[int], float]:
    policy = sweeps.policy
    platform = policy.mesh.devices.flat[0].platform
    engine = make_engine(policy.network, work, settings, platform)
    engine.compile(policy.merged(sweeps.state.params))

    def contend(number: int) -> float:
        params = policy.merged(sweeps.state.params)
        played = converse(engine, params, work, settings.seed + number + 1)
        # As stored ones: reading them back is no part of an iteration, nor timed.
        lines.write_text("\n".join(_records(work, played.actions, settings)) + "\n")
        return _add(parts, OURS, played.seconds, sweeps.run(read_trajectories(lines)))

    return contend


def _theirs(
    sweeps: TorchSweeps, work: Workload, settings: Settings, parts: Parts, name: str, *, kept: bool
) -> Callable[[int], float]:
    generate = torch_imports.load("generate")

    def contend(number: int) -> float:
        model, copying = sweeps.sampler()
        result = generate.run(
            model,
            work.conversations,
            kept=kept,
            temperature=1.0,
            seed=settings.seed + number + 1,
            batch=len(work.conversations),
        )
        swept = sweeps.run(_records(work, result.actions, settings))
        return _add(parts, name, result.seconds + copying, swept)

    return contend


def _figures(
    timings: Mapping[str, Timing], parts: Parts, work: Workload, settings: Settings
) -> dict[str, Any]:
    contenders = {
        name: timing.as_json()
        | {
            "tokens_per_second": work.tokens / timing.median,
            **{f"{part}_s": Timing(tuple(parts[name][part])).median for part in PARTS},
        }
        for name, timing in timings.items()
    }
    kept = [name for name in timings if name.endswith(KEPT)]
    against_kept = fastest(timings, kept)
    return {
        "benchmark": "iteration",
        "command": command("iteration", settings),
        **compare(timings, settings.torch),
        "over_kept": ratio(timings[against_kept], timings[OURS]),
        "workload": describe(work),
        "contenders": contenders,
    }


def _print(figures: Mapping[str, Any]) -> None:
    print(summary(figures, "an iteration"))
    print(f"{figures['over_kept']['ratio']:.2f}x the same with the KV cache kept from turn to turn")
    rows = [("contender", "median s", "least", "most", "rollout s", "sweep s", "tokens/s")]
    for name, f in figures["contenders"].items():
        keys = ("median_s", "least_s", "most_s", "rollout_s", "sweep_s")
        rows.append((name, *(f"{f[key]:.3f}" for key in keys), f"{f['tokens_per_second']:.0f}"))
    print_table(rows)
