"""The search for a layout, without the compiler."""

import pytest
from places import SUPPORT
from tpu_cases import needs_libtpu

from seeupo_jax import aot as command
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.instruments.aot import tune
from seeupo_jax.planning import chips
from seeupo_jax.planning.aot.measure import CompiledFigures
from seeupo_jax.planning.slices.slice_programs import prepare


@pytest.fixture(scope="module")
def ahead():
    """A run that samples the next iteration beside its sweep: the cache stays there."""
    config = load_config(str(SUPPORT / "aot_config.py"), ["rollout_ahead=1"])
    return prepare(config, chips.parse_topology("v5e:2x2"))


def told(layouts):
    return [layout.fields for layout in layouts]


@needs_libtpu
def test_a_cache_that_the_sweep_leaves_no_room_for_is_not_tried(ahead):
    """A conversation's cache takes 256 KiB of each of four devices; there is room for 1.25 MiB."""
    usable, parts = chips.usable_hbm(ahead.mesh.devices.flat[0]), ahead.parts
    sampling = {"rollout.mesh": {"data": -1, "tensor": 2}}
    tried = [sampling | {"rollout.concurrency": count} for count in (2, 4, 8)]
    others = parts["reference"] + parts["parameters"] + parts["sampler's policy"]
    inside = {"temporaries": usable - others - 5 * 2**18}
    turn = CompiledFigures("sweep/turn 512", inside=inside, beside={})
    assert len(tune._ranked("sampler", ahead, tried)) == 3
    assert tune._ranked("sampler", ahead, tried[2:], [turn]) == []
    found = told(tune._ranked("sampler", ahead, tried, [turn]))
    assert sorted(each["rollout.concurrency"] for each in found) == [2, 4]


@needs_libtpu
def test_what_lies_beside_a_program_is_told_of_the_layout_that_was_found(
    ahead, tmp_path, monkeypatch
):
    turn = CompiledFigures("sweep/turn 512", inside={"temporaries": 1}, beside={"KV cache": 1})
    found = tune.Tuned({"rollout.concurrency": 2}, {"sweep/turn": turn})
    monkeypatch.setattr(command, "tune", lambda setup, log: found)
    setup, figures = command._tuned(ahead, tmp_path / "layouts.json")
    assert figures["sweep/turn"].inside == turn.inside
    assert figures["sweep/turn"].beside["KV cache"] == setup.parts["KV cache"] == 2 * 2**18
