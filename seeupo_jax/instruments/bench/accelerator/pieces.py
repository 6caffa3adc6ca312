"""The pieces, most valuable first: measurement, sizes and time limit of each."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from seeupo_jax.benchmarks import machine, torch_runner, update_benchmark
from seeupo_jax.benchmarks import rollout as rollout_bench
from seeupo_jax.benchmarks.comparison import Alone
from seeupo_jax.benchmarks.settings import BenchSettings, architecture
from seeupo_jax.instruments.bench.accelerator import expert_products, kernels, numerics
from seeupo_jax.instruments.bench.accelerator.device_time import device_time
from seeupo_jax.instruments.bench.accelerator.runner import Record, is_out_of_memory, sentence
from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.planning.activation_memory import microbatch_bytes
from seeupo_jax.planning.flops import parameters
from seeupo_jax.policy.kernels.fused import preferred_kernel
from seeupo_jax.policy_io.build import LEAST_TOKENS

PROBE = "machine"  # name of the record that describes the machine
CORRECTNESS, UPDATE, ROLLOUT, QUICKSTART = "correctness", "update", "rollout", "quickstart"
DEVICE_TIME = "device_time"
LIMIT_S = 450.0  # of a piece: under eight minutes including its set-up
REHEARSAL_LIMIT_S = 300.0
# Bytes a parameter at the peak of a sweep. Ours, as `plan_remat` has them: float32 weights, the
# reference policy's, two moments, gradients added up and those of a microbatch. The baseline's: one
# gradient fewer, a copy in bfloat16, and another that it samples with.
_OURS, _TORCH = 24, 24
_SAMPLED = 2  # of a rollout, a side: weights in bfloat16
_TOKENS = 9000  # of a microbatch of one group's conversations, at real lengths, about
_BESIDE = 6 * GIB  # logits, caches and the libraries themselves, about
_SMALLEST_TRAINING = {
    "iterations": 1,
    "rollout.tasks": 2,
    "rollout.group_size": 2,
    "rollout.max_turns": 2,
    "evaluation.tasks": 1,
    "evaluation.every": 0,
    "evaluation.k": 1,
    "checkpoint.every": 0,
    "batching.buckets": "(128,)",  # one shape, to be compiled once
    "batching.microbatch_tokens": 128,
}


def update(record: Record, settings: BenchSettings, rehearse: bool) -> None:
    """`bench update`: against compiled PyTorch, or eager where compiling fails."""
    peak = {"peak_flops": machine.peak_flops(jax.devices()[0].device_kind)}

    def run(settings: BenchSettings, alone: Alone | None) -> dict[str, Any]:
        with_peak = None if alone is None else lambda figures: alone(figures | peak)
        return update_benchmark.run(settings, strict=False, alone=with_peak) | peak

    figures = beside_torch(record, settings, "torch", run, ("eager",), rehearse=rehearse)
    record.put(figures=figures)
    allowed = figures["verified"]["bounds"]
    for name, differences in figures["verified"]["differences"].items():
        bounded = {key: (value, allowed[key]) for key, value in differences.items()}
        record.check(f"a sweep against {name}", bounded, dtype=figures["dtype"])


def rollout(record: Record, settings: BenchSettings, rehearse: bool) -> None:
    """`bench rollout`: against `generate` with a static cache; a growing one if that fails."""

    def run(settings: BenchSettings, alone: Alone | None) -> dict[str, Any]:
        return rollout_bench.run_rollout(settings, alone=alone)

    figures = beside_torch(record, settings, "generate", run, ("kept",), rehearse=rehearse)
    record.put(figures=figures)


def beside_torch(
    record: Record,
    settings: BenchSettings,
    field: str,
    run: Callable[[BenchSettings, Alone | None], dict[str, Any]],
    fallback: tuple[str, ...],
    *,
    rehearse: bool,
) -> dict[str, Any]:
    """A benchmark with the baseline's best way, with `fallback`, or without the baseline.

    Args:
      field: of the settings, the baseline's ways.
      run: the benchmark; its argument takes JAX's figures before the baseline begins.
    """
    ways = getattr(settings, field)
    missing = torch_runner.no_torch(jax.devices()[0].platform)
    if missing is not None:
        record.note(f"Only our side was measured: {missing}.")
    if missing is not None or not ways:
        return run(replace(settings, **{field: ()}), None)

    def alone(figures: dict[str, Any]) -> None:
        record.put(figures=figures)  # JAX's figures stay if the baseline takes too long

    try:
        return run(settings, None if rehearse else alone)
    except Exception as error:
        failure = sentence(error)
        if ways == fallback or is_out_of_memory(str(error)):
            raise
    # Outside the handler: its traceback would keep the memory of the first attempt.
    record.note(f"Not measured against {ways[0]}: {failure}")
    return run(replace(settings, **{field: fallback}), None)


def quickstart(record: Record, _: BenchSettings, rehearse: bool) -> None:
    """Trains by the command; the figures are the curve of avg@k, and the seconds.

    This process must not take the device: of a TPU there is one process.

    Raises:
      RuntimeError: the training failed.
    """
    fields = {"telemetry.trackers": "[]", "telemetry.display": "plain"}
    fields |= _SMALLEST_TRAINING if rehearse else {}
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "seeupo_jax.train", "--config=package:quickstart"]
        line += [f"--workdir={folder}", *(f"--config.{k}={v}" for k, v in fields.items())]
        began = time.perf_counter()
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds = time.perf_counter() - began
        print(done.stdout)
        if done.returncode:
            output = [text for text in done.stdout.splitlines() if text.strip()]
            raise RuntimeError(f"training ended with {done.returncode}: {''.join(output[-1:])}")
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    keys = {key for values in metrics for key in values}
    (name,) = (key for key in keys if re.fullmatch(r"eval/avg@\d+", key))
    record.put(
        figures={
            "metric": name,
            "curve": [[each["iteration"], each[name]] for each in metrics if name in each],
            "seconds": seconds,
            "iterations": max(each["iteration"] for each in metrics),
            "compile_s": sum(each.get("time/compile_s", 0.0) for each in metrics),
        }
    )


@dataclass(frozen=True)
class Size:
    """The settings of a piece's measurement, and its approximate peak memory.

    memory: bytes of settings, with both sides and without PyTorch.
    """

    settings: BenchSettings
    memory: Callable[[BenchSettings], tuple[float, float]] = lambda _: (4 * GIB, 4 * GIB)

    def __str__(self) -> str:
        s = self.settings
        scaled = "" if s.scale in (None, 1.0) else f", lengths times {s.scale:g}"
        alone = "" if s.torch else ", without PyTorch"
        return f"{s.model}, {s.workload}, {s.groups} groups of {s.group_size}{scaled}{alone}"


@dataclass(frozen=True)
class Piece:
    """One process.

    measure: takes the record, the size's settings and whether this is a rehearsal.
    words: its result in words. section: of the page. sizes: from the largest to the smallest.
    about_s: estimated seconds; it is not begun with less time left.
    """

    name: str
    section: str
    words: str
    measure: Callable[[Record, BenchSettings, bool], None]
    about_s: float
    sizes: tuple[Size, ...] = (Size(BenchSettings()),)

    def fitting(self, free_bytes: int | None, *, alone: bool) -> tuple[list[int], list[str]]:
        """Indices of the sizes to try, and sentences on those that are too large.

        Args:
          free_bytes: of the device; None: not known, all are tried.
          alone: whether JAX runs without PyTorch.
        """
        fitting, notes = [], []
        for index, size in enumerate(self.sizes):
            both, ours = size.memory(size.settings)
            needed = ours if alone or not size.settings.torch else both
            if free_bytes is None or needed <= free_bytes:
                fitting.append(index)
            else:
                notes.append(
                    f"{size} would take about {needed / GIB:.0f} GiB of the"
                    f" {free_bytes / GIB:.0f} that are free."
                )
        return fitting, notes


def _of_sweep(settings: BenchSettings, dtype: str = "bfloat16") -> tuple[float, float]:
    """Bytes of weights, of arrays of their size, and of activations for the backward pass.

    JAX on a GPU takes as many groups in a microbatch as fit, and recomputes nothing.
    """
    arch = architecture(settings.model, dtype)
    P, scale = parameters(arch), settings.scale or 1.0
    length = min(LEAST_TOKENS["gpu"], round(settings.groups * _TOKENS * scale))
    fused = replace(arch, attention=preferred_kernel("gpu"), scan_layers=True)
    ours = _OURS * P + microbatch_bytes(fused, "none", rows=1, length=length, platform="gpu")
    channels = arch.layers * (6 * arch.width + 3 * arch.mlp_width)
    torch = _TORCH * P + jnp.dtype(dtype).itemsize * channels * _TOKENS * scale
    return ours + torch + _BESIDE, ours + _BESIDE


def _of_rollout(settings: BenchSettings) -> tuple[float, float]:
    P = parameters(architecture(settings.model, "bfloat16"))
    return 2 * (_SAMPLED * P + _BESIDE), _SAMPLED * P + _BESIDE


def _checked(name: str, words: str, measure: Any, about_s: float, *models: str) -> Piece:
    """Checks of numbers; of a model's with short conversations."""
    each = BenchSettings(workload="bfcl", groups=1, group_size=4, scale=0.125)
    sizes = tuple(Size(replace(each, model=model), _of_sweep) for model in models)
    more = {"sizes": sizes} if sizes else {}
    return Piece(name, CORRECTNESS, words, measure, about_s, **more)


