"""The device mesh, and the one table that says which array axis lies on which mesh axis."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.devices import arrange, slice_block

_LOGGER = logging.getLogger(__name__)

AXES = ("data", "fsdp", "expert", "context", "tensor")  # outermost first, most traffic last
ROW_AXES = ("data", "fsdp", "expert")  # outside of the experts, their axis is one more for rows

# Logical axis -> mesh axes. Parameters and activations name logical axes only.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ROW_AXES,
    "pages": ROW_AXES,
    "prefixes": ROW_AXES,
    "microbatches": None,
    "length": "context",  # of whole rows; keys and values are gathered over it
    "blocks": "context",  # of a row's queries
    "layers": None,
    "vocab": "tensor",
    "embed": ("fsdp", "context"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "rank": None,
    "adapters": None,
}
# An activation's width stays whole: its rows already use the fsdp axis.
ACTIVATION_RULES = RULES | {"embed": None}


def make_mesh(
    sizes: schema.Mesh, devices: Sequence[jax.Device] | None = None, key: str = "config.mesh"
) -> jax.sharding.Mesh:
    """A mesh over all devices with axes `AXES`; a size of -1 takes what the others leave.

    `parallel.devices` says which device comes where. `key` names the sizes in messages.

    Raises:
      ValueError: two sizes of -1, sizes whose product is not the number of devices, or TPU slices
        that data x fsdp cannot be spread over.
    """
    devices = jax.devices() if devices is None else devices
    resolved = _whole_sizes(sizes, len(devices), key)
    return _mesh(arrange(resolved, devices))


def training_mesh(config: schema.Config) -> jax.sharding.Mesh:
    """The mesh that a run trains on: all devices but those of `config.rollout.devices`.

    Raises:
      ValueError: as `make_mesh`, or no device is left to train, or there are several processes.
    """
    return make_mesh(config.mesh, _split_devices(config.rollout.devices)[0])


def samplers_own_mesh(
    config: schema.Config, training: jax.sharding.Mesh
) -> jax.sharding.Mesh | None:
    """The mesh of the devices that only sample; None: there are none.

    Its axes are those of `config.rollout.mesh`, else the trainer's where it has as many devices,
    else each device has a whole copy of the policy.
    """
    devices = _split_devices(config.rollout.devices)[1]
    if not devices:
        return None
    sizes = config.rollout.mesh
    if sizes is None:
        same = len(devices) == training.size
        sizes = schema.Mesh(**training.shape) if same else schema.Mesh()
    return make_mesh(sizes, devices, "config.rollout.mesh")


def _split_devices(sampling: int) -> tuple[Sequence[jax.Device], Sequence[jax.Device]]:
    """The devices that train, and those that only sample: so many of the last ones."""
    devices = jax.devices()
    if sampling and jax.process_count() > 1:
        raise ValueError(
            f"config.rollout.devices: got {sampling} with {jax.process_count()} processes; allowed:"
            " 0, since these train as one: processes of their own sample, with --role=rollout"
            " (config.rollout.port)."
        )
    if sampling >= len(devices):
        raise ValueError(
            f"config.rollout.devices: got {sampling}; allowed: a number from 0 to"
            f" {len(devices) - 1}, since at least one of the {len(devices)} devices here has to"
            " train."
        )
    training = len(devices) - sampling
    return devices[:training], devices[training:]


def sampler_mesh(training: jax.sharding.Mesh, sizes: schema.Mesh | None) -> jax.sharding.Mesh:
    """The sampler's layout of the trainer's devices, which one program can share with it.

    Its devices are in the same order, read row by row. Only `data` lies across TPU slices: a decode
    step communicates along every other axis, and between slices is only the data-centre network.

    Args:
      sizes: `config.rollout.mesh`; None: the trainer's, with `context` as a part of `data`, since
        a few new tokens per row are nothing to cut, and with the part of `fsdp` that lies across
        slices as a part of `data`.

    Raises:
      ValueError: sizes that do not fit the devices, a `context` above 1, or another axis than
        `data` across slices.
    """
    block = slice_block(list(training.devices.flat))
    if sizes is None:
        shape = dict(training.shape)
        shape["data"] *= shape["context"]
        shape["context"] = 1
        within = math.gcd(shape["fsdp"], block // (shape["expert"] * shape["tensor"]))
        if within < shape["fsdp"]:
            _log_fsdp_within_slices(shape["fsdp"], within)
        shape["data"] *= shape["fsdp"] // within
        shape["fsdp"] = within
    else:
        shape = _whole_sizes(sizes, training.size, "config.rollout.mesh")
    if shape["context"] > 1:
        raise ValueError(
            f"config.rollout.mesh.context: got {shape['context']}; allowed: 1, since a decode pass"
            " has one new token per row."
        )
    inner = [axis for axis in AXES[1:] if axis != "context"]
    replica = math.prod(shape[axis] for axis in inner)
    if block % replica:
        got = " x ".join(f"{axis}={shape[axis]}" for axis in inner)
        raise ValueError(
            f"config.rollout.mesh: got {got}, a product of {replica} that lies across slices, so"
            " that every decode step would communicate over the data-centre network; allowed: a"
            f" product that divides {block}, and `data` for the rest."
        )
    return _mesh(training.devices.reshape(tuple(shape.values())))


@functools.cache
def _log_fsdp_within_slices(fsdp: int, within: int) -> None:
    _LOGGER.info(
        "The sampler has fsdp=%d instead of the trainer's %d, and more data: fsdp lies across TPU"
        " slices, and a decode step does not communicate between them.",
        within,
        fsdp,
    )


def _whole_sizes(sizes: schema.Mesh, devices: int, key: str) -> dict[str, int]:
    """The sizes of all axes, -1 replaced; `key` names them in messages."""
    named = {axis: vars(sizes)[axis] for axis in AXES}
    product = math.prod(size for size in named.values() if size != -1)
    free = [axis for axis, size in named.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"{key}: got {named}; allowed: -1 at one axis at most.")
    if devices % product or (not free and product != devices):
        raise ValueError(
            f"{key}: got {named}, a product of {product}; allowed: a product of {devices}, the"
            " devices here, or -1 at one axis, which takes the remaining ones."
        )
    return named | dict.fromkeys(free, devices // product)


def _mesh(devices: np.ndarray) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_lengths(mesh: jax.sharding.Mesh, lengths: Sequence[int]) -> None:
    """ValueError with the row lengths that cannot be cut evenly over `context`."""
    parts = mesh.shape["context"]
    wrong = [length for length in lengths if length % parts]
    if wrong:
        raise ValueError(
            f"config.mesh.context: got {parts}, which does not divide the row lengths"
            f" {', '.join(map(str, wrong))}; allowed: a divisor of every length in"
            " config.batching.buckets, or without them of an eighth of"
            " config.batching.microbatch_tokens or of config.rollout.max_context, the larger one."
        )


def partition(logical: Sequence[str | None], rules: dict[str, Any] = RULES) -> PartitionSpec:
    """The partition of an array whose axes have these logical names."""
    return PartitionSpec(*(None if name is None else rules[name] for name in logical))


def sharding(mesh: jax.sharding.Mesh, logical: Sequence[str | None]) -> NamedSharding:
    """Where an array with these logical axes lives on the mesh."""
    return NamedSharding(mesh, partition(logical))


def param_shardings(
    mesh: jax.sharding.Mesh, logical_axes: Any, shapes: Any, key: str = "config.mesh"
) -> Any:
    """Shardings of a parameter tree.

    Args:
      logical_axes: tree of tuples of logical names, shaped as the parameters.
      shapes: tree of arrays or shape structs, to check that every sharded axis divides.
      key: the field that the mesh is of.

    Raises:
      ValueError: an axis that its mesh axis does not divide, with the arithmetic.
    """

    def place(path: Any, logical: tuple[str, ...], leaf: Any) -> NamedSharding:
        spec = partition(logical)
        for name, axis, size in zip(logical, spec, leaf.shape, strict=True):
            cut = _cut(mesh.shape, axis)
            if size % math.prod(cut.values()):
                sizes = " x ".join(f"{axis}={n}" for axis, n in cut.items())
                raise ValueError(
                    f"{key}: {jax.tree_util.keystr(path)} has {name}={size}, which mesh axis"
                    f" {sizes} does not divide; allowed: a divisor of {size}."
                )
        return NamedSharding(mesh, spec)

    def is_leaf(node: Any) -> bool:
        return isinstance(node, tuple)

    return jax.tree_util.tree_map_with_path(place, logical_axes, shapes, is_leaf=is_leaf)


def _cut(shape: Mapping[str, int], axis: str | tuple[str, ...] | None) -> dict[str, int]:
    """The mesh axes above 1 among those of one array axis, with their sizes."""
    axes = () if axis is None else (axis,) if isinstance(axis, str) else axis
    return {axis: shape[axis] for axis in axes if shape[axis] > 1}


def axis_parts(name: str) -> int:
    """Into how many parts the mesh in force cuts an activation's axis; 1 where none is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(_cut(mesh.shape, ACTIVATION_RULES[name]).values())


