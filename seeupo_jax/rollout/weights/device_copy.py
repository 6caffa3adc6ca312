"""The policy on other devices of the same process."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from seeupo_jax.parallel.mesh import sharding
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.weights.published_arrays import published_dtype


class DeviceCopy(NamedTuple):
    """Parameters on a sampler's mesh. bytes: of the arrays. seconds: that it took to copy them."""

    params: Any
    bytes: int
    seconds: float


def copy_to(
    params: Any, network: Network, mesh: jax.sharding.Mesh, *, int8: bool = False
) -> DeviceCopy:
    """Copies parameters to a sampler's devices, in the types that `publish` sends them in.

    Nothing of the copy is shared with `params`, and all of it is there when this returns: they may
    be donated.

    Args:
      params: the policy's, or a part of them, on the trainer's mesh.
      network: as the trainer has it.
      mesh: the sampler's. int8: whether it rounds matrices to 8 bits.
    """
    began, axes, copied = time.monotonic(), flatten_dict(network.logical_axes()), {}
    for path, x in flatten_dict(params).items():
        x = _cast(x, published_dtype(network, path, x, int8=int8))
        copied[path] = jax.device_put(x, sharding(mesh, axes[path]), may_alias=False)
    jax.block_until_ready(copied)
    size = sum(x.nbytes for x in copied.values())
    return DeviceCopy(unflatten_dict(copied), size, time.monotonic() - began)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x.astype(dtype)
