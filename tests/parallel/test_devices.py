"""Rows' devices stay within a process, slices under the outermost axes, on real TPU topologies."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import tpu_cases

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.devices import arrange, slice_block
from seeupo_jax.parallel.mesh import AXES, make_mesh


def sizes_of(**sizes):
    return dict.fromkeys(AXES, 1) | sizes


def hosts_of(mesh, *axes):
    """How many processes hold the devices that differ along these axes only, at most."""
    apart = [axis for axis in range(mesh.ndim) if AXES[axis] not in axes]
    groups = np.moveaxis(mesh, apart, range(len(apart)))
    groups = groups.reshape(math.prod(groups.shape[: len(apart)]), -1)
    return max(len({device.process_index for device in group}) for group in groups)


def span(devices):
    """The sides of the smallest box around devices."""
    coords = np.array([device.coords for device in devices])
    return tuple(coords.max(axis=0) - coords.min(axis=0) + 1)


def devices_of(processes, each, platform="cpu"):
    return [
        SimpleNamespace(process_index=p, id=100 * p + i, platform=platform)
        for i in range(each)
        for p in range(processes)
    ]


def test_without_a_torus_the_devices_of_a_process_are_innermost():
    mesh = arrange(sizes_of(fsdp=4, tensor=2), devices_of(processes=4, each=2))
    assert hosts_of(mesh, "tensor") == 1
    assert [device.id for device in mesh.flat] == [0, 1, 100, 101, 200, 201, 300, 301]


def test_devices_of_one_process_keep_the_order_that_they_came_in():
    devices = devices_of(processes=1, each=4)[::-1]
    assert list(arrange(sizes_of(data=4), devices).flat) == devices


@pytest.mark.parametrize(
    "slices, block",
    [
        ([0] * 8, 8),
        ([None] * 8, 8),  # as devices of one slice say it
        ([0, 0, 0, 0, 1, 1, 1, 1], 4),
        ([0, 1, 2, 3], 1),
        ([0] * 4 + [1] * 2 + [0] * 6, 2),
        ([0] * 3 + [1] * 3 + [0] * 3 + [1] * 3, 3),
    ],
)
def test_neighbours_that_share_a_slice_are_counted(slices, block):
    devices = [SimpleNamespace(platform="tpu", slice_index=index) for index in slices]
    assert slice_block(devices) == block
    assert slice_block([SimpleNamespace(platform="tpu")] * 8) == 8
    # GPUs have the number too, of a node: nothing is laid out by it.
    others = [SimpleNamespace(platform="gpu", slice_index=index) for index in range(8)]
    assert slice_block(others) == 8


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "topology, sizes",
    [
        ("v5e:16x16", {"fsdp": 64, "tensor": 4}),
        ("v5e:16x16", {"data": 2, "fsdp": 16, "expert": 4, "context": 2}),
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}),
        ("v5p:4x4x4", {"fsdp": 16, "context": 2, "tensor": 2}),
        ("v6e:8x8", {"fsdp": 32, "tensor": 2}),
        ("v5e:2x4", {"fsdp": 2, "tensor": 4}),
        ("tpu7x:2x2x4", {"fsdp": 4, "context": 2, "tensor": 4}),
    ],
)
def test_on_a_pod_the_devices_of_a_row_are_one_hosts(topology, sizes):
    devices = tpu_cases.devices(topology)
    sizes = sizes_of(**sizes)
    mesh = make_mesh(schema.Mesh(**sizes), devices).devices
    assert mesh.shape == tuple(sizes.values()) and set(mesh.flat) == set(devices)
    assert hosts_of(mesh, "tensor", "context") == 1


@pytest.mark.exhaustive
def test_every_host_orders_its_chips_alike_and_hosts_are_neighbours_on_the_torus():
    devices = tpu_cases.devices("v5p:4x4x4")
    mesh = arrange(sizes_of(data=4, fsdp=4, tensor=4), devices)[:, :, 0, 0]
    for host in mesh.reshape(-1, 4):
        steps = [np.subtract(chip.coords, host[0].coords) for chip in host]
        np.testing.assert_array_equal(steps, [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]])
    # The hosts' torus is 2 x 2 x 4, two chips apart in x and y: fsdp lies on those, data on z.
    assert {span(group) for group in mesh[:, :, 0]} == {(3, 3, 1)}
    assert {span(group) for group in mesh[:, :, 0].T} == {(1, 1, 4)}


@pytest.mark.exhaustive
def test_tensor_beyond_a_host_fills_whole_hosts():
    mesh = arrange(sizes_of(fsdp=8, tensor=8), tpu_cases.devices("v6e:8x8"))
    assert hosts_of(mesh, "tensor") == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes, crossing", [({"data": 2, "fsdp": 8, "tensor": 2}, 0), ({"fsdp": 16, "tensor": 2}, 1)]
)
def test_only_the_outermost_axis_crosses_slices(sizes, crossing):
    devices = tpu_cases.devices("v6e:4x4", num_slices=2)
    mesh = arrange(sizes_of(**sizes), devices)
    halves = np.split(mesh, 2, axis=crossing)
    assert [{device.slice_index for device in half.flat} for half in halves] == [{0}, {1}]
    assert hosts_of(mesh, "tensor") == 1


@pytest.mark.exhaustive
def test_a_mesh_that_would_share_rows_between_slices_is_named():
    devices = tpu_cases.devices("v6e:4x4", num_slices=2)
    reason = (
        "config.mesh: got data=1 x fsdp=1, which 2 slices of 16 devices do not divide, so that"
        " expert=1 x context=4 x tensor=8 would lie across slices; allowed: data x fsdp a multiple"
        " of 2."
    )
    with pytest.raises(ValueError, match=reason):
        make_mesh(schema.Mesh(data=1, context=4, tensor=8), devices)
