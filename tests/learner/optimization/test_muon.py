"""Muon orthogonalises each layer's matrices, however layers are stored and sharded."""

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import optax
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.optimizer_schema import Optimizer
from seeupo_jax.learner.optimization.muon import matrix_axes
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.optimization.schedule import at_share
from seeupo_jax.parallel.mesh import make_mesh, sharding

RATE = 0.5
EXPERTS, WIDTH, INNER = 2, 8, 4
FEW = {"ns_steps": 2}  # of the orthogonalisation: less to compile


def layer(rng):
    """Parameters of a layer: matrices of both shapes, of experts, and vectors."""

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "attention_norm": {"scale": draw(WIDTH)},
        "q": {"kernel": draw(WIDTH, INNER), "bias": draw(INNER)},
        "mlp": {"router": draw(WIDTH, EXPERTS), "down": draw(EXPERTS, INNER, WIDTH)},
    }


@pytest.fixture(scope="module")
def trees():
    """Parameters and gradients, with a tree per layer and with layers stacked."""
    rng = np.random.default_rng(3)

    def both():
        layers, table = [layer(rng) for _ in range(2)], rng.normal(size=(6, WIDTH))
        rest = {"embedding": table.astype(np.float32), "norm": {"scale": np.ones(WIDTH, "f")}}
        stacked = jax.tree.map(lambda *each: np.stack(each), *layers)
        return rest | {"layers": dict(enumerate(layers))}, rest | {"layers": stacked}

    (params, stacked_params), (grads, stacked_grads) = both(), both()
    return (params, grads), (stacked_params, stacked_grads)


def stepped(params, grads):
    """Parameters after two steps of our Muon."""
    optimizer = make_optimizer(
        Optimizer("contrib.muon", RATE, kwargs=FEW, max_grad_norm=None), total_steps=9
    )

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(2):
        params, state = step(params, state)
    return params


def independent(params, grads):
    """Each array by itself: 2-D matrices of layers by optax's Muon, experts one by one, the rest by
    AdamW."""

    def alone(param, grad, make):
        state = make.init(param)
        for _ in range(2):
            updates, state = make.update(grad, state, param)
            param = param + updates
        return param

    muon = optax.contrib.muon(RATE, **FEW)
    adam = optax.adamw(RATE, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0)

    def one(path, param, grad):
        if path[0].key != "layers" or param.ndim == 1:
            return alone(param, grad, adam)
        if param.ndim == 2:
            return alone(param, grad, muon)
        return jnp.stack([alone(p, g, muon) for p, g in zip(param, grad, strict=True)])

    return jax.tree_util.tree_map_with_path(one, params, grads)


@pytest.fixture(scope="module")
def plain(trees):
    return stepped(*trees[0])


def test_matrices_of_layers_and_experts_are_orthogonalised_and_the_rest_is_adams(trees, plain):
    wanted = jax.jit(independent)(*trees[0])
    cases.assert_trees_close(plain, wanted, 1e-5)


def test_stacked_layers_take_the_very_steps_of_layers_one_by_one(trees, plain):
    """By optax's own rule the stacked norms are a matrix, and the stacked matrices are Adam's."""
    stacked = stepped(*trees[1])
    wanted = jax.tree.map(lambda *each: jnp.stack(each), *plain["layers"].values())
    cases.assert_trees_close(stacked, plain | {"layers": wanted}, 1e-5)
    params, grads = ({"scale": each["layers"]["attention_norm"]["scale"]} for each in trees[1])
    by_default = optax.contrib.muon(RATE, **FEW)
    updates, _ = jax.jit(by_default.update)(grads, by_default.init(params), params)
    moved = stacked["layers"]["attention_norm"]["scale"] - params["scale"]
    assert not np.allclose(2 * updates["scale"], moved, atol=0.1)


