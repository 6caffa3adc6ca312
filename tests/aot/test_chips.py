"""Slices by name, and the devices that the TPU's compiler makes of them."""

import math

import pytest
from tpu_cases import needs_libtpu

from seeupo_jax.aot import chips
from seeupo_jax.aot.chips import CHIPS, GIB, parse_topology, topology_devices


def test_a_slice_by_name():
    topology = parse_topology("v5p:4x4x8")
    assert (topology.chip, topology.shape) == (CHIPS["v5p"], (4, 4, 8))
    assert (topology.chips, topology.hosts, topology.devices) == (128, 32, 128)
    assert topology.device_hbm == 95 * GIB
    assert topology.name == "v5p:4x4x8"


def test_several_slices_by_name():
    topology = parse_topology("v5e:16x16*2")
    assert (topology.slices, topology.chips, topology.hosts) == (2, 512, 128)
    assert topology.name == "v5e:16x16*2"


def test_two_devices_share_a_chip():
    topology = parse_topology("tpu7x:2x2x1")
    assert (topology.chips, topology.devices, topology.hosts) == (4, 8, 1)
    assert topology.device_hbm == 96 * GIB


def test_a_single_chip_has_a_host():
    assert parse_topology("v6e:1x1").hosts == 1


@pytest.mark.parametrize("name", ["v9:2x2", "v5p", "v5p:", "v5e:16x16*0", "v5e:2x2x", "v5e-16"])
def test_an_unknown_name_is_told_the_chips(name):
    with pytest.raises(ValueError, match=r"--topology: got .*v4, v5e, v5p, v6e, tpu7x\.$") as error:
        parse_topology(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("name", ["v5e:16x32", "v5e:4x2", "v6e:2x2x1", "v6e:3x3"])
def test_a_flat_shape_that_does_not_exist_is_told_those_that_do(name):
    with pytest.raises(ValueError, match=r"allowed for v[56]e: 1x1, 2x2, .* 8x16, 16x16\.$"):
        parse_topology(name)


@pytest.mark.parametrize("name", ["v5p:4x4", "v5p:6x6x6", "v5p:8x4x4", "v4:16x16x20", "v5p:0x4x4"])
def test_a_deep_shape_that_does_not_exist_is_told_those_that_do(name):
    with pytest.raises(ValueError, match=r"allowed for v.*: 1x1x1, .* multiples of 4 with at most"):
        parse_topology(name)


def test_the_largest_slices_exist():
    for name in ("v5e:16x16", "v5p:16x16x24", "v4:8x16x32", "tpu7x:16x16x36"):
        topology = parse_topology(name)
        assert topology.chips <= topology.chip.largest


def test_figures_grow_from_one_generation_to_the_next():
    for older, newer in (("v4", "v5p"), ("v5e", "v6e"), ("v5p", "tpu7x")):
        for key in ("hbm_bytes", "peak_flops", "hbm_bandwidth", "ici_bandwidth", "dcn_bandwidth"):
            assert vars(CHIPS[newer])[key] >= vars(CHIPS[older])[key]


@needs_libtpu
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:1x1", "v5e:2x4", "v6e:8x8", "v5p:4x4x4*2"])
def test_the_compilers_devices_are_as_many_on_as_many_hosts(name):
    topology = parse_topology(name)
    devices = topology_devices(topology)
    assert len(devices) == topology.devices
    assert len({device.process_index for device in devices}) == topology.hosts
    assert len({tuple(device.coords) for device in devices}) == math.prod(topology.shape)


def test_without_libtpu_one_sentence_says_what_to_install(monkeypatch):
    def missing(**_):
        raise RuntimeError("JAX TPU support not installed")

    monkeypatch.setattr(chips.topologies, "get_topology_desc", missing)
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match=r"needs libtpu.*pip install 'jax\[tpu\]'\.$"):
        topology_devices(parse_topology("v5e:2x2"))


def test_what_libtpu_refuses_is_told_with_its_reason(monkeypatch):
    def refuses(**_):
        raise RuntimeError("INVALID_ARGUMENT: no such thing.\nmore")

    monkeypatch.setattr(chips.topologies, "get_topology_desc", refuses)
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda _: object())
    with pytest.raises(ValueError, match=r"not make v5e:2x2: INVALID_ARGUMENT: no such thing\.$"):
        topology_devices(parse_topology("v5e:2x2"))
