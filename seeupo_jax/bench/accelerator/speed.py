"""Sweeps and rollouts at real sizes, ours beside PyTorch's where it runs on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from seeupo_jax.bench import rollout as rollout_bench
from seeupo_jax.bench import update as update_bench
from seeupo_jax.bench.accelerator import device
from seeupo_jax.bench.accelerator.record import Record, sentence
from seeupo_jax.bench.settings import Settings

_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory")


def update(record: Record, settings: Settings, rehearse: bool) -> None:
    """`bench update`: against compiled PyTorch, or eager where compiling fails."""
    found = _beside(
        record,
        settings,
        "torch",
        _sweeps,
        fallback=("eager",),
        rehearse=rehearse,
    )
    record.put(figures=found)
    allowed = found["verified"]["tolerance"]
    for name, differences in found["verified"]["differences"].items():
        bounded = {key: (value, allowed) for key, value in differences.items()}
        record.check(f"a sweep against {name}", bounded, dtype=found["dtype"])


def _sweeps(settings: Settings) -> dict[str, Any]:
    peak = device.peak_flops(jax.devices()[0].device_kind)
    return update_bench.run(settings, strict=False) | {"peak_flops": peak}


def rollout(record: Record, settings: Settings, rehearse: bool) -> None:
    """`bench rollout`: against `generate` with a static cache; a growing one if that fails."""
    found = _beside(
        record, settings, "generate", rollout_bench.run, fallback=("kept",), rehearse=rehearse
    )
    record.put(figures=found)


def _beside(
    record: Record,
    settings: Settings,
    field: str,
    run: Callable[[Settings], dict[str, Any]],
    *,
    fallback: tuple[str, ...],
    rehearse: bool,
) -> dict[str, Any]:
    """A benchmark with the baseline's best way, with one that always works, or without it.

    Args:
      field: of the settings, the baseline's ways.
    """
    missing = device.no_torch(jax.devices()[0].platform)
    if missing is not None:
        record.note(f"Only our side was measured: {missing}.")
        return run(dataclasses.replace(settings, **{field: ()}))
    if not getattr(settings, field):
        return run(settings)
    if not rehearse:  # what is measured of ours stays if the other side takes too long
        record.put(figures=run(dataclasses.replace(settings, **{field: ()})))
    try:
        return run(settings)
    except Exception as error:
        said = sentence(error)
        if getattr(settings, field) == fallback or any(word in str(error) for word in _MEMORY):
            raise
    # Outside of the handler: its traceback would hold what the first try had in memory.
    record.note(f"Not measured against {getattr(settings, field)[0]}: {said}")
    return run(dataclasses.replace(settings, **{field: fallback}))
