"""The optimizer's state lies as its parameters do, and so do the gradients on their way to it."""

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import pytest
from learner_process import learner_on, placed

from seeupo_jax.configuration import schema
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.program_warming import sweep_programs
from seeupo_jax.learner.state_layout import abstract_state, make_state, state_layout
from seeupo_jax.parallel.mesh import make_mesh, sharding

KEEP = schema.Offload()
KINDS = {
    "adam": {},
    "adamw": {"schedule": "cosine", "warmup_steps": 3},
    "lion": {},
    "contrib.muon": {},
    "adafactor": {"kwargs": {"min_dim_size_to_factor": 8}},
}


def mesh_of_eight():
    return make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))


def optimizer_of(name, **choices):
    return make_optimizer(schema.Optimizer(name=name, **choices), total_steps=9)


def local_size(leaf):
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape)))


def matrices_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim > 1]


@pytest.mark.parametrize("name", KINDS)
def test_no_device_holds_moments_of_more_than_its_own_part_of_the_parameters(name):
    mesh, (network, params) = mesh_of_eight(), cases.policy()
    params, optimizer = placed(mesh, network, params), optimizer_of(name, **KINDS[name])
    state = abstract_state(optimizer, params, state_layout(mesh, optimizer, params, KEEP))
    leaves, matrices = jax.tree.leaves(state.opt_state), matrices_of(params)
    like = {leaf.shape: local_size(leaf) for leaf in matrices}
    assert all(local_size(leaf) == like[leaf.shape] for leaf in matrices_of(leaves))
    whole = sum(leaf.size for leaf in leaves if leaf.sharding.is_fully_replicated)
    assert whole < sum(leaf.size for leaf in matrices) / 5  # counts; sums over rows and columns
    if name != "adafactor":
        kept = sum(leaf.size for leaf in matrices_of(leaves))
        if name == "contrib.muon":  # one moment of a layer's matrix, and Adam's two of the tables
            kept -= params["embedding"].size + params["head"].size
        assert kept % sum(leaf.size for leaf in matrices) == 0 < kept


def test_a_moment_follows_the_parameter_of_its_whole_path():
    mesh = mesh_of_eight()

    def struct(axis):
        return jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding(mesh, (axis,)))

    params = {"scale": struct("embed"), "layer": {"scale": struct("mlp")}}
    layout = state_layout(mesh, optimizer_of("adam"), params, KEEP)
    placed = jax.tree.leaves_with_path(layout.opt_state)
    where = {jax.tree_util.keystr(path)[-len("['layer']['scale']") :]: x for path, x in placed}
    assert where["['layer']['scale']"] == params["layer"]["scale"].sharding
    (outer,) = {x for name, x in where.items() if "'layer'" not in name and "'scale'" in name}
    assert outer == params["scale"].sharding != params["layer"]["scale"].sharding


def test_a_state_is_made_as_its_shapes_say():
    mesh, (network, params) = mesh_of_eight(), cases.policy()
    params, optimizer = placed(mesh, network, params), optimizer_of("adam")
    layout = state_layout(mesh, optimizer, params, KEEP)
    made, said = (f(optimizer, params, layout) for f in (make_state, abstract_state))
    assert jax.tree.structure(made) == jax.tree.structure(said)
    for leaf, struct in zip(jax.tree.leaves(made), jax.tree.leaves(said), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (
            struct.shape,
            struct.dtype,
            struct.sharding,
        )
    jax.tree.map(lambda leaf: leaf.delete(), made.params)
    assert np.isfinite(params["embedding"]).all()  # a copy was given away


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optimized")
def test_gradients_are_added_up_where_their_parameters_lie():
    mesh = mesh_of_eight()
    with jax.set_mesh(mesh):
        learner, state, reference = learner_on(mesh)
        programs = {program.name: program for program in sweep_programs(learner, 8)}
        lowered = programs["sweep/turn 32"].lower(state, reference)
    gate, text = state.params["layers"][0]["mlp"]["gate"]["kernel"], lowered.compile().as_text()
    # XLA may find this out by itself, but is told: of two matrices the first zeros and every sum.
    logged = [line for line in lowered.as_text().splitlines() if "sdy.sharding_constraint" in line]
    assert (
        len([line for line in logged if f"tensor<{gate.shape[0]}x{gate.shape[1]}xf32>" in line])
        == 4
    )

    def shape(sizes):
        return f"f32[{','.join(map(str, sizes))}]"

    loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
    carried = max(loops, key=len)  # the loop over microbatches carries all parameters
    assert shape(gate.sharding.shard_shape(gate.shape)) in carried
    assert shape(gate.shape) not in carried
