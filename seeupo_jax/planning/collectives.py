"""The collectives of a compiled program, read from its HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from seeupo_jax.planning.hlo import Instruction, Trips, parse

# Bytes that a device of a group of g receives, as a share of its operand's bytes. On a ring each
# part of an all-reduce goes round twice: once to be summed, once to be sent to all.
_RECEIVED: dict[str, Callable[[int], float]] = {
    "all-gather": lambda g: g - 1,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
}


# How XLA for TPU writes the part of a collective that goes between slices: the hosts send it. Its
# target begins with the slices of a group, or it is pairs of devices.
_BETWEEN_SLICES = re.compile(
    r'_xla_megascale_target="?\{([\d,]*).*?_xla_megascale_transfer_type="(\w+)"'
)
SLICES = "slices"  # stands for the mesh axes of such a part


def received(kind: str, group: int) -> float:
    """Bytes that a device of a group receives, as a share of its operand's bytes, on a ring."""
    return _RECEIVED[kind](group)


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    kind: all-gather | reduce-scatter | all-reduce | all-to-all | collective-permute.
    axes: the mesh axes that its groups run along, in the mesh's order; `SLICES` alone: it goes
      between slices, over the data-centre network.
    group: devices that these axes hold.
    bytes: that a device receives each time it runs, on a ring.
    count: how often it runs in one execution of the program.
    scope: where in the source it comes from.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: float
    count: int
    scope: str

    @property
    def total(self) -> float:
        """Bytes that a device receives in one execution of the program."""
        return self.bytes * self.count


@dataclass(frozen=True)
class Traffic:
    """All collectives of a kind along the same axes: how many run, and bytes a device receives."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: float


def collectives(
    text: str, mesh_shape: Mapping[str, int], *, unknown_trips: Trips = lambda _: 1
) -> list[Collective]:
    """Every collective of a program, with how often it runs.

    Both branches of a conditional count. A fusion of an all-reduce with the slicing of its result,
    as TPU has it, is a reduce-scatter.

    Args:
      mesh_shape: sizes of the mesh's axes by name, in its order.
    """
    module = parse(text)
    operations = []
    for computation, runs in module.runs(unknown_trips).items():
        scattered = computation.startswith("all-reduce-scatter")
        for instruction in module.computations[computation].values():
            kind, axes, group = _exchange(instruction, mesh_shape)
            if kind is None:
                continue
            kind = "reduce-scatter" if scattered and kind == "all-reduce" else kind
            size = module.operand_bytes(computation, instruction) * received(kind, group)
            scope = module.scope(computation, instruction)
            operations.append(Collective(kind, axes, group, size, runs, scope))
    return operations


def _exchange(
    instruction: Instruction, mesh_shape: Mapping[str, int]
) -> tuple[str | None, tuple[str, ...], int]:
    """The kind of a collective, its axes and the size of a group; no kind: it is no collective."""
    kind = instruction.op.removesuffix("-start")
    if kind in _RECEIVED:
        return kind, *_span(_groups(instruction.rest, mesh_shape), mesh_shape)
    between = _BETWEEN_SLICES.search(instruction.rest) if kind == "send" else None
    if between is None:
        return None, (), 0
    kind = between[2].lower().replace("_", "-")
    # One of another name moves its operand once from device to device, as a permutation does.
    return (
        kind if kind in _RECEIVED else "collective-permute",
        (SLICES,),
        len(between[1].split(",")) if between[1] else 2,
    )


def by_kind_and_axis(operations: Sequence[Collective]) -> list[Traffic]:
    """The collectives' sums by kind and axes, most bytes first."""
    same: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for each in operations:
        same.setdefault((each.kind, each.axes), []).append(each)
    rows = [
        Traffic(*key, sum(c.count for c in group), sum(c.total for c in group))
        for key, group in same.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _iota(text: str) -> np.ndarray:
    """The numbers that a list like `[4,2]T(1,0)` stands for, in the shape before its last step."""
    dims, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    shape = [int(dim) for dim in dims.split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers if order is None else numbers.transpose([int(i) for i in order.split(",")])


def _groups(rest: str, mesh_shape: Mapping[str, int]) -> np.ndarray:
    """Devices that exchange data, a row per group: partition numbers, in the mesh's order."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
    listed = pairs or re.search(r"replica_groups=\{(.+?)\}\}", rest)
    if listed:
        rows = re.findall(r"\{([\d,]+)", listed[1])
        return np.array([[int(number) for number in row.split(",")] for row in rows])
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest)
    if counted:
        return _iota(counted[3]).reshape(int(counted[1]), int(counted[2]))
    named = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\]\S*?)\))? \{(.*?)\}", rest
    )
    if named:
        return _named_groups(*named.groups())
    return np.arange(math.prod(mesh_shape.values()))[None]  # `{}`: all devices


def _named_groups(axes: str, order: str | None, spanned: str) -> np.ndarray:
    """Groups along some axes of a mesh that the compiler names; `'a':(2)4` is a part of an axis."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    split: list[tuple[int, bool]] = []
    parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", spanned)
    for name, size in sizes.items():
        merged_size = 1
        for _, offset, part in sorted(p for p in parts if p[0] == name):
            start, width = (int(offset), int(part)) if part else (1, size)
            split += [(start // merged_size, False), (width, True)]
            merged_size = start * width
        split.append((size // merged_size, False))
    total = math.prod(sizes.values())
    devices = np.arange(total) if order is None else _iota(order)
    inside = [i for i, (_, member) in enumerate(split) if member]
    outside = [i for i, (_, member) in enumerate(split) if not member]
    members = math.prod(split[i][0] for i in inside)
    grid = devices.reshape([size for size, _ in split]).transpose(outside + inside)
    return grid.reshape(-1, members)


def _span(groups: np.ndarray, mesh_shape: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which devices of one group differ, and the size of a group."""
    places = np.unravel_index(groups, tuple(mesh_shape.values()))
    axes = tuple(
        axis
        for axis, place in zip(mesh_shape, places, strict=True)
        if (place != place[:, :1]).any()
    )
    return axes, groups.shape[1]
