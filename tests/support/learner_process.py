"""One process of a sweep over several: `learner_process.py RANK COUNT PORT OUT`."""

import functools
import pickle
import sys

import jax
import learner_cases as cases

from seeupo_jax.configuration import schema
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.state_layout import make_state, state_layout, to_pinned_host
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding

KEEP, OFFLOAD = schema.Offload(), schema.Offload(optimizer=True, reference=True)


def placed(mesh, network, params):
    """Host arrays as global arrays on the mesh."""
    where = param_shardings(mesh, network.logical_axes(), params)

    def make(x, there):
        return jax.make_array_from_callback(x.shape, there, lambda i: x[i])

    return jax.tree.map(make, params, where)


def learner_on(mesh, offload=KEEP):
    """A learner with Adam and an average, its fresh state and a reference policy that differs."""
    network, params = cases.policy()
    optimizer = make_optimizer(schema.Optimizer(name="adam", learning_rate=0.02), total_steps=9)
    start = placed(mesh, network, params)
    layout = state_layout(mesh, optimizer, start, offload, ema=True)
    learner = Learner(
        network,
        optimizer,
        schema.Algorithm(),
        Shapes((32,), action=8, rows=4, trajectories=8),
        temperature=1.0,
        ema=0.75,
        state_shardings=layout,
        replicated=sharding(mesh, ()),
    )
    reference = placed(mesh, network, cases.jittered(params, 0.1))
    reference = to_pinned_host(reference) if offload.reference else reference
    return learner, make_state(optimizer, start, layout), reference


def swept(devices, offload=KEEP):
    """A sweep's metrics, the fingerprint of the state after it, and that state."""
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, tensor=2), devices)
    with jax.set_mesh(mesh):
        learner, state, reference = learner_on(mesh, offload)
        state, metrics, *_ = sweep(learner, state, reference, cases.ragged(), iteration=1)
        return metrics, checksum(state), state


@functools.cache
def swept_alone(offload=KEEP):
    """`swept` over four devices of this process, once for all tests."""
    return swept(jax.devices()[:4], offload)


if __name__ == "__main__":
    rank, count, port = map(int, sys.argv[1:4])
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, rank)
    logged = swept(jax.devices(), OFFLOAD)[:2]
    with open(sys.argv[4], "wb") as file:
        pickle.dump(logged, file)
