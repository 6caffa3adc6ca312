"""The largest batch and cache that a device holds."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping

from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.parallel.mesh import row_shards
from seeupo_jax.planning.abstract_run import CACHE
from seeupo_jax.planning.aot.measure import CompiledFigures, measure
from seeupo_jax.planning.chips import usable_hbm
from seeupo_jax.planning.slices.slice_programs import Setup, choose_programs, list_programs, prepare


def search(setup: Setup, figures: Mapping[str, CompiledFigures]) -> dict[str, float | None]:
    """The largest `batching.microbatch_tokens` and `rollout.cache_gib` that fit.

    Rows double from the length of a conversation on, up to an iteration's tokens; about the
    logarithm of how many such sizes there are is compiled. The cache takes what the measured
    programs leave.

    Args:
      figures: of the configuration's own programs, by kind.

    Returns: by field; None where not even the smallest fits.
    """
    largest: dict[str, float | None] = {"batching.microbatch_tokens": _most_tokens(setup)}
    rollout = [f for kind, f in figures.items() if kind.startswith("rollout/")]
    if any(map(_holds_cache, rollout)) and all(each.error is None for each in rollout):
        largest["rollout.cache_gib"] = _most_cache(setup, figures)
    return largest


def _most_tokens(setup: Setup) -> int | None:
    least = setup.config.rollout.max_context
    sizes = [
        least * 2**i for i in range((setup.trajectories // row_shards(setup.mesh)).bit_length())
    ]
    # The first that does not fit; keys of `bisect` are compiled only where it looks.
    first = bisect.bisect_left(sizes, True, key=lambda tokens: not _tokens_fit(setup, tokens))
    return sizes[first - 1] if first else None


def _tokens_fit(setup: Setup, tokens: int) -> bool:
    batching = dataclasses.replace(setup.given.batching, microbatch_tokens=tokens, buckets=())
    other = prepare(dataclasses.replace(setup.given, batching=batching), setup.topology)
    (step,) = choose_programs(list_programs(other), ["sweep/turn"])
    return fits(other, measure(other, step))


def _most_cache(setup: Setup, figures: Mapping[str, CompiledFigures]) -> float | None:
    """The largest cache, GiB, that fits with every program that runs while there is one."""
    plan = setup.engine.plan
    sizes = [each.peak for each in figures.values() if each.error is None and _holds_cache(each)]
    room = usable_hbm(setup.mesh.devices.flat[0]) - max(sizes) + plan.bytes
    page = plan.page_size * plan.token_bytes
    most = min(room, plan.concurrency * plan.row_pages * page)
    return None if most < plan.row_pages * page else int(1000 * most / GIB) / 1000


def _holds_cache(figures: CompiledFigures) -> bool:
    return CACHE in {**(figures.inside or {}), **(figures.beside or {})}


def fits(setup: Setup, figures: CompiledFigures) -> bool:
    """Whether the program and the other memory of a device fit in the memory of programs."""
    return figures.error is None and figures.peak <= usable_hbm(setup.mesh.devices.flat[0])
