"""What updates a policy: its state is a copy on the mesh; what is not divided there is told."""

import jax
import numpy as np
import optax
from places import CONFIGS

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.state_layout import abstract_state, state_layout
from seeupo_jax.parallel.mesh import make_mesh, sharding
from seeupo_jax.policy_io import build
from seeupo_jax.training.build_learner import new_state, warn_of_undivided

CONFIG = CONFIGS / "quickstart.py"


def test_a_new_state_is_a_copy_on_the_mesh():
    config = load_config(CONFIG, ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"])
    policy, params = build.load_policy(config, "package:order_desk")
    optimizer = make_optimizer(config.optimizer, total_steps=1)
    state = new_state(config, policy, optimizer, params)
    gate = state.params["layers"][0]["mlp"]["gate"]["kernel"]
    assert gate.sharding.shard_shape(gate.shape) == (64, 192)  # width over fsdp, mlp over tensor
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == gate.shape]
    assert moments and all(m.sharding == gate.sharding for m in moments)
    jax.tree.map(lambda leaf: leaf.delete(), state.params)
    assert np.isfinite(params["layers"][0]["mlp"]["gate"]["kernel"]).all()


def test_state_unlike_the_parameters_that_every_device_holds_is_warned_of(caplog):
    mesh = make_mesh(schema.Mesh(fsdp=8))
    where = sharding(mesh, ("embed", None))
    params = {"kernel": jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=where)}
    listed = optax.GradientTransformation(jax.tree.leaves, lambda grads, state, _: (grads, state))
    for optimizer in (optax.adam(0.1), listed):
        layout = state_layout(mesh, optimizer, params, schema.Offload())
        warn_of_undivided(abstract_state(optimizer, params, layout))
    (said,) = caplog.messages  # of the list; 2**20 numbers of 4 bytes
    assert said.startswith("every device holds 4 MiB of the optimizer's state whole, of 4 MiB of p")