def kv_copies(heads: int, kv_heads: int, tensor: int) -> int:
    """How many of `tensor` devices hold the same key-value head, each for query heads of its own.

    Above 1 where there are more devices than key-value heads and the numbers divide evenly. 1 also
    where they do not divide: then every device holds all heads (`head_axes`).
    """
    shared = heads % tensor == 0 and tensor % kv_heads == 0
    return max(1, tensor // kv_heads) if shared else 1


def kv_heads_of_device(heads: int, kv_heads: int, tensor: int) -> int:
    """Key-value heads that each of the devices holds; all of them where they do not divide."""
    copied = kv_heads * kv_copies(heads, kv_heads, tensor)
    return copied // tensor if copied % tensor == 0 else kv_heads


def repeat_kv_heads(x_NLKd: jax.Array, heads: int) -> jax.Array:
    """Keys or values with a head for every device of the tensor axis, where those are more.

    A device's queries then find their key-value head beside them. The gradients of a head's copies
    are summed.

    Args:
      x_NLKd: [N, L, kv_heads, head_dim].
      heads: of the queries.

    Returns: [N, L, kv_heads * copies, head_dim]; the argument where one copy is enough.
    """
    copies = kv_copies(heads, x_NLKd.shape[2], axis_parts("kv_heads"))
    if copies == 1:
        return x_NLKd
    return constrain(jnp.repeat(x_NLKd, copies, axis=2), "rows", "length", "kv_heads", "head_dim")


def head_axes(kv_heads: int) -> tuple[str | None, str | None]:
    """Logical axes of key-value heads and of heads; whole on every device where they do not divide.

    Devices of the tensor axis then do the same work, as nothing smaller than a head can be split:
    a warning says so once.

    Args:
      kv_heads: of the keys and values at hand, with the copies of `repeat_kv_heads`.
    """
    parts = axis_parts("kv_heads")
    if kv_heads % parts == 0:
        return "kv_heads", "heads"
    _warn_of_whole_heads(kv_heads, parts)
    return None, None


@functools.cache
def _warn_of_whole_heads(kv_heads: int, parts: int) -> None:
    _LOGGER.warning(
        "Each of the %d devices along mesh axis %s computes the attention of all heads: the heads,"
        " %d of them for keys and values, do not divide evenly.",
        parts,
        RULES["kv_heads"],
        kv_heads,
    )


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Pins an activation's layout inside a program; does nothing where no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(logical, ACTIVATION_RULES))


def row_shards(mesh: jax.sharding.Mesh) -> int:
    """How many devices the rows of a batch are sharded over."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def per_shard(
    f: Callable[..., Any],
    inputs: Sequence[Sequence[str | None]],
    output: Sequence[str | None],
) -> Callable[..., Any]:
    """`f` run on every device's own part of its arguments; `f` itself where no mesh is set.

    Rows that their devices do not divide (a few prompts to decode) are filled up with zeros, and
    the result is cut back to them; so are lengths.

    Args:
      f: of arrays, one an entry of `inputs`; it sees local shapes and may reduce over mesh axes.
      inputs, output: logical names of the axes of each argument and of the result (of every array
        in it), laid out as activations are (`embed` is whole).
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

    def run(*arguments: jax.Array) -> Any:
        sizes = {
            name: size
            for x, names in zip(arguments, inputs, strict=True)
            for name, size in zip(names, x.shape, strict=True)
            if name in ("rows", "length")
        }
        missing = {name: -size % axis_parts(name) for name, size in sizes.items()}
        if not any(missing.values()):
            return sharded(*arguments)
        filled = (
            jnp.pad(x, [(0, missing.get(name, 0)) for name in names])
            for x, names in zip(arguments, inputs, strict=True)
        )
        kept = tuple(slice(sizes.get(name)) for name in output)
        return jax.tree.map(lambda y: y[kept], sharded(*filled))

    return run
