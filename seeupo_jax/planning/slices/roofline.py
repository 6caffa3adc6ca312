"""The time of a program at the peak rates of its chips, and at the rates of published runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from seeupo_jax.planning.chips import CUBE, Chip
from seeupo_jax.planning.collectives import SLICES, Collective

_FLAT_TORUS = 16  # the side of a flat slice that is closed to a ring; shorter ones are lines


@dataclass(frozen=True)
class Roofline:
    """An estimate, in seconds, of one execution of a program.

    compute_s, memory_s, network_s: of each alone. bound: the longest of them, by name.
    step_s: with all of it overlapping. serial_s: with none.
    published_s: at published efficiency.
    """

    compute_s: float
    memory_s: float
    network_s: float
    bound: str
    step_s: float
    serial_s: float
    published_s: float


def estimate(
    flops: float,
    hbm_bytes: float,
    collectives: Sequence[Collective],
    chip: Chip,
    axes: Mapping[str, float],
) -> Roofline:
    """An estimate of one execution of a program; nothing of it is measured.

    At best, matrix units run at their peak, memory and links are used at their whole bandwidth,
    collectives run one after the other as rings without latency, and one along several axes uses
    the links of all of them. A real step takes longer than `step_s`; `serial_s` bounds only what
    these assumptions leave in.

    At published efficiency, matrix units and memory run at the chip's shares of their peaks.
    Published MFU is of whole steps, so it contains the communication that they do not hide; where
    `serial_s` is longer, as of a program bound by the network, `serial_s` counts. The share is
    applied to all executed FLOPs, the cautious reading: MFU counts the model's alone, and published
    runs recompute activations too (MaxText's little on v5p, more on v5e and v6e).

    Args:
      flops, hbm_bytes: FLOPs of one device, and bytes that it moves to and from its memory.
      axes: links of each mesh axis, by `axis_links`.
    """
    share = 1 / chip.devices  # of the chip that a device is
    seconds = {
        "compute": flops / (chip.peak_flops * share),
        "memory": hbm_bytes / (chip.hbm_bandwidth * share),
        "network": sum(c.total / (_bandwidth(c.axes, chip, axes) * share) for c in collectives),
    }
    bound = max(seconds, key=lambda name: seconds[name])
    serial_s = sum(seconds.values())
    compute_s = seconds["compute"] / chip.compute_efficiency
    memory_s = seconds["memory"] / chip.memory_efficiency
    published_s = max(compute_s, memory_s, serial_s)
    return Roofline(*seconds.values(), bound, seconds[bound], serial_s, published_s)


def _bandwidth(along: Sequence[str], chip: Chip, axes: Mapping[str, float]) -> float:
    """Bytes per second that a chip receives from the others of its group."""
    if SLICES in along or not all(axes[axis] for axis in along):
        return chip.dcn_bandwidth
    every = 2 * chip.dims
    links = min(every, sum(axes[axis] for axis in along)) if along else every
    return chip.ici_bandwidth * links / every


def axis_links(mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Over how many links a chip receives while all groups along one mesh axis exchange data.

    Along each dimension of the torus that the axis runs through it is two where its chips close a
    ring and one where they are a line, divided by the groups that lie between each other's chips.
    An axis between the cores of a chip has all links: its data stays inside. One between slices has
    0: the data centre network. Axes of size 1 are left out.

    Args:
      mesh: of TPU devices, or of one device.
    """
    if mesh.devices.size == 1:
        return {}
    first = mesh.devices.flat[0]
    flat = "lite" in first.device_kind
    place = np.array([[*d.coords, _slice(d)] for d in mesh.devices.flat])
    sides = place.max(axis=0)[:3] + 1
    place = place.reshape(*mesh.devices.shape, -1)
    links = {}
    for index, (axis, size) in enumerate(mesh.shape.items()):
        if size == 1:
            continue
        line = np.moveaxis(place, index, 0).reshape(size, -1, place.shape[-1])[:, 0]
        *torus, slices = (np.unique(line[:, d]) for d in range(line.shape[-1]))
        count = sum(_links(at, side, flat) for at, side in zip(torus, sides, strict=True))
        links[axis] = 0.0 if slices.size > 1 else count if count else 2.0 * (2 if flat else 3)
    return links


def _links(at: np.ndarray, side: int, flat: bool) -> float:
    """Links of a chip to the others `at` these places of a torus's dimension."""
    if at.size == 1:
        return 0.0
    stride = int(np.diff(at).min())
    closed = side == _FLAT_TORUS if flat else side % CUBE == 0
    return (2 if closed and at.size * stride == side else 1) / stride


def _slice(device: jax.Device) -> int:
    return device.slice_index if hasattr(device, "slice_index") else 0