def _trees(dtype: str) -> Piece:
    words = f"attention over token trees by the platform's kernel against plain attention, {dtype}"
    return _checked(f"trees_{dtype}", words, functools.partial(kernels.trees, dtype=dtype), 60)


def _update(workload: str, model: str, groups: int, about_s: float) -> Piece:
    scale, half = (None, None) if workload == "order_desk" else (1.0, 0.5)
    first = BenchSettings(workload, model, scale, groups, torch=("compile",))
    few = replace(first, groups=max(1, groups // 4), scale=half)
    last = replace(few, model="135m") if model == "0.5b" else replace(first, torch=())
    words = f"an update sweep, {workload}-shaped, {model}, against PyTorch"
    sizes = tuple(Size(each, _of_sweep) for each in (first, few, last))
    return Piece(f"update_{workload}_{model}", UPDATE, words, update, about_s, sizes)


def _rollout(model: str, about_s: float) -> Piece:
    first = BenchSettings("bfcl", model, 1.0, groups=4, generate=("static", "kept"))
    few = replace(first, groups=1)
    last = replace(few, model="135m") if model == "0.5b" else replace(few, scale=0.5)
    words = f"a rollout, bfcl-shaped, {model}, against generate with a static KV cache"
    sizes = tuple(Size(each, _of_rollout) for each in (first, few, last))
    return Piece(f"rollout_{model}", ROLLOUT, words, rollout, about_s, sizes)


PIECES = (
    _trees("bfloat16"),
    _trees("float32"),
    _checked(
        "rows",
        "fused attention over rows, and over pages of the KV cache, against plain attention",
        kernels.rows,
        60,
    ),
    _checked(
        "experts",
        "the grouped product of experts by the platform's kernel against `ragged_dot`",
        expert_products.experts,
        60,
    ),
    _checked(
        "parity",
        "logits and gradients against PyTorch, float32 and bfloat16",
        numerics.parity,
        90,
        *("0.5b", "135m"),
    ),
    _checked(
        "sweep",
        "a sweep with fused against separate refresh and against PyTorch; the sampler's"
        " log-probabilities against the trainer's; float32 and bfloat16",
        numerics.sweeps,
        120,
        "135m",
    ),
    Piece(
        "sweep_long",
        CORRECTNESS,
        "a sweep over whole conversations against PyTorch, in float32; bfloat16 against that",
        numerics.long_sweep,
        120,
        tuple(
            Size(
                BenchSettings("bfcl", "0.5b", scale, groups=1),
                functools.partial(_of_sweep, dtype="float32"),
            )
            for scale in (1.0, 0.5, 0.25)
        ),
    ),
    _update("bfcl", "0.5b", 4, 180),
    _update("order_desk", "0.5b", 64, 180),
    _rollout("0.5b", 150),
    Piece(
        "device_time_0.5b",
        DEVICE_TIME,
        "a sweep's and a rollout's time on the device by program and kernel, bfcl-shaped, 0.5b",
        device_time,
        120,
        tuple(
            Size(BenchSettings("bfcl", "0.5b", scale, groups=4, torch=()), _of_sweep)
            for scale in (1.0, 0.5)
        ),
    ),
    Piece("quickstart", QUICKSTART, "configs/quickstart.py trained to its end", quickstart, 150),
    _update("bfcl", "1.5b", 4, 240),
    _update("order_desk", "1.5b", 32, 240),
    _rollout("1.5b", 200),
)
BY_NAME = {piece.name: piece for piece in PIECES}


def _rehearsed(settings: BenchSettings) -> BenchSettings:
    """The smallest sizes of the same kind."""
    smallest = replace(settings, model="nano", groups=1, group_size=2, repeats=1, torch=("eager",))
    if settings.workload == "order_desk":
        return smallest
    return replace(smallest, workload="long", scale=0.05, turns=2)


def run(name: str, record: Record, size: int, *, rehearse: bool) -> None:
    """Measures a piece in one of its sizes, in this process; `PROBE` describes the machine."""
    if name == PROBE:
        return _probe(record)
    piece = BY_NAME[name]
    settings = piece.sizes[size].settings
    if rehearse:
        settings = _rehearsed(settings)
    about: dict[str, Any] = {"rehearsal": rehearse}
    if piece.section != QUICKSTART:  # whose training takes the device
        about["device"] = jax.devices()[0].device_kind
    if piece.sizes is not Piece.sizes:
        about["size"] = str(Size(settings))
    record.put(**about)
    piece.measure(record, settings, rehearse)


def _probe(record: Record) -> None:
    first, *others = jax.devices()
    about = machine.describe(first)
    peak = {
        "count": 1 + len(others),
        "free_bytes": machine.free_bytes(first),
        "peak_flops": machine.peak_flops(about["device"]),
        "no_torch": torch_runner.no_torch(first.platform),
    }
    record.put(figures=about | peak)
