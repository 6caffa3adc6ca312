"""Our engine beside `transformers`' `generate` on PyTorch: the same model, the same conversations.

What is sampled differs, and is cut to the lengths that are given: the work is the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seeupo_jax.aot.flops import parameters
from seeupo_jax.bench import machine, models, torch_side, workloads
from seeupo_jax.bench.contest import alternate, ratio
from seeupo_jax.bench.sampling import converse, make_engine, spent
from seeupo_jax.bench.settings import Settings, command
from seeupo_jax.bench.tables import print_table
from seeupo_jax.bench.theirs import use_every_core
from seeupo_jax.bench.update import OURS, describe, summary
from seeupo_jax.bench.workload import Workload
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy import network as policy

RESENT, KEPT = "generate, conversation sent again", "generate, KV cache kept"


def run(settings: Settings) -> dict[str, Any]:
    """Measures, prints a table and returns its figures.

    Raises:
      ValueError: a wrong setting.
    """
    device = models.only_device()
    dtype = models.activations(device.platform)
    arch = models.architecture(settings.model, dtype)
    about = machine.describe(device)
    work = workloads.make(settings, arch.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        models.write(arch, Path(folder), seed=settings.seed, dtype=dtype)
        generate = torch_side.load("generate")
        theirs = generate.load(folder, models.torch_device(device.platform), dtype)
        model, _ = from_pretrained(folder, dtype=dtype)
    use_every_core(machine.cores())
    network, params = policy.split(model)
    engine = make_engine(network, work, settings, device.platform)
    engine.compile(params)
    figures: dict[str, dict[str, Any]] = {name: {} for name in (RESENT, KEPT, OURS)}

    def ours(number: int) -> float:
        seconds, _ = converse(engine, params, work, settings.seed + number)
        figures[OURS] |= spent(engine)
        return seconds

    contenders: dict[str, Callable[[int], float]] = {
        RESENT: _generate(theirs, work, settings, figures[RESENT], kept=False),
        KEPT: _generate(theirs, work, settings, figures[KEPT], kept=True),
        OURS: ours,
    }
    timings = alternate(contenders, settings.repeats)
    for name, timing in timings.items():
        figures[name] |= timing.as_json()
        figures[name] |= {
            "tokens_per_second": work.sampled / timing.median,
            "computed_per_sampled": figures[name]["computed"] / work.sampled,
            "positions_per_sampled": figures[name]["positions"] / work.sampled,
            "waste": figures[name]["computed"] / work.least_computed,
        }
    done = {
        "benchmark": "rollout",
        "command": command("rollout", settings),
        **ratio(timings[RESENT], timings[OURS]),
        "against": RESENT,
        "over_kept": ratio(timings[KEPT], timings[OURS]),
        "workload": describe(work),
        "least_computed_per_sampled": work.least_computed / work.sampled,
        "model": settings.model,
        "parameters": parameters(arch),
        "dtype": dtype,
        "contenders": figures,
        "machine": about,
    }
    _print(done)
    return done


def _generate(
    model: Any, work: Workload, settings: Settings, found: dict[str, Any], *, kept: bool
) -> Callable[[int], float]:
    generate = torch_side.load("generate")

    def contend(number: int) -> float:
        everything = work.conversations
        result = generate.run(
            model,
            everything,
            kept=kept,
            temperature=1.0,
            seed=settings.seed + number,
            batch=len(everything),
        )
        found.update(computed=result.computed_tokens, positions=result.computed)
        return result.seconds

    return contend


def _print(figures: Mapping[str, Any]) -> None:
    print(summary(figures, "a rollout"))
    print(f"{figures['over_kept']['ratio']:.2f}x the cache kept")
    head = ("contender", "median s", "sampled/s", "computed/sampled", "with padding", "waste")
    rows = [head]
    for name, f in figures["contenders"].items():
        keys = ("computed_per_sampled", "positions_per_sampled", "waste")
        each = (f"{f[key]:.2f}" for key in keys)
        rows.append((name, f"{f['median_s']:.2f}", f"{f['tokens_per_second']:.0f}", *each))
    print_table(rows)
    least = figures["least_computed_per_sampled"]
    print(f"at least {least:.2f} tokens must be computed for each sampled one (waste 1)")
