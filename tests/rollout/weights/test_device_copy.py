"""A copy on other devices has the sampler's bits, and nothing in common with what it is of."""

import jax
import numpy as np
import pytest
import weights_cases as cases
from flax.traverse_util import flatten_dict

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.policy.network import join_params
from seeupo_jax.rollout.weights.device_copy import copy_to
from seeupo_jax.rollout.weights.publishing import publish


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "sizes, first",
    [((2, 1, 2), 4), ((2, 1, 2), 0), ((1, 2, 2), 4), ((1, 1, 1), 1), ((1, 4, 1), 2)],
    ids=["others", "the same", "cut as the trainer's", "one of them", "some of them"],
)
@pytest.mark.parametrize("name", cases.POLICIES)
def test_a_copy_is_what_a_worker_would_read(tmp_path, name, sizes, first):
    network, params, frozen = cases.trainers(name)
    int8 = cases.POLICIES[name][3]
    publish(tmp_path, params, 0, network, int8=int8)
    data, fsdp, tensor = sizes
    devices = jax.devices()[first : first + data * fsdp * tensor]
    sizes = schema.Mesh(data=data, fsdp=fsdp, tensor=tensor)
    found, mesh = cases.read_as_worker(name, tmp_path, sizes, devices)
    copied = copy_to(params, network, mesh, int8=int8)
    everything = join_params(params, frozen)
    shardings = flatten_dict(param_shardings(mesh, network.logical_axes(), everything))
    # What the next sweep does with them.
    donated = jax.tree.leaves(params)
    jax.block_until_ready(jax.jit(lambda xs: [x * 0 - 7 for x in xs], donate_argnums=0)(donated))
    assert all(x.is_deleted() for x in donated)
    wanted, numbers = flatten_dict(found.params), flatten_dict(copied.params)
    assert wanted.keys() == numbers.keys()
    for path, x in numbers.items():
        assert x.dtype == wanted[path].dtype
        assert np.asarray(x).tobytes() == np.asarray(wanted[path]).tobytes(), path
        assert x.sharding == shardings[path]
    assert copied.bytes == sum(x.nbytes for x in wanted.values()) and copied.seconds > 0


def test_frozen_arrays_are_copied_too():
    network, _, frozen = cases.policy("frozen")
    mesh = make_mesh(schema.Mesh(data=1), jax.devices()[7:])
    copied = flatten_dict(copy_to(frozen, network, mesh).params)
    assert copied.keys() == flatten_dict(frozen).keys()
    assert {device for x in copied.values() for device in x.devices()} == {jax.devices()[7]}