def test_sharded_matrices_take_the_same_steps(trees):
    params, grads = trees[1]
    mesh, names = (
        make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2)),
        {2: ("layers", "embed"), 3: ("layers", "embed", "heads")},
    )

    def place(path, leaf):
        layers = path[0].key == "layers"
        logical = names.get(leaf.ndim, (None,) * leaf.ndim) if layers else (None,) * leaf.ndim
        return jax.device_put(leaf, sharding(mesh, logical))

    def put(tree):
        return jax.tree_util.tree_map_with_path(place, tree)

    there = put(params)
    moved = stepped(there, put(grads))
    kernel = moved["layers"]["q"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, WIDTH // 2, INNER // 2)
    cases.assert_trees_close(moved, stepped(params, grads), 1e-5)


def test_adams_own_learning_rate_follows_the_schedule():
    fields = {"schedule": "linear", "kwargs": {"adam_learning_rate": 0.125}}
    optimizer = make_optimizer(
        Optimizer("contrib.muon", RATE, max_grad_norm=None, **fields), total_steps=9
    )
    params = {"scale": jnp.ones(2)}
    state = at_share(optimizer.init(params), 0.5, jnp.asarray)
    updates, _ = optimizer.update(params, state, params)
    adam = optax.adamw(0.125 * 0.5, weight_decay=0.0)
    wanted, _ = adam.update(params, adam.init(params), params)
    np.testing.assert_allclose(updates["scale"], wanted["scale"], rtol=1e-6)


def test_what_is_no_matrix_takes_adamws_step_with_the_configured_options():
    params = {"scale": jnp.array([1.0, -2.0]), "layers": {0: {"kernel": jnp.ones((2, 2))}}}
    grads = {"scale": jnp.array([0.3, -4.0]), "layers": {0: {"kernel": jnp.ones((2, 2))}}}
    both = {"eps": 1e-3, "mu_dtype": "bfloat16"}
    adams = {"b1": 0.8, "b2": 0.9, "eps_root": 1e-2, "weight_decay": 0.1}
    muons = {f"adam_{name}": value for name, value in adams.items()}
    for given, own in (({}, {"weight_decay": 0.0}), (muons | both, adams | both)):
        optimizer = make_optimizer(
            Optimizer("contrib.muon", RATE, kwargs=given, max_grad_norm=None), total_steps=9
        )
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        adam = optax.adamw(RATE, **own)
        wanted, _ = adam.update(grads["scale"], adam.init(params["scale"]), params["scale"])
        np.testing.assert_allclose(updates["scale"], wanted, rtol=1e-6)
        muon = optax.contrib.muon(RATE, **given)
        kernel, grad = params["layers"][0]["kernel"], grads["layers"][0]["kernel"]
        wanted, _ = muon.update(grad, muon.init(kernel), kernel)
        np.testing.assert_allclose(updates["layers"][0]["kernel"], wanted, rtol=1e-6)


def test_the_users_own_axes_decide_what_is_a_matrix():
    params = {"table": jnp.arange(4.0).reshape(2, 2), "kernel": jnp.ones((2, 2))}
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)

    def tables(params):
        return {name: axes if name == "table" else None for name in params}

    kwargs = {"muon_weight_dimension_numbers": tables}
    config = Optimizer("contrib.muon", RATE, kwargs=kwargs, max_grad_norm=None)
    optimizer = make_optimizer(config, total_steps=9)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -RATE, rtol=1e-5)  # Adam's first step
    muon = optax.contrib.muon(RATE)
    table, _ = muon.update(params["table"], muon.init(params["table"]), params["table"])
    np.testing.assert_allclose(updates["table"], table, rtol=1e-5)


def test_only_matrices_of_layers_are_taken_for_matrices():
    params = {"embedding": jnp.ones((4, 2)), "head": jnp.ones((4, 2)), "kernel": jnp.ones((2, 2))}
    axes = matrix_axes(params | {"layers": {"scale": jnp.ones((3, 2))}})
    assert (axes["kernel"].reduction_axis, axes["kernel"].output_axis) == (-2, -1)
    assert axes["embedding"] is axes["head"] is axes["layers"]["scale"] is None
