"""Which device stands where in a mesh: neighbours innermost, slow links under the outermost axes.

Axes from the innermost outwards fill a TPU host's chips first, then the hosts of a slice (a torus);
slices, which only the data-centre network joins, lie under the outermost axes. So the devices that
share a row belong to one process wherever its chips are enough for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

ACROSS_SLICES = ("data", "fsdp")  # axes whose collectives the data-centre network may carry


@dataclass(frozen=True)
class _Place:
    """Where a chip or a host is in its torus, by the names that `mesh_utils` reads."""

    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


def arrange(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices in an array of these axes, the axis of the most traffic last.

    Args:
      sizes: of the axes, outermost first; their product is the number of devices.

    Raises:
      ValueError: several TPU slices that the sizes of `ACROSS_SLICES` cannot be spread over.
    """
    shape = tuple(sizes.values())
    by_process = sorted(devices, key=lambda device: device.process_index)  # stable
    if devices[0].platform != "tpu":
        return _array(by_process).reshape(shape)
    slices = _groups(by_process, slice_of)
    outer = _over_slices(sizes, len(slices), len(devices) // len(slices))
    return _nest(outer, [_arrange_slice(_divide(shape, outer), members) for members in slices])


def slice_of(device: jax.Device) -> int:
    """The TPU slice that a device belongs to; 0 where there is one only, and elsewhere."""
    index = getattr(device, "slice_index", None)  # absent where there is one slice only
    return index if device.platform == "tpu" and index is not None else 0


def slice_block(devices: Sequence[jax.Device]) -> int:
    """The largest n for which each n consecutive devices, cut from the first on, share a slice."""
    slices = [slice_of(device) for device in devices]
    borders = (i for i in range(1, len(slices)) if slices[i] != slices[i - 1])
    return math.gcd(len(slices), *borders)


def _over_slices(sizes: Mapping[str, int], slices: int, each: int) -> tuple[int, ...]:
    """How many parts of each axis lie in different slices."""
    remaining, parts = slices, []
    for axis, size in sizes.items():
        parts.append(math.gcd(remaining, size) if axis in ACROSS_SLICES else 1)
        remaining //= parts[-1]
    if remaining > 1:
        got = " x ".join(f"{axis}={sizes[axis]}" for axis in ACROSS_SLICES)
        inner = " x ".join(f"{a}={n}" for a, n in sizes.items() if a not in ACROSS_SLICES)
        raise ValueError(
            f"config.mesh: got {got}, which {slices} slices of {each} devices do not divide, so"
            f" that {inner} would lie across slices; allowed: {' x '.join(ACROSS_SLICES)} a"
            f" multiple of {slices}."
        )
    return tuple(parts)


def _arrange_slice(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices of one slice: hosts on their torus, and the chips of each alike within it."""
    hosts = _groups(devices, lambda device: device.process_index)
    if len({len(chips) for chips in hosts}) > 1:  # some of a pod's chips only
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    remaining, parts = len(hosts[0]), []
    for size in reversed(shape):
        parts.append(math.gcd(remaining, size))
        remaining //= parts[-1]
    inner = tuple(reversed(parts))
    corners = [_corner(chips) for chips in hosts]
    ranks = [sorted(set(axis)) for axis in zip(*corners, strict=True)]
    hosts_at = {
        tuple(rank.index(x) for rank, x in zip(ranks, corner, strict=True)): chips
        for corner, chips in zip(corners, hosts, strict=True)
    }
    host_order = _torus(_divide(shape, inner), [_Place(at, 0, "host") for at in hosts_at])
    chip_order = _torus(inner, [_within(chip, corners[0]) for chip in hosts[0]])
    blocks = []
    for host in host_order.flat:
        chips = hosts_at[host.coords]
        at = {_within(chip, _corner(chips)): chip for chip in chips}
        blocks.append(_array([at[place] for place in chip_order.flat]).reshape(inner))
    return _nest(host_order.shape, blocks)


def _corner(chips: Sequence[jax.Device]) -> tuple[int, ...]:
    return tuple(np.min([chip.coords for chip in chips], axis=0).tolist())


def _within(chip: jax.Device, corner: tuple[int, ...]) -> _Place:
    coords = tuple(x - low for x, low in zip(chip.coords, corner, strict=True))
    return _Place(coords, chip.core_on_chip, chip.device_kind)


def _torus(shape: tuple[int, ...], places: Sequence[_Place]) -> np.ndarray:
    return mesh_utils.create_device_mesh(shape, places, allow_split_physical_axes=True)


def _groups(
    devices: Sequence[jax.Device], key: Callable[[jax.Device], int]
) -> list[list[jax.Device]]:
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(key(device), []).append(device)
    return [groups[number] for number in sorted(groups)]


def _divide(shape: Sequence[int], parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(size // part for size, part in zip(shape, parts, strict=True))


def _nest(outer: Sequence[int], blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Blocks of equal shape side by side, an array of shape `outer` of them along every axis."""
    inner = blocks[0].shape
    stacked = np.stack(blocks).reshape(*outer, *inner)
    axes = [axis for i in range(len(inner)) for axis in (i, len(inner) + i)]
    shape = [a * b for a, b in zip(outer, inner, strict=True)]
    return stacked.transpose(axes).reshape(shape)


def _array(things: Sequence[Any]) -> np.ndarray:
    """A 1-D array of objects, whatever they are."""
    array = np.empty(len(things), object)
    array[:] = things
    return array
