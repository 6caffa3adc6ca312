"""The device mesh, and the one table that says which array axis lies on which mesh axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from seeupo_jax import config

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. Parameters and activations name logical axes only.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ("data", "fsdp"),
    "microbatches": None,
    "length": None,
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
}
# An activation's width stays whole: its rows already use the fsdp axis.
ACTIVATION_RULES = RULES | {"embed": None}


def make_mesh(sizes: config.Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh over all devices with axes `AXES`; a size of -1 takes what the others leave.

    Raises:
      ValueError: two sizes of -1, or sizes whose product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = [sizes.data, sizes.fsdp, sizes.tensor]
    named = dict(zip(AXES, shape, strict=True))
    known = math.prod(size for size in shape if size != -1)
    if shape.count(-1) > 1:
        raise ValueError(f"config.mesh: got {named}; allowed: -1 at one axis at most.")
    if len(devices) % known or (-1 not in shape and known != len(devices)):
        raise ValueError(
            f"config.mesh: got {named}, a product of {known}; allowed: a product of"
            f" {len(devices)}, the devices here, or -1 at one axis, which takes what is left."
        )
    shape = [len(devices) // known if size == -1 else size for size in shape]
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=auto, devices=list(devices))


def partition(logical: Sequence[str | None], rules: dict[str, Any] = RULES) -> PartitionSpec:
    """The partition of an array whose axes have these logical names."""
    return PartitionSpec(*(None if name is None else rules[name] for name in logical))


def sharding(mesh: jax.sharding.Mesh, logical: Sequence[str | None]) -> NamedSharding:
    """Where an array with these logical axes lives on the mesh."""
    return NamedSharding(mesh, partition(logical))


def param_shardings(mesh: jax.sharding.Mesh, logical_axes: Any, shapes: Any) -> Any:
    """Shardings of a parameter tree.

    Args:
      logical_axes: tree of tuples of logical names, shaped as the parameters.
      shapes: tree of arrays or shape structs, to check that every sharded axis divides.

    Raises:
      ValueError: an axis that its mesh axis does not divide, with the arithmetic.
    """

    def place(path: Any, logical: tuple[str, ...], leaf: Any) -> NamedSharding:
        spec = partition(logical)
        for name, axis, size in zip(logical, spec, leaf.shape, strict=True):
            parts = 1 if axis is None else mesh.shape[axis]
            if size % parts:
                raise ValueError(
                    f"config.mesh: {jax.tree_util.keystr(path)} has {name}={size}, which mesh axis"
                    f" {axis}={parts} does not divide; allowed: a divisor of {size}."
                )
        return NamedSharding(mesh, spec)

    is_leaf = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree_util.tree_map_with_path(place, logical_axes, shapes, is_leaf=is_leaf)


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Pins an activation's layout inside a program; does nothing where no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(logical, ACTIVATION_RULES))
