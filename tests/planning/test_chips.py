"""Slices by name, and the devices that the TPU's compiler makes of them."""

import math

import pytest
from places import ROOT
from tpu_cases import needs_libtpu

from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.planning import chips
from seeupo_jax.planning.chips import CHIPS, parse_topology, topology_devices


def test_a_slice_by_name():
    topology = parse_topology("v5p:4x4x8")
    assert (topology.chip, topology.shape) == (CHIPS["v5p"], (4, 4, 8))
    assert (topology.chips, topology.hosts, topology.devices) == (128, 32, 128)
    assert str(topology) == "v5p:4x4x8"


def test_several_slices_by_name():
    topology = parse_topology("v5e:16x16*2")
    assert (topology.slices, topology.chips, topology.hosts) == (2, 512, 128)
    assert str(topology) == "v5e:16x16*2"


def test_two_devices_share_a_chip():
    topology = parse_topology("tpu7x:2x2x1")
    assert (topology.chips, topology.devices, topology.hosts) == (4, 8, 1)
    assert topology.chip.hbm_bytes == 192 * GIB


def test_a_single_chip_has_a_host():
    assert parse_topology("v6e:1x1").hosts == 1


# As published: docs.cloud.google.com/tpu/docs/{v4,v5p,v5e,v6e}, and for the larger v4 and v5p the
# list of types of Google's cluster tool (AI-Hypercomputer/xpk, system_characteristics.py).
PUBLISHED = {
    **{"v4-8": "2x2x1", "v4-16": "2x2x2", "v4-32": "2x2x4", "v4-64": "2x4x4", "v4-128": "4x4x4"},
    **{"v4-256": "4x4x8", "v4-512": "4x8x8", "v4-1536": "8x8x12", "v4-4096": "8x16x16"},
    **{"v5p-8": "2x2x1", "v5p-16": "2x2x2", "v5p-32": "2x2x4", "v5p-64": "2x4x4"},
    **{"v5p-128": "4x4x4", "v5p-256": "4x4x8", "v5p-384": "4x4x12", "v5p-512": "4x8x8"},
    **{"v5p-640": "4x4x20", "v5p-768": "4x8x12", "v5p-1024": "8x8x8", "v5p-1152": "4x12x12"},
    **{"v5p-1920": "4x12x20", "v5p-2048": "8x8x16", "v5p-3456": "12x12x12", "v5p-4480": "4x20x28"},
    **{"v5p-8192": "16x16x16", "v5p-12288": "16x16x24"},
    **{"v5litepod-1": "1x1", "v5litepod-4": "2x2", "v5litepod-8": "2x4", "v5litepod-16": "4x4"},
    **{"v5litepod-32": "4x8", "v5litepod-64": "8x8", "v5litepod-256": "16x16", "v5e-128": "8x16"},
    **{"v6e-1": "1x1", "v6e-8": "2x4", "v6e-16": "4x4", "v6e-64": "8x8", "v6e-256": "16x16"},
}


@pytest.mark.parametrize("name, shape", PUBLISHED.items())
def test_an_accelerator_type_has_its_published_shape(name, shape):
    kind, _, number = name.partition("-")
    chip = {"v5litepod": "v5e"}.get(kind, kind)
    topology = parse_topology(name)
    assert topology == parse_topology(f"{chip}:{shape}")
    # TensorCores of the older ones, chips of the newer ones.
    assert topology.chips == int(number) / (2 if kind in ("v4", "v5p") else 1)
    assert parse_topology(f"{name}*2").chips == 2 * topology.chips


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("v5p-63", "v5p-8, v5p-16, v5p-32, v5p-64, or multiples of 128 up to v5p-12288"),
        ("v5p-2", "v5p-8, v5p-16, .* TensorCores, 2 a chip"),
        ("v5p-12416", "up to v5p-12288"),
        ("v4-192", "v4-8, v4-16, v4-32, v4-64, or multiples of 128 up to v4-8192"),
        ("v5litepod-12", r"v5litepod-1, v5litepod-4, .*-128, v5litepod-256 \(a number of chips"),
        ("v6e-512", "v6e-1, v6e-4, v6e-8, v6e-16, v6e-32, v6e-64, v6e-128, v6e-256 "),
        ("v5p-0", "v5p-8"),
    ],
)
def test_a_type_that_does_not_exist_is_told_those_that_do(name, sizes):
    with pytest.raises(ValueError, match=f"--topology: got '{name}'; allowed: .*{sizes}"):
        parse_topology(name)


@pytest.mark.parametrize(
    "name",
    ["v9:2x2", "v5p", "v5p:", "v5e:16x16*0", "v5e:2x2x", "v5-16", "tpu7x-8", "v3-8", "v5p-64x2"],
)
def test_an_unknown_name_is_told_the_chips_and_the_types(name):
    reported = r"v4, v5e, v5p, v6e, tpu7x, or .* v5p-128, of v4, v5p, v5e, v5litepod, v6e; "
    with pytest.raises(ValueError, match=f"--topology: got .*{reported}") as error:
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


def test_the_page_has_the_published_efficiency_of_every_chip():
    page = (ROOT / "docs" / "tpu.md").read_text()
    for name, chip in CHIPS.items():
        assert 0 < chip.compute_efficiency <= 0.6 and chip.memory_efficiency == 0.6
        shares = f"{chip.compute_efficiency:.0%} | {chip.memory_efficiency:.0%}"
        assert f"\n| {name} | {shares} | " in page


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "count"),  # a real v4 shows a device a chip; MaxText compiles for it as a megacore
    [("v4:2x2x1", 4), ("v5e:1x1", 1), ("v5e:2x4", 8), ("v6e:8x8", 64), ("v5p:4x4x4*2", 128)],
)
def test_the_compilers_devices_are_as_many_on_as_many_hosts(name, count):
    topology = parse_topology(name)
    devices = topology_devices(topology)
    assert len(devices) == topology.devices == count
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
