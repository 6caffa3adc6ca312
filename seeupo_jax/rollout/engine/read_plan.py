"""How the sampler's programs read the cache."""

from __future__ import annotations

from typing import NamedTuple

from seeupo_jax.configuration import schema
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.paged import BLOCK, decode_kernel


class KVReadPlan(NamedTuple):
    """How the cache is read. kernel: in decoding; see `paged.attend`.

    block: tokens gathered at a time; None: all that a table holds, whose widths are then few sizes
      in decoding.
    """

    kernel: str = "xla"
    block: int | None = BLOCK


ANYWHERE = KVReadPlan()
# Gathered pages stay in the CPU's cache: 64 rows of 340 tokens take 7 to 9 ms a layer of
# SmolLM2-135M on two cores, where blocks of 256 take 11 to 20.
_CPU_BLOCK = 64


def choose_read_plan(arch: Architecture, rollout: schema.Rollout, platform: str) -> KVReadPlan:
    """The plan for a platform: a loop over blocks costs a GPU a round trip to the host for each.

    A CPU has one only where tables are long: with a loop a program takes longer to compile.
    """
    kernel, _ = decode_kernel(
        platform,
        head_dim=arch.cached_dim,
        page_size=rollout.page_size,
        dtype=arch.dtype,
        window=next((window for window in arch.windows if window is not None), None),
        sinks=arch.sinks,
    )
    if platform in ("cuda", "gpu", "rocm"):
        return KVReadPlan(kernel, None)
    small = platform == "cpu" and rollout.max_context > BLOCK
    return KVReadPlan(kernel, _CPU_BLOCK if small else BLOCK)
