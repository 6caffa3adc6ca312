"""How the sampler's programs read the cache."""

from __future__ import annotations

from typing import NamedTuple

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


def choose_read_plan(arch: Architecture, page_size: int, platform: str) -> KVReadPlan:
    """What suits a platform: a loop over blocks costs a GPU a round trip to the host for each."""
    kernel, _ = decode_kernel(
        platform,
        head_dim=arch.head_dim,
        page_size=page_size,
        dtype=arch.dtype,
        window=next((window for window in arch.windows if window is not None), None),
    )
    return KVReadPlan(kernel, None if platform in ("cuda", "gpu", "rocm") else BLOCK)
