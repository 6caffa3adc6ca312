"""What waits in the hosts' memory, of one process or two: the same numbers, less on the devices."""

import functools
import pickle

import jax
import learner_cases as cases
import numpy as np
import pytest
import tpu_cases
from learner_process import OFFLOAD, learner_on, swept_alone
from process_cases import run_processes

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration import schema
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.program_warming import sweep_programs
from seeupo_jax.learner.state_layout import (
    HOST,
    abstract_state,
    check_offload,
    final_params,
    state_layout,
)
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding
from seeupo_jax.policy.network import abstract_network


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def mesh_of_four():
    return make_mesh(schema.Mesh(data=1, fsdp=2, tensor=2), jax.devices()[:4])


@pytest.fixture(scope="module")
def offloaded():
    return swept_alone(OFFLOAD)


def test_offloading_changes_nothing_beyond_rounding(offloaded):
    metrics, _, state = swept_alone()
    assert metrics["sweep/turns"] == 4 and metrics["sweep/kl"] > 0
    assert offloaded[0] == pytest.approx(metrics, rel=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, cases.host(offloaded[2]), cases.host(state))


@pytest.mark.exhaustive
def test_two_processes_do_bit_for_bit_what_one_does_on_as_many_devices(offloaded, tmp_path):
    alone = offloaded[:2]
    assert run_processes("learner_process.py", 2, 2, tmp_path, read=pickle.loads) == [alone] * 2


def test_moments_and_the_average_wait_on_the_host_and_parameters_do_not(offloaded):
    state = offloaded[2]
    assert state.step > 0 and kinds(state.opt_state) == kinds(state.ema) == {HOST}
    assert kinds(state.params) == kinds(final_params(state)) == {"device"}
    cases.assert_trees_equal(cases.host(final_params(state)), cases.host(state.ema))


def test_an_offloaded_reference_is_a_copy_on_the_host():
    mesh = mesh_of_four()
    with jax.set_mesh(mesh):
        _, state, reference = learner_on(mesh, schema.Offload(reference=True))
        _, _, kept = learner_on(mesh)
    assert kinds(reference) == {HOST} and kinds(state) == {"device"}
    cases.assert_trees_equal(cases.host(reference), cases.host(kept))


def test_a_checkpoint_brings_an_offloaded_state_back_to_where_it_was(offloaded, tmp_path):
    state = offloaded[2]
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    _, restored, _ = checkpoints.restore(state)
    checkpoints.close()
    cases.assert_trees_equal(cases.host(restored), cases.host(state))
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, restored, state)
    assert all(jax.tree.leaves(same))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optimized")
def test_on_tpu_the_moments_are_no_longer_among_what_the_devices_hold():
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, tensor=2), tpu_cases.devices("v5e:2x2"))
    plain, offloaded = (turn_memory(mesh, schema.Offload(optimizer=o)) for o in (False, True))
    saved = plain.argument_size_in_bytes - offloaded.argument_size_in_bytes
    assert plain.host_argument_size_in_bytes == 0
    assert saved == offloaded.host_argument_size_in_bytes > plain.argument_size_in_bytes / 3


def turn_memory(mesh, offload):
    """What a turn's step takes on each device of a mesh that only compiles."""
    network, params = abstract_network(cases.ARCH)
    optimizer = make_optimizer(schema.Optimizer(name="adam"), total_steps=9)
    where = param_shardings(mesh, network.logical_axes(), params)

    def struct(x, there):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    params = jax.tree.map(struct, params, where)
    layout = state_layout(mesh, optimizer, params, offload, ema=True)
    shapes = Shapes((32,), action=8, rows=4, trajectories=8)
    replicated = sharding(mesh, ())
    algorithm = schema.Algorithm(refresh="separate")
    learner = Learner(
        network,
        optimizer,
        algorithm,
        shapes,
        1.0,
        ema=0.9,
        state_shardings=layout,
        replicated=replicated,
    )
    state = abstract_state(optimizer, params, layout)
    programs = {program.name: program for program in sweep_programs(learner, 8)}
    with jax.set_mesh(mesh):
        return programs["sweep/turn 32"].lower(state, params).compile().memory_analysis()


class _Device:
    """A device whose memories have these names."""

    platform = "accelerator"

    def __init__(self, *kinds):
        self._kinds = kinds

    def addressable_memories(self):
        return [type("Memory", (), {"kind": kind}) for kind in self._kinds]


@pytest.mark.parametrize("field", ["optimizer", "reference"])
def test_a_device_that_cannot_reach_the_hosts_memory_is_told_of(field):
    options = schema.Offload(**{field: True})
    message = f"config.offload.{field}: got True on accelerator, whose devices have the memories"
    with pytest.raises(ValueError, match=f"{message} device and no pinned_host; allowed: False"):
        check_offload(options, _Device("device"))
    check_offload(options, _Device("device", "pinned_host"))
    check_offload(schema.Offload(), _Device("device"))
    check_offload(options, jax.devices()[0])
