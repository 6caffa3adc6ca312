"""Our engine beside `transformers`' `generate` on PyTorch: the same model, the same conversations.

What is sampled differs, and is cut to the lengths that are given: the work is the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seeupo_jax.bench import machine, workloads
from seeupo_jax.bench.interleave import Timing, alternate, print_table, ratio
from seeupo_jax.bench.runners import bench_models, torch_imports
from seeupo_jax.bench.runners.sampling_runner import converse, make_engine, spent
from seeupo_jax.bench.runners.torch_runner import use_every_core
from seeupo_jax.bench.settings import Settings, command
from seeupo_jax.bench.update import OURS, describe, summary
from seeupo_jax.bench.workload import Workload
from seeupo_jax.planning.flops import parameters
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy import network as policy

RESENT, KEPT = "generate, conversation sent again", "generate, KV cache kept"
STATIC = "generate, static KV cache kept"
# A way of `--generate` -> its name for people, and what the baseline is told.
WAYS: dict[str, tuple[str, dict[str, bool]]] = {
    "resent": (RESENT, {"kept": False}),
    "kept": (KEPT, {"kept": True}),
    "static": (STATIC, {"kept": True, "static": True}),
}


def run(settings: Settings) -> dict[str, Any]:
    """Measures, prints a table and returns its figures.

    Raises:
      ValueError: a wrong setting.
    """
    device = bench_models.only_device()
    dtype = bench_models.activations(device.platform)
    arch = bench_models.architecture(settings.model, dtype)
    about = machine.describe(device)
    work = workloads.make(settings, arch.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        bench_models.write(arch, Path(folder), seed=settings.seed, dtype=dtype)
        theirs = None
        if settings.generate:
            generate = torch_imports.load("generate")
            theirs = generate.load(folder, bench_models.torch_device(device.platform), dtype)
            use_every_core(machine.cores())
        model, _ = from_pretrained(folder, dtype=dtype)
    network, params = policy.split(model)
    engine = make_engine(network, work, settings, device.platform)
    engine.compile(params)
    ways = dict(WAYS[way] for way in settings.generate)
    figures: dict[str, dict[str, Any]] = {name: {} for name in (*ways, OURS)}

    def ours(number: int) -> float:
        played = converse(engine, params, work, settings.seed + number)
        figures[OURS] |= spent(engine)
        return played.seconds

    contenders: dict[str, Callable[[int], float]] = {
        name: _generate(theirs, work, settings, figures[name], options)
        for name, options in ways.items()
    } | {OURS: ours}
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
        **_compare(timings, list(ways)),
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


def _compare(timings: Mapping[str, Timing], ways: Sequence[str]) -> dict[str, Any]:
    """Ours against the first way of `generate`, and against those that keep the cache."""
    over = {name: ratio(timings[name], timings[OURS]) for name in ways}
    first = {"against": None} if not ways else over[ways[0]] | {"against": ways[0]}
    return first | {"over_kept": over.get(KEPT), "over_static": over.get(STATIC)}


def _generate(
    model: Any,
    work: Workload,
    settings: Settings,
    found: dict[str, Any],
    options: Mapping[str, bool],
) -> Callable[[int], float]:
    generate = torch_imports.load("generate")

    def contend(number: int) -> float:
        everything = work.conversations
        result = generate.run(
            model,
            everything,
            **options,
            temperature=1.0,
            seed=settings.seed + number,
            batch=len(everything),
        )
        found.update(computed=result.computed_tokens, positions=result.computed)
        return result.seconds

    return contend


def _print(figures: Mapping[str, Any]) -> None:
    print(summary(figures, "a rollout"))
    for name, words in (("over_kept", "the cache kept"), ("over_static", "a static cache kept")):
        if figures[name] is not None:
            print(f"{figures[name]['ratio']:.2f}x {words}")
    head = ("contender", "median s", "sampled/s", "computed/sampled", "with padding", "waste")
    rows = [head]
    for name, f in figures["contenders"].items():
        keys = ("computed_per_sampled", "positions_per_sampled", "waste")
        each = (f"{f[key]:.2f}" for key in keys)
        rows.append((name, f"{f['median_s']:.2f}", f"{f['tokens_per_second']:.0f}", *each))
    print_table(rows)
    least = figures["least_computed_per_sampled"]
    print(f"at least {least:.2f} tokens must be computed for each sampled one (waste 1)")
