"""The arrays of a state: what they are called, what they are, and where they go when loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, so that what is on disk does not depend on classes of containers."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
    assert len(leaves) == len(paths), "two leaves have the same path"
    return leaves


def describe(leaf: Any) -> str:
    """A leaf's dtype and shape."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding to load a leaf with; the default is this process's device."""
    sharding = leaf.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def commit_like(example: Any, leaf: jax.Array) -> jax.Array:
    """The leaf, uncommitted where the example is.

    Orbax commits what it loads: a step count committed to one device cannot enter a program
    together with parameters on a mesh, where a fresh one can.
    """
    if not isinstance(example, jax.Array) or example.committed:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def check_leaves(
    step: int, saved: Mapping[str, str], wanted: Mapping[str, Any], partial: bool
) -> None:
    """Compares what was saved with what is wanted.

    Args:
      partial: whether whole parts of the state may be left out, such as the optimizer's.

    Raises:
      ValueError: the checkpoint is of another model or optimizer.
    """
    parts = {name.partition("/")[0] for name in (wanted if partial else saved)}
    extra = [n for n in saved if n not in wanted and n.partition("/")[0] in parts]
    for name in [*wanted, *extra]:
        there = saved[name] if name in saved else "missing"
        here = describe(wanted[name]) if name in wanted else "missing"
        if there != here:
            raise ValueError(
                f"checkpoint {step} is of another model or optimizer: {name} is {there} in it and"
                f" {here} in this run; allowed: the configuration it was saved with, or a new"
                " workdir."
            )
