"""The roofline's arithmetic, and the links that mesh axes have."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from seeupo_jax.planning.chips import Chip
from seeupo_jax.planning.collectives import Collective
from seeupo_jax.planning.slices.roofline import axis_links, estimate

# 100 FLOP/s, 10 bytes/s of memory, 6 bytes/s over six links, 0.5 between slices.
CHIP = Chip("toy", 1, 100.0, 10.0, 6.0, 0.5, 4, 1, 3, 64)


def sends(total, *axes):
    return Collective("all-gather", axes, 4, total / 2, 2, "")


@pytest.mark.parametrize(
    ("flops", "memory", "traffic", "bound"),
    [(900, 10, 3, "compute"), (100, 80, 3, "memory"), (100, 10, 30, "network")],
)
def test_the_longest_part_bounds_a_step(flops, memory, traffic, bound):
    line = estimate(flops, memory, [sends(traffic, "tensor")], CHIP, {"tensor": 2.0})
    assert (line.compute_s, line.memory_s) == (flops / 100, memory / 10)
    assert line.network_s == traffic / 2  # two of the six links
    assert line.bound == bound
    assert line.step_s == max(line.compute_s, line.memory_s, line.network_s)
    assert line.serial_s == line.compute_s + line.memory_s + line.network_s


@pytest.mark.parametrize(
    ("flops", "memory", "traffic", "seconds"),
    [
        (900, 10, 3, 9 / 0.6),  # 9 s at the peak, 1 s and 1.5 s beside it
        (100, 80, 3, 8 / 0.5),
        (100, 10, 30, 1 + 1 + 15),  # no published share of links: without overlap
        (900, 10, 12, 9 + 1 + 6),  # 15 s of computing leave too little to hide
    ],
)
def test_published_efficiency_is_of_computing_and_memory_and_hides_no_network(
    flops, memory, traffic, seconds
):
    chip = dataclasses.replace(CHIP, compute_efficiency=0.6, memory_efficiency=0.5)
    line = estimate(flops, memory, [sends(traffic, "tensor")], chip, {"tensor": 2.0})
    assert line.published_s == pytest.approx(seconds)
    best = estimate(flops, memory, [sends(traffic, "tensor")], CHIP, {"tensor": 2.0})
    assert best.published_s == best.serial_s == line.serial_s <= line.published_s
    assert best.step_s == line.step_s  # at best, both are the same


def test_collectives_run_one_after_the_other_over_the_links_of_their_axes():
    axes = {"fsdp": 3.0, "tensor": 1.0, "data": 0.0, "context": 4.0}
    found = [sends(6, "fsdp"), sends(8, "fsdp", "tensor"), sends(6, "fsdp", "context")]
    assert estimate(0, 0, found, CHIP, axes).network_s == 6 / 3 + 8 / 4 + 6 / 6
    assert estimate(0, 0, [sends(1, "data", "fsdp")], CHIP, axes).network_s == 1 / 0.5


def test_what_goes_between_slices_takes_the_data_centre_network():
    within = estimate(100, 10, [sends(6, "fsdp")], CHIP, {"fsdp": 6.0})
    between = estimate(100, 10, [sends(6, "slices")], CHIP, {"fsdp": 6.0})
    assert between.network_s == within.network_s * CHIP.ici_bandwidth / CHIP.dcn_bandwidth


def test_a_device_has_its_share_of_the_chip():
    two = dataclasses.replace(CHIP, devices=2)
    line = estimate(100, 10, [sends(6, "fsdp")], two, {"fsdp": 6.0})
    assert (line.compute_s, line.memory_s, line.network_s) == (2, 2, 2)


def torus(sides, shape, order=None, *, kind="TPU v5", cores=1, slices=None):
    """A mesh of axes a, b, ... over a slice's devices, as the compiler shows them."""
    places = list(np.ndindex(*(sides + (1,) * (3 - len(sides)))))
    devices = np.empty(len(places) * cores * (1 if slices is None else slices), object)
    for i in range(devices.size):
        part, core = divmod(i, cores)
        which, place = divmod(part, len(places))
        fields = {"coords": places[place], "core_on_chip": core, "device_kind": kind}
        devices[i] = SimpleNamespace(**fields, **({} if slices is None else {"slice_index": which}))
    devices = devices.reshape(shape)
    devices = devices if order is None else devices.transpose(order)
    return SimpleNamespace(devices=devices, shape=dict(zip("abcdef", devices.shape, strict=False)))


def test_an_axis_around_a_dimension_closes_a_ring():
    assert axis_links(torus((4, 4, 4), (16, 4))) == {"a": 4.0, "b": 2.0}


def test_short_dimensions_are_lines():
    assert axis_links(torus((2, 2, 4), (4, 4))) == {"a": 2.0, "b": 2.0}
    assert axis_links(torus((4, 8), (4, 8), kind="TPU v6 lite")) == {"a": 1.0, "b": 1.0}
    assert axis_links(torus((16, 16), (16, 16), kind="TPU v5 lite")) == {"a": 2.0, "b": 2.0}


def test_groups_between_each_others_chips_share_the_links():
    # Along 16 chips in a ring: every fourth one in a group, or four neighbours.
    mesh = torus((16, 1), (4, 4), kind="TPU v5 lite")
    assert axis_links(mesh) == {"a": 2 / 4, "b": 1.0}


def test_axes_of_one_device_have_no_links():
    assert axis_links(torus((4, 4, 4), (1, 64, 1))) == {"b": 6.0}


def test_an_axis_between_slices_is_the_data_centre_network():
    assert axis_links(torus((4, 4, 4), (2, 64), slices=2)) == {"a": 0.0, "b": 6.0}


def test_an_axis_between_a_chips_cores_stays_inside():
    assert axis_links(torus((2, 2, 1), (4, 2), cores=2)) == {"a": 2.0, "b": 6.0}
