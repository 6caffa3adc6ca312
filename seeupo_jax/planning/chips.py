"""TPU chips and the slices that they come in, as their vendor publishes them."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from seeupo_jax.parallel.device_memory import GIB

GB = 10**9


@dataclass(frozen=True)
class Chip:
    """One generation of TPU; figures per chip.

    hbm_bytes: its memory. peak_flops: bfloat16 FLOP/s. hbm_bandwidth: bytes/s.
    ici_bandwidth: bytes/s that it receives from its neighbours over all links together.
    dcn_bandwidth: its share of the host's network, bytes/s.
    chips_per_host: of a slice of several hosts, as the compiler lays it out.
    devices: that jax shows for it.
    dims: dimensions of the torus. largest: chips of the largest slice.
    compute_efficiency: share of `peak_flops` that published training runs reach (MFU).
    memory_efficiency: share of `hbm_bandwidth` that programs bound by memory are assumed to reach.
      Both are 1 where the peaks were themselves measured.
    """

    name: str
    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float
    chips_per_host: int
    devices: int
    dims: int
    largest: int
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0


# Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)",
# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, as of 2026. They give the interconnect in
# both directions (v5e 400, v5p 1200, v6e 800, tpu7x 1200 GB/s); half of it is one direction. For
# v4 they give none: 50 GB/s a link, six links (Jouppi et al., arXiv:2304.01433). The data centre
# network: per chip for v5p, v6e and tpu7x; v5e's 6.4 Tb/s a pod of 256; v4's is not published,
# taken as v5p's. Where pages differ (v5e 800 or 819, v6e 1600 or 1638 GB/s) the later one counts.
# Efficiency: MFU of dense models as MaxText publishes it (github.com/AI-Hypercomputer/maxtext,
# August 2026: src/maxtext/configs/tpu/{v4,v5e,v5p}/README.md, docs/reference/models/tiering.md):
# v4 53 to 59%, v5e 46 to 67%, v5p 52 to 71% (on one slice of up to 512B parameters, 64 to 71%),
# v6e 39 to 50%. Here is what a well-tuned run reaches, not the best of them. For tpu7x none was
# found: v6e's. For decoding none was found for any TPU: 60% of the bandwidth is an assumption.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 32 * GIB, 275e12, 1200 * GB, 300 * GB, 6.25 * GB, 4, 1, 3, 4096, 0.55, 0.6),
        Chip("v5e", 16 * GIB, 197e12, 800 * GB, 200 * GB, 3.125 * GB, 4, 1, 2, 256, 0.6, 0.6),
        Chip("v5p", 95 * GIB, 459e12, 2765 * GB, 600 * GB, 6.25 * GB, 4, 1, 3, 6144, 0.6, 0.6),
        Chip("v6e", 32 * GIB, 918e12, 1638 * GB, 400 * GB, 12.5 * GB, 4, 1, 2, 256, 0.45, 0.6),
        Chip("tpu7x", 192 * GIB, 2307e12, 7380 * GB, 600 * GB, 12.5 * GB, 4, 2, 3, 9216, 0.45, 0.6),
    )
}
# Slices of chips with a flat torus; those with a deep one are small, or made of cubes.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
CUBE = 4  # chips along each side
# Accelerator types of gcloud, and what their number counts a chip: TensorCores up to v5p, chips
# from v5e on.
_TYPES = {"v4": ("v4", 2), "v5p": ("v5p", 2), "v5e": ("v5e", 1), "v5litepod": ("v5e", 1)}
_TYPES |= {"v6e": ("v6e", 1)}
_TOO_LARGE = 2**40  # bytes that no device has
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Without these libtpu asks the cloud which TPUs are here, and lets one process at a time load it.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Topology:
    """Equal slices of one kind of chip; `slices` of them, joined by the data centre network."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        """The text that `parse_topology` reads."""
        several = f"*{self.slices}" if self.slices > 1 else ""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}{several}"

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return -(-math.prod(self.shape) // self.chip.chips_per_host) * self.slices

    @property
    def devices(self) -> int:
        """Devices that jax shows for all slices."""
        return self.chips * self.chip.devices


def parse_topology(name: str) -> Topology:
    """Slices by name: several of them as `v5e:16x16*2`.

    Args:
      name: the chip and its shape, `v5p:4x4x4`, or an accelerator type of gcloud, `v5p-128`, whose
        default shape is meant.

    Raises:
      ValueError: an unknown chip, or a shape or size that it does not come in.
    """
    match = re.fullmatch(r"(\w+)(?::(\d+(?:x\d+)*)|-(\d{1,9}))(?:\*([1-9]\d*))?", name)
    kinds = CHIPS if match is None or match[3] is None else _TYPES
    if match is None or match[1] not in kinds:
        raise ValueError(
            f"--topology: got {name!r}; allowed: CHIP:SHAPE as in v5p:4x4x4 with a chip of"
            f" {', '.join(CHIPS)}, or an accelerator type of gcloud as in v5p-128, of"
            f" {', '.join(_TYPES)}; either with *SLICES behind it."
        )
    slices = int(match[4] or 1)
    if match[3] is not None:
        chip, shape = _of_type(name, match[1], int(match[3]))
        return Topology(chip, shape, slices)
    chip = CHIPS[match[1]]
    shape = tuple(int(side) for side in match[2].split("x"))
    exists = shape in (_FLAT if chip.dims == 2 else _SMALL) or _of_cubes(chip, shape)
    if not exists:
        raise ValueError(f"--topology: got {name!r}; allowed for {chip.name}: {_allowed(chip)}.")
    return Topology(chip, shape, slices)


def _of_type(name: str, kind: str, count: int) -> tuple[Chip, tuple[int, ...]]:
    """The chip of an accelerator type, and its default shape for a number of them."""
    chip, cores = CHIPS[_TYPES[kind][0]], _TYPES[kind][1]
    chips, rest = divmod(count, cores)
    listed = {math.prod(shape): shape for shape in (_FLAT if chip.dims == 2 else _SMALL[1:])}
    cubes, part = divmod(chips, CUBE**chip.dims)
    if not rest and chips in listed:
        return chip, listed[chips]
    if not rest and chip.dims == 3 and cubes and not part and chips <= chip.largest:
        return chip, _compact(cubes)
    sizes = ", ".join(f"{kind}-{size * cores}" for size in listed)
    if chip.dims == 3:
        sizes += f", or multiples of {CUBE**3 * cores} up to {kind}-{chip.largest * cores}"
    what = "chips" if cores == 1 else f"TensorCores, {cores} a chip"
    raise ValueError(f"--topology: got {name!r}; allowed: {sizes} (a number of {what}).")


def _compact(cubes: int) -> tuple[int, ...]:
    """The shape of so many cubes whose sides are shortest together, rising."""
    sides = range(1, cubes + 1)
    shapes = (
        (a, b, cubes // (a * b)) for a in sides for b in sides[a - 1 :] if cubes % (a * b) == 0
    )
    best = min((each for each in shapes if each == tuple(sorted(each))), key=sum)
    return tuple(CUBE * side for side in best)


def _of_cubes(chip: Chip, shape: tuple[int, ...]) -> bool:
    cubes = all(side >= CUBE and side % CUBE == 0 for side in shape)
    rising = list(shape) == sorted(shape)
    return len(shape) == chip.dims == 3 and cubes and rising and math.prod(shape) <= chip.largest


def _allowed(chip: Chip) -> str:
    listed = ", ".join("x".join(map(str, s)) for s in (_FLAT if chip.dims == 2 else _SMALL))
    if chip.dims == 2:
        return listed
    return (
        f"{listed}, or three rising multiples of {CUBE} with at most {chip.largest} chips, as 4x4x4"
    )


def topology_devices(topology: Topology) -> list[jax.Device]:
    """The devices of slices that need not exist, to compile for.

    Sets the variables of the environment that keep libtpu from looking for TPUs here, where they
    are not set; a process that has done this is not one to use this machine's own TPUs.

    Raises:
      ValueError: libtpu is not installed, or refuses the topology.
    """
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    options: dict[str, object] = {}
    if math.prod(topology.shape) == 1:  # less than the four chips of a host
        options["chips_per_host_bounds"] = (1, 1, 1)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.chip.name == "v4":  # its two cores as one device, as jax shows those that are here
        options["chip_config_name"] = "megacore"
    one = f"{topology.chip.name}:{'x'.join(map(str, topology.shape))}"
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=one, **options)
    except RuntimeError as error:
        raise ValueError(_why_not(topology, error)) from error
    return list(description.devices)


def _why_not(topology: Topology, error: Exception) -> str:
    if "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None:
        return (
            "--topology: compiling for TPU needs libtpu, which is not here; allowed:"
            " TPU_LIBRARY_PATH, the libtpu.so that third_party/libtpu/setup.sh fetches, or pip"
            " install 'jax[tpu]'."
        )
    reason = str(error).partition("\n")[0].rstrip(".")
    return f"--topology: libtpu does not make {topology}: {reason}."


@functools.cache
def usable_hbm(device: jax.Device) -> int:
    """Bytes that the compiler lets a program use, from its error for one that needs more."""
    where = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((_TOO_LARGE,), jnp.int8, sharding=where)
    try:
        jax.jit(lambda x: x + 1).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        match = re.search(r"available HBM \(([\d.]+)([KMGT]?)\)", str(error))
        match = match or re.search(r"of ([\d.]+)([KMGT]?) hbm", str(error))
        if match is not None:
            return int(float(match[1]) * _UNITS[match[2]])
        raise
    raise AssertionError("a TiB fits")
