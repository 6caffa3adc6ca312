"""Groups of parameters: by path, the first that matches, each with its own optimizer or frozen."""

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import optax
import pytest
from learner_process import placed

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.configuration.optimizer_schema import Optimizer, ParameterGroup
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.optimization.parameter_groups import labels, split_frozen
from seeupo_jax.learner.optimization.schedule import Scheduled, at_share
from seeupo_jax.learner.state_layout import state_layout
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy.network import join_params

GROUPS = (
    ParameterGroup("*norm/scale", frozen=True),
    ParameterGroup("layers/0/*", learning_rate=0.5),
    ParameterGroup("embedding", name="sgd", kwargs={"momentum": 0.5}),
)
BASE = Optimizer("adamw", 0.25, kwargs={"weight_decay": 0.125}, max_grad_norm=None, groups=GROUPS)


def params():
    """Four parameters: frozen, of a group, of another, and of none."""
    return {
        "embedding": jnp.linspace(0.5, 1.0, 4).reshape(2, 2),
        "layers": {0: {"norm": {"scale": jnp.ones(2)}, "q": {"kernel": jnp.full((2, 2), 2.0)}}},
        "head": jnp.full(3, -1.0),
    }


def test_every_parameter_has_the_group_that_matches_first():
    found = labels(GROUPS, params())
    layer = {"norm": {"scale": "0"}, "q": {"kernel": "1"}}
    assert found == {"embedding": "2", "layers": {0: layer}, "head": "rest"}


def test_frozen_parameters_are_split_off_and_come_back():
    trained, frozen = split_frozen(GROUPS, params())
    assert jax.tree.structure(frozen) == jax.tree.structure({"layers": {0: {"norm": {"scale": 0}}}})
    assert "norm" not in trained["layers"][0] and len(jax.tree.leaves(trained)) == 3
    cases.assert_trees_equal(join_params(trained, frozen), params())


def test_each_group_takes_the_steps_of_its_own_optimizer():
    """Against plain optax on each group's parameters alone, over two steps."""
    trained, _ = split_frozen(GROUPS, params())
    grads = jax.tree.map(lambda x: 0.1 * x + 0.3, trained)
    optimizer = make_optimizer(BASE, total_steps=9)
    state, moved = optimizer.init(trained), trained
    alone = {
        "layers": optax.adamw(0.5, weight_decay=0.125),
        "embedding": optax.sgd(0.25, momentum=0.5),
        "head": optax.adamw(0.25, weight_decay=0.125),
    }
    wanted = {name: ({name: trained[name]}, alone[name]) for name in alone}
    states = {name: one.init(own) for name, (own, one) in wanted.items()}
    for _ in range(2):
        updates, state = optimizer.update(grads, state, moved)
        moved = optax.apply_updates(moved, updates)
        for name, (own, one) in wanted.items():
            updates, states[name] = one.update({name: grads[name]}, states[name], own)
            wanted[name] = optax.apply_updates(own, updates), one
    for name, (own, _) in wanted.items():
        jax.tree.map(np.testing.assert_array_equal, moved[name], own[name])


def test_the_gradients_of_all_groups_are_clipped_together():
    groups = (ParameterGroup("a", learning_rate=2.0),)
    optimizer = make_optimizer(Optimizer("sgd", 1.0, groups=groups), total_steps=1)
    grads = {"a": jnp.asarray([3.0]), "b": jnp.asarray([4.0])}
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-2 * 0.6, -0.8], rtol=1e-6)


def test_groups_follow_the_schedule_with_a_rate_of_their_own():
    options = Optimizer("sgd", 1.0, "linear", max_grad_norm=None)
    options = Optimizer(**vars(options) | {"groups": (ParameterGroup("a", learning_rate=8.0),)})
    optimizer = make_optimizer(options, total_steps=4)
    grads = {"a": jnp.ones(1), "b": jnp.ones(1)}
    state = at_share(optimizer.init(grads), 0.25, jnp.asarray)
    updates, _ = optimizer.update(grads, state, grads)
    assert (float(updates["a"][0]), float(updates["b"][0])) == (-2.0, -0.25)

    def is_scheduled(node):
        return isinstance(node, Scheduled)

    nodes = jax.tree.leaves(state, is_leaf=is_scheduled)
    assert sum(map(is_scheduled, nodes)) == 2


def test_moments_of_groups_lie_as_their_parameters_do():
    mesh, (network, whole) = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2)), cases.policy()
    group = ParameterGroup("layers/*/kernel", name="lion")
    optimizer = make_optimizer(Optimizer("adam", groups=(group,)), total_steps=1)
    start = placed(mesh, network, whole)
    layout = state_layout(mesh, optimizer, start, schema.Offload())
    kernel = layout.params["layers"][0]["q"]["kernel"]
    of_kernel = [
        where
        for path, where in jax.tree.leaves_with_path(layout.opt_state)
        if jax.tree_util.keystr(path).endswith("['layers'][0]['q']['kernel']")
    ]
    assert of_kernel == [kernel] and not kernel.is_fully_replicated  # lion has one moment


@pytest.mark.parametrize(
    "groups, sentence",
    [
        (
            [{"pattern": "layer/*/q"}],
            r"\[0\].pattern: got 'layer/\*/q', which matches no parameter; allowed: a glob of paths"
            r" such as layers/\*/q/kernel.*; --explain prints all",
        ),
        ([{}], r"\[0\].pattern: got '', which matches no parameter; .*such as embedding, head"),
        (
            [{"pattern": "*"}, {"pattern": "head"}],
            r"\[1\].pattern: got 'head', all of whose 1 parameters groups before it have; allowed",
        ),
        ([{"pattern": "*", "frozen": True}], ": got 1 that freeze all 4 parameters; allowed"),
    ],
)
def test_groups_without_parameters_are_refused(groups, sentence):
    made = from_dict({"optimizer": {"groups": groups}}).optimizer.groups
    with pytest.raises(ValueError, match=rf"^config.optimizer.groups{sentence}"):
        split_frozen(made, params())


@pytest.mark.parametrize(
    "group, sentence",
    [
        ({"name": "lionn"}, r"name: got 'lionn'; allowed: .* did you mean lion"),
        ({"kwargs": {"beta": 1}}, r"kwargs: adam takes no 'beta'; allowed: b1, "),
        ({"frozen": True, "name": "lion"}, "frozen: got True with an optimizer of its own"),
        (
            {"kwargs": {"learning_rate": 1}},
            r"kwargs: got learning_rate; .*in config.optimizer.groups.0..learning_",
        ),
    ],
)
def test_a_groups_optimizer_is_checked_under_its_own_name(group, sentence):
    options = from_dict({"optimizer": {"groups": [{"pattern": "*"} | group]}}).optimizer
    with pytest.raises(ValueError, match=rf"^config.optimizer.groups\[0\].{sentence}"):
        make_optimizer(options, total_steps=1)


def test_groups_survive_a_checkpoints_notes():
    config = from_dict({"optimizer": {"groups": [{"pattern": "*", "learning_rate": 1e-3}]}})
    assert from_dict(to_dict(config)).optimizer.groups == config.optimizer.groups
