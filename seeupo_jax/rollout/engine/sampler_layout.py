"""The sampler's layout: the policy on the trainer's devices, as decoding wants it.

Decoding reads every matrix once a token. From a stack of layers it would first copy each out,
float32 matrices of a bfloat16 policy would be read at twice the size, and those that are cut over
`fsdp` would be gathered again for every token. One program before each collection settles it all.

With `int8` the layers' matrices are quantised on the way, so that a token reads half as many bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Sharding

from seeupo_jax.parallel.mesh import param_shardings, sharding
from seeupo_jax.policy.architecture import SELECTION_BIAS, Architecture
from seeupo_jax.policy.delta_net import FLOAT32
from seeupo_jax.policy.network import Network, abstract_network
from seeupo_jax.policy.projection import quantize
from seeupo_jax.rollout.engine.cache_memory import Reshard

Path = tuple[Any, ...]  # keys of a parameter in the tree


class SamplerLayout:
    """The layout of a sampler's parameters: sharding, types and stacked layers.

    Unless `int8` rounds the layers' matrices, no value changes, since every use converts to the
    compute dtype first; norms and selection biases, which compute in float32, keep their type.
    Arrays that need no change are not copied.

    Args:
      trainers: the network as the trainer has it.
      mesh: the sampler's, over the trainer's devices in their order; None is one device.

    Attributes:
      network: as the sampler has it.
    """

    def __init__(self, trainers: Network, mesh: jax.sharding.Mesh | None, *, int8: bool = False):
        self._arch, self._mesh, self._int8 = trainers.arch, mesh, int8
        self._axes = flatten_dict(trainers.logical_axes())
        arch = dataclasses.replace(trainers.arch, scan_layers=False, int8=int8)
        self.network = trainers if arch == trainers.arch else abstract_network(arch)[0]
        self._programs: dict[Any, Any] = {}

    def place(self, params: Any) -> Any:
        """The sampler's parameters; the trainer's own arrays if nothing changes."""
        if (program := self.program(params)) is None:
            return params
        function, changed = program
        unchanged = {path: x for path, x in flatten_dict(params).items() if path not in changed}
        return unflatten_dict(unchanged | function(changed))

    def program(self, params: Any) -> tuple[Any, Mapping[Path, Any]] | None:
        """The program that lays parameters out, and its argument: the parameters that change.

        Args:
          params: arrays, or shape structs with shardings.

        Returns: None if nothing changes.
        """
        changed = self._changed(params)
        if not changed:
            return None
        which = tuple(changed)
        if which not in self._programs:
            where = {
                new: place
                for path, x in changed.items()
                for new, (_, _, place) in self._made(path, x).items()
            }
            move = jax.named_scope("rollout/reshard")(self._move)
            shardings = None if self._mesh is None else where
            self._programs[which] = jax.jit(move, out_shardings=shardings)
        return self._programs[which], changed

    def shapes(self, params: Any) -> Any:
        """Shape structs of the sampler's parameters, with their shardings."""
        changed = self._changed(params)
        shapes = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for path, x in flatten_dict(params).items()
            if path not in changed
        }
        for path, x in changed.items():
            for new, (shape, dtype, place) in self._made(path, x).items():
                shapes[new] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        return unflatten_dict(shapes)

    def reshard(self, params: Any) -> Reshard:
        """The cost of laying out parameters (arrays, or shape structs with shardings).

        Received bytes exclude the scales of int8 matrices, one number per column.
        """
        changed, targets = self._changed(params), self._targets(params)
        received_D, held = [0] * (1 if self._mesh is None else self._mesh.size), 0
        for path, x in changed.items():
            target, dtype = targets[path], self._dtype(path, x)
            for shape, made, place in self._made(path, x).values():
                local = shape if place is None else place.shard_shape(shape)
                held += math.prod(local) * made.itemsize
            if target is not None:
                numbers_D = _received(x.sharding, target, x.shape)
                pairs = zip(received_D, numbers_D, strict=True)
                received_D = [have + dtype.itemsize * more for have, more in pairs]
        devices = jax.local_devices()[:1] if self._mesh is None else self._mesh.devices.flat
        here = (device.process_index == jax.process_index() for device in devices)
        local = sum(count for count, is_local in zip(received_D, here, strict=True) if is_local)
        sizes = {} if self._mesh is None else self._mesh.shape
        axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        where = axes if axes else "one device"
        return Reshard(where, held, max(received_D), local, self._int8)

    def _move(self, changed: Mapping[Path, jax.Array]) -> dict[Path, jax.Array]:
        # Convert the type first: devices then send each other the smaller type.
        moved = {}
        for path, x in changed.items():
            if self._rounded(path):
                moved[path], moved[_scale_of(path)] = quantize(x)
            else:
                moved[path] = x.astype(self._dtype(path, x))
        return {new: x[index] for path, x in moved.items() for new, index in self._parts(path)}

    def _made(self, path: Path, x: Any) -> dict[Path, tuple[tuple[int, ...], Any, Any]]:
        """The sampler's form of a parameter: shapes, types and shardings by path."""
        shape, names = tuple(x.shape), self._axes[path]
        moved = {path: (shape, names, self._dtype(path, x))}
        if self._rounded(path):  # a scale has no axis of inputs, the last but one
            scale = (*shape[:-2], shape[-1]), (*names[:-2], names[-1])
            moved[_scale_of(path)] = *scale, jax.numpy.dtype("float32")
        made = {}
        for moved_path, (shape, names, dtype) in moved.items():
            for new, index in self._parts(moved_path):
                cut = names[len(index) :]
                place = None if self._mesh is None else sharding(self._mesh, cut)
                made[new] = shape[len(index) :], dtype, place
        return made

    def _changed(self, params: Any) -> dict[Path, Any]:
        targets = self._targets(params)
        return {
            path: x
            for path, x in flatten_dict(params).items()
            if self._stacked(path)
            or x.dtype != self._dtype(path, x)
            or not (
                targets[path] is None or x.sharding.is_equivalent_to(targets[path], len(x.shape))
            )
        }

    def _targets(self, params: Any) -> dict[Path, Sharding | None]:
        """Where parameters go, stacked ones as a stack."""
        if self._mesh is None:
            return dict.fromkeys(flatten_dict(params))
        key = "config.rollout.mesh"
        axes = unflatten_dict(self._axes)
        return flatten_dict(param_shardings(self._mesh, axes, params, key))

    def _dtype(self, path: Path, x: Any) -> jax.numpy.dtype:
        return sampler_dtype(self._arch, path, x, int8=self._int8)

    def _rounded(self, path: Path) -> bool:
        return self._int8 and path[-1] == "kernel"

    def _stacked(self, path: Path) -> bool:
        return self._arch.scan_layers and path[0] == "layers"

    def _parts(self, path: Path) -> list[tuple[Path, tuple[int, ...]]]:
        """Where a parameter goes: paths, and the index of each in it."""
        if not self._stacked(path):
            return [(path, ())]
        return [(("layers", i, *path[1:]), (i,)) for i in range(self._arch.layers)]


_KEPT = ("scale", SELECTION_BIAS, *FLOAT32)  # parameters that keep their type


def sampler_dtype(
    arch: Architecture, path: Sequence[Any], x: Any, *, int8: bool
) -> jax.numpy.dtype:
    """The type in which a sampler has a parameter of the trainer's.

    Args:
      x: the parameter, or its shape struct. int8: whether matrices of layers are rounded.
    """
    if int8 and path[-1] == "kernel":
        return jax.numpy.dtype("int8")
    return jax.numpy.dtype(x.dtype if path[-1] in _KEPT else arch.dtype)


def _scale_of(path: Path) -> Path:
    return (*path[:-1], "kernel_scale")


@functools.lru_cache(maxsize=1024)
def _received(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of an array that each device of `target` lacks under `source`, in flat order."""
    held, wanted = source.devices_indices_map(shape), target.devices_indices_map(shape)

    def box(index: Any) -> list[tuple[int, int]]:
        return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]

    def common(one: Any, other: Any) -> int:
        sides = zip(box(one), box(other), strict=True)
        return math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in sides)

    return tuple(
        common(wanted[device], wanted[device])
        - (common(wanted[device], held[device]) if device in held else 0)
        for device in target.mesh.devices.flat
    )
