"""The optimizer of adapters per turn is one optimizer for each, stepped on its own turns alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.optimizer_schema import ParameterGroup
from seeupo_jax.learner.optimization.adapter_moments import per_adapter
from seeupo_jax.learner.optimization.optimizer import apply_update, make_optimizer
from seeupo_jax.learner.optimization.schedule import at_share
from seeupo_jax.types import TrainState

ADAPTERS = 3
SHAPES = {"layers": {"lora_a": (4, 2), "lora_b": (2, 5)}, "other": {"lora_a": (3, 2)}}
STACKED = {"layers": {"lora_a": (2, 4, 2), "lora_b": (2, 2, 5)}}  # of two stacked layers
ACTIVE = [(2,), (2,), (1,), (0, 1, 2), (), (0,), (1, 2)]
GROUP = ParameterGroup("*/lora_b", name="lion", learning_rate=0.02)
OPTIMIZERS = [
    {"name": "sgd"},
    {"name": "adamw", "kwargs": {"weight_decay": 0.1}},
    {"name": "adafactor"},
    {"name": "contrib.muon"},
    {"name": "lion", "schedule": "linear"},
    {"name": "adam", "groups": (GROUP,)},
]


def drawn(shapes, seed, axis=0):
    """One array of each shape for every adapter, stacked on an axis."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        return np.stack([rng.normal(size=shape) for _ in range(ADAPTERS)], axis).astype(np.float32)

    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def one_of(tree, number, axis):
    return jax.tree.map(lambda x: jnp.take(x, number, axis), tree)


def state_of(optimizer, params):
    params = jax.tree.map(jnp.asarray, params)
    return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("choices", OPTIMIZERS, ids=[each["name"] for each in OPTIMIZERS])
def test_it_is_as_many_optimizers(choices, axis):
    shapes = STACKED if axis else SHAPES
    config = schema.Optimizer(learning_rate=0.1, max_grad_norm=0.5, **choices)
    plain = make_optimizer(config, total_steps=50)
    together = per_adapter(plain, ADAPTERS, axis)
    assert per_adapter(plain, ADAPTERS, axis) is together
    params = drawn(shapes, 0, axis)
    state = state_of(together, params)
    alone = [state_of(plain, one_of(params, number, axis)) for number in range(ADAPTERS)]
    step = jax.jit(
        lambda grads, state, active_K: apply_update(together, grads, state, active_K=active_K)
    )
    for number, active in enumerate(ACTIVE):
        share = 1 - number / 10
        grads = drawn(shapes, 1 + number, axis)
        active_K = np.isin(np.arange(ADAPTERS), active)
        grads = jax.tree.map(
            lambda g, on=active_K: g * on.reshape([-1 if i == axis else 1 for i in range(g.ndim)]),
            grads,
        )
        state, metrics = step(grads, at_share(state, share, jnp.asarray), active_K)
        norm = optax.tree.norm(jax.tree.map(jnp.asarray, grads))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
        for each in active:
            own = at_share(alone[each], share, jnp.asarray)
            alone[each], _ = apply_update(plain, one_of(grads, each, axis), own)
        for each, own in enumerate(alone):
            got = one_of(state.params, each, axis)
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(own.params), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert state.step == len(ACTIVE)


@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_not_stepped_keeps_every_bit_also_of_zeros(axis):
    shapes = STACKED if axis else SHAPES
    config = schema.Optimizer(name="adamw", learning_rate=0.1, kwargs={"weight_decay": 0.1})
    optimizer = per_adapter(make_optimizer(config, total_steps=50), ADAPTERS, axis)
    params = jax.tree.map(lambda x: np.where(x > 0, x, np.float32(-0.0)), drawn(shapes, 0, axis))
    state = state_of(optimizer, params)
    state, _ = apply_update(
        optimizer, drawn(shapes, 5, axis), state, active_K=jnp.ones(ADAPTERS, bool)
    )
    state = state._replace(params=jax.tree.map(jnp.asarray, params))
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    after, _ = apply_update(optimizer, zeros, state, active_K=jnp.array([False, True, False]))
    for number in (0, 2):
        pair = (
            jax.tree.map(lambda x, own=number: _part(x, own, axis), (each.params, each.opt_state))
            for each in (after, state)
        )
        bits = [[np.asarray(x).tobytes() for x in jax.tree.leaves(each)] for each in pair]
        assert bits[0] == bits[1]
    moved = one_of(after.params, 1, axis), one_of(params, 1, axis)
    assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, moved), strict=True))


def test_moments_have_the_parameters_shapes():
    """So they are laid out on devices as these are."""
    optimizer = make_optimizer(schema.Optimizer(name="adam"), total_steps=50)
    for axis, shapes in enumerate((SHAPES, STACKED)):
        params = drawn(shapes, 0, axis)
        state = per_adapter(optimizer, ADAPTERS, axis).init(jax.tree.map(jnp.asarray, params))
        (adam,) = (x for x in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(x))
        for moments in (adam.mu, adam.nu):
            pairs = zip(jax.tree.leaves(moments), jax.tree.leaves(params), strict=True)
            assert all(x.shape == y.shape for x, y in pairs)
        assert adam.count.shape == (ADAPTERS,)


def _is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def _part(leaf, number, axis):
    """One adapter's part of a leaf, of the parameters or of the optimizer's state."""
    return jnp.take(leaf, number, min(axis, leaf.ndim - 1))
