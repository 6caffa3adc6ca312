"""Optimizers by name, schedules, and updates that skip gradients which are not finite."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seeupo_jax.configuration.optimizer_schema import Optimizer, ParameterGroup
from seeupo_jax.learner.optimization.optimizer import (
    apply_update,
    make_optimizer,
    try_optimizer,
)
from seeupo_jax.types import TrainState

_NAMES = ("adam", "adamw", "lion", "adafactor", "sgd", "contrib.muon")


def _make(total_steps=10, **fields):
    return make_optimizer(Optimizer(**fields), total_steps=total_steps)


def _state(optimizer, params):
    return TrainState(params, optimizer.init(params), jnp.int32(7), jnp.int32(2))


def _jitted(optimizer):
    step = functools.partial(apply_update, optimizer)
    return jax.jit(step, donate_argnums=1, static_argnames="streamed")


@functools.cache
def _named(name):
    """One optimizer and its compiled step for all tests of a name."""
    optimizer = _make(name=name)
    return optimizer, _jitted(optimizer)


def _params():
    return {
        "kernel": jnp.arange(12.0).reshape(3, 4) / 12,
        "scale": jnp.linspace(-1.0, 1.0, 4),
    }


def _bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", _NAMES)
def test_a_finite_gradient_moves_every_parameter_against_it(name):
    optimizer, step = _named(name)
    before = jax.tree.map(lambda p: np.asarray(p + 2.0), _params())
    grads = jax.tree.map(jnp.ones_like, _params())
    state, metrics = step(grads, _state(optimizer, jax.tree.map(jnp.asarray, before)))
    for name, value in before.items():
        assert (np.asarray(state.params[name]) < value).all(), name
    assert (int(state.step), int(state.skipped)) == (8, 2)
    assert float(metrics["update_skipped"]) == 0.0


@pytest.mark.parametrize(
    "name, bad, streamed",
    [
        *((name, np.nan, False) for name in _NAMES),
        *(("adam", bad, streamed) for bad in (np.inf, -np.inf) for streamed in (False, True)),
        ("adam", np.nan, True),
    ],
)
def test_a_gradient_that_is_not_finite_changes_no_bit_but_the_count(name, bad, streamed):
    optimizer, step = _named(name)
    step = functools.partial(step, streamed=streamed)
    good = jax.tree.map(lambda p: 0.1 * p, _params())
    state, _ = step(good, _state(optimizer, _params()))
    before = _bits(state._replace(skipped=jnp.int32(3)))
    state, metrics = step({**good, "scale": good["scale"].at[2].set(bad)}, state)
    assert _bits(state) == before
    assert float(metrics["update_skipped"]) == 1.0
    assert not np.isfinite(float(metrics["grad_norm"]))
    state, metrics = step(good, state)
    assert (int(state.step), int(state.skipped)) == (9, 3)
    assert float(metrics["update_skipped"]) == 0.0


def test_a_gradient_longer_than_the_bound_is_scaled_to_it():
    grads = {"kernel": jnp.asarray([[3.0]]), "scale": jnp.asarray([4.0])}
    for bound, ratio in ((1.0, 0.2), (10.0, 1.0), (None, 1.0)):
        optimizer = _make(name="sgd", learning_rate=0.5, max_grad_norm=bound)
        params = {"kernel": jnp.zeros((1, 1)), "scale": jnp.zeros(1)}
        state, metrics = _jitted(optimizer)(grads, _state(optimizer, params))
        assert float(metrics["grad_norm"]) == 5.0  # before the clip
        np.testing.assert_allclose(state.params["kernel"], [[-1.5 * ratio]], rtol=1e-6)
        np.testing.assert_allclose(state.params["scale"], [-2.0 * ratio], rtol=1e-6)


def test_the_bound_does_not_change_the_structure_of_the_state():
    with_clip, without = _make(max_grad_norm=1.0), _make(max_grad_norm=None)
    trees = [jax.eval_shape(optimizer.init, _params()) for optimizer in (with_clip, without)]
    paths = [jax.tree_util.tree_flatten_with_path(tree)[0] for tree in trees]
    assert [path for path, _ in paths[0]] == [path for path, _ in paths[1]]


def test_the_norm_of_bfloat16_gradients_is_a_float32():
    params = {"scale": jnp.ones(5000, jnp.bfloat16)}
    optimizer = _make(name="sgd", max_grad_norm=None)
    state = _state(optimizer, params)
    _, metrics = jax.jit(functools.partial(apply_update, optimizer))(params, state)
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(5000.0), rtol=1e-6)


def test_keyword_arguments_reach_the_optimizer():
    params = {"scale": jnp.asarray([1.0])}
    optimizer = _make(name="sgd", learning_rate=0.5, kwargs={"momentum": 0.5}, max_grad_norm=None)
    step, state = _jitted(optimizer), _state(optimizer, params)
    for wanted in (0.5, -0.25):  # steps of 0.5 * 1, then 0.5 * (1 + 0.5)
        state, _ = step({"scale": jnp.asarray([1.0])}, state)
        np.testing.assert_allclose(state.params["scale"], [wanted])


def test_a_warm_up_of_steps_rises_with_the_optimizers_own_steps_alone():
    fields = {"name": "sgd", "learning_rate": 1.0, "warmup_steps": 2, "max_grad_norm": None}
    optimizer = _make(**fields)
    step, state = _jitted(optimizer), _state(optimizer, {"scale": jnp.zeros(1)})
    for grad, wanted in ((1.0, -0.5), (np.nan, -0.5), (1.0, -1.5), (1.0, -2.5)):
        state, _ = step({"scale": jnp.asarray([grad])}, state)
        np.testing.assert_allclose(state.params["scale"], [wanted])


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps: got 10; allowed: fewer than the run's 10"):
        _make(10, warmup_steps=10)


def test_a_run_without_steps_has_an_optimizer():
    assert isinstance(_make(0, schedule="cosine"), optax.GradientTransformation)


def test_a_users_own_function_is_imported_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_optimizers.py").write_text(
        "import optax\n"
        "def halved(learning_rate, *, factor=0.5):\n"
        "    return optax.sgd(factor * learning_rate)\n"
        "def nothing(learning_rate):\n"
        "    return learning_rate\n"
        "def open_ended(**kwargs):\n"
        "    return optax.sgd(kwargs['learning_rate'] * kwargs['factor'])\n"
        "def misspelt(learning_rate):\n"
        "    return optax.scale_by_adamm()\n"
        "def exits(learning_rate, params=None):\n"
        "    raise SystemExit(2)\n"
        "def exits_late(learning_rate):\n"
        "    return optax.stateless(exits)\n"
        "def named(learning_rate):\n"
        "    step = lambda grads, state, params: ({'scale': grads['scale']}, state)\n"
        "    return optax.GradientTransformation(lambda params: (), step)\n"
        "def averaged(learning_rate):\n"
        "    own = optax.contrib.schedule_free_adamw(learning_rate)\n"
        "    return optax.chain(optax.zero_nans(), own)\n"
    )
    (tmp_path / "my_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    params = {"scale": jnp.zeros(1)}
    for function, kwargs in (("halved", {}), ("open_ended", {"factor": 0.5})):
        name = f"my_optimizers:{function}"
        optimizer = _make(name=name, learning_rate=1.0, kwargs=kwargs, max_grad_norm=None)
        state, _ = apply_update(optimizer, {"scale": jnp.ones(1)}, _state(optimizer, params))
        np.testing.assert_allclose(state.params["scale"], [-0.5])
    with pytest.raises(ValueError, match="my_optimizers:nothing returned a float; allowed"):
        _make(name="my_optimizers:nothing")
    with pytest.raises(
        ValueError, match=r"misspelt failed .*_adamm.*\(misspelt, my_optimizers.py:9\)\.$"
    ):
        _make(name="my_optimizers:misspelt")
    with pytest.raises(ValueError, match=r"my_optimizers:exits failed .*: SystemExit: 2 \(exits,"):
        _make(name="my_optimizers:exits")
    own = Optimizer(name="my_optimizers:exits_late")
    with pytest.raises(ValueError, match="exits_late .*cannot take a step .*: SystemExit: 2 "):
        try_optimizer(own, {"scale": jnp.zeros(1)}, total_steps=1)
    own = Optimizer(name="my_optimizers:averaged")
    with pytest.raises(ValueError, match="optimizers:averaged', which trains other parameters"):
        try_optimizer(own, {"scale": jnp.zeros(1)}, total_steps=1)
    own = Optimizer(name="my_optimizers:named")
    try_optimizer(own, {"scale": jnp.zeros(1)}, total_steps=1)
    with pytest.raises(ValueError, match=r"cannot take .*: 'scale' \(.*_optimizers.py:15\)\.$"):
        try_optimizer(own, {"bias": jnp.zeros(1)}, total_steps=1)
    with pytest.raises(ValueError, match="no function 'half'; it has halved, nothing, open_ended"):
        _make(name="my_optimizers:half")
    with pytest.raises(ValueError, match="no module 'my_optimisers'"):
        _make(name="my_optimisers:halved")
    with pytest.raises(ValueError, match="my_broken:anything' cannot be imported: .*no_such_dep"):
        _make(name="my_broken:anything")


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"name": "adamm"}, "got 'adamm'; allowed: .*; did you mean .*adam"),
        ({"name": "muon"}, "did you mean .*contrib.muon"),
        ({"name": "optax.adamw"}, "did you mean adamw"),
        (
            {"name": "contrib.schedule_free_adamw"},
            "which trains other parameters than those to sample",
        ),
        (
            {"name": "contrib.schedule_free_sgd"},
            "which trains other parameters than those to sample",
        ),
        (
            {"name": "optax.contrib:schedule_free_sgd"},
            "which trains other parameters than those to sample",
        ),
        ({"name": "contrib"}, "name: got 'contrib'; allowed: an optax optimizer"),
        ({"name": "scale_by_learning_rate"}, "name: got 'scale_by_learning_rate'"),
        ({"name": "softmax_cross_entropy"}, "name: got 'softmax_cross_entropy'"),
        ({"name": "§"}, "optax has .*adam, .*contrib.muon"),
        ({"kwargs": {"beta1": 0.9}}, "kwargs: adam takes no 'beta1'; allowed: b1, b2, eps,"),
        ({"kwargs": {"learning_rate": 0.1}}, "kwargs: got learning_rate; allowed"),
        ({"kwargs": {"b1": "high"}}, "adam with kwargs={'b1': 'high'} .*cannot take a step"),
        ({"name": "contrib.dpsgd"}, "contrib.dpsgd needs l2_norm_clip, noise_multiplier, seed"),
        pytest.param(
            {
                "name": "contrib.dpsgd",
                "kwargs": {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "seed": 0},
            },
            "contrib.dpsgd .*cannot take a step from gradients .*alone: .*batch dimension",
            marks=pytest.mark.filterwarnings("ignore:.seed. is deprecated"),
        ),
        ({"name": "lbfgs"}, "lbfgs .* from gradients and parameters alone: .*'value'"),
        ({"name": "sm3", "schedule": "linear"}, "sm3 refuses kwargs={} with schedule=linear"),
        ({"name": "optax:sgd_"}, "no function 'sgd_'"),
        ({"name": "optax:apply_updates"}, "optax:apply_updates has no parameter learning_rate"),
    ],
)
def test_mistakes_are_named_before_anything_is_compiled(fields, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        _make(**fields)
    assert str(error.value).startswith("config.optimizer") and "\n" not in str(error.value)


def test_an_optimizer_without_further_arguments_allows_none(monkeypatch):
    own = types.ModuleType("own_optimizer")
    own.plain = lambda learning_rate: optax.sgd(learning_rate)
    own.fixed = lambda: optax.sgd(0.1)
    monkeypatch.setitem(sys.modules, "own_optimizer", own)
    with pytest.raises(
        ValueError, match="allowed: none, since learning_rate is all that it takes."
    ):
        _make(name="own_optimizer:plain", kwargs={"momentum": 0.9})
    with pytest.raises(ValueError, match="it has none, since it takes no argument by name."):
        _make(name="own_optimizer:fixed")


def test_an_optimizer_whose_state_no_checkpoint_can_hold_is_refused():
    galore, matrices = Optimizer(name="contrib.galore"), {"kernel": jnp.zeros((3, 4))}
    with pytest.raises(ValueError, match="got 'contrib.galore', .*projector.'scale'., which"):
        try_optimizer(galore, _params(), total_steps=1)  # GaLore projects matrices alone
    try_optimizer(galore, matrices, total_steps=1)
    group = ParameterGroup(pattern="kernel", name="contrib.galore")
    try_optimizer(Optimizer(groups=(group,)), _params(), total_steps=1)
