"""The device mesh, and the one table that says which array axis lies on which mesh axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from seeupo_jax import config

AXES = ("data", "fsdp", "expert", "tensor")
ROW_AXES = ("data", "fsdp", "expert")  # outside of the experts, their axis is one more for rows

# Logical axis -> mesh axes. Parameters and activations name logical axes only.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ROW_AXES,
    "pages": ROW_AXES,
    "prefixes": ROW_AXES,
    "microbatches": None,
    "length": None,
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "rank": None,
}
# An activation's width stays whole: its rows already use the fsdp axis.
ACTIVATION_RULES = RULES | {"embed": None}


def make_mesh(sizes: config.Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh over all devices with axes `AXES`; a size of -1 takes what the others leave.

    Raises:
      ValueError: two sizes of -1, or sizes whose product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    named = {axis: vars(sizes)[axis] for axis in AXES}
    shape = list(named.values())
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


def row_shards(mesh: jax.sharding.Mesh) -> int:
    """How many devices the rows of a batch are spread over."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def per_shard(
    f: Callable[..., jax.Array],
    inputs: Sequence[Sequence[str | None]],
    output: Sequence[str | None],
) -> Callable[..., jax.Array]:
    """`f` run on every device's own part of its arguments; `f` itself where no mesh is set.

    Rows that their devices do not divide (a few prompts to decode) are filled up with zeros, and
    the result is cut back to them.

    Args:
      f: of arrays, one an entry of `inputs`; it sees local shapes and may reduce over mesh axes.
      inputs, output: logical names of the axes of each argument and of the result, laid out as
        activations are (`embed` is whole).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return f
    sharded = jax.shard_map(
        f,
        in_specs=tuple(partition(names, ACTIVATION_RULES) for names in inputs),
        out_specs=partition(output, ACTIVATION_RULES),
        check_vma=False,
    )

    def run(*arguments: jax.Array) -> jax.Array:
        named = [(x, tuple(names)) for x, names in zip(arguments, inputs, strict=True)]
        rows = max(
            (x.shape[names.index("rows")] for x, names in named if "rows" in names), default=0
        )
        missing = -rows % row_shards(mesh)
        if not missing:
            return sharded(*arguments)
        ends = lambda names: [(0, missing if name == "rows" else 0) for name in names]  # noqa: E731
        y = sharded(*(jnp.pad(x, ends(names)) for x, names in named))
        return jax.lax.slice_in_dim(y, 0, rows, axis=tuple(output).index("rows"))

    return run
