"""An iteration of the laboratory against the same one written out in NumPy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.instruments.lab.advantages import TurnCredit, expected_credit, sampled_credit
from seeupo_jax.instruments.lab.laboratory import LabSettings
from seeupo_jax.instruments.lab.policies import POLICIES
from seeupo_jax.instruments.lab.sweep import LabParams, sweep, update_steps, values_of
from seeupo_jax.instruments.lab.trajectories import Batch, expected_batch, sampled_batch
from seeupo_jax.learner.sweep_plan import plan_sweep
from seeupo_jax.types import TrainState

TURNS, ACTIONS = 3, 2
POLICY = POLICIES["tables"](TURNS, ACTIONS)
RNG = np.random.default_rng(5)
MEAN = RNG.uniform(0, 1, (ACTIONS,) * TURNS)
CHANCE = RNG.uniform(0.3, 1, (ACTIONS,) * TURNS)
TABLE_CA = RNG.normal(size=(7, ACTIONS))
SETTINGS = LabSettings(groups=4, group_size=8)
SEEDS = (0, 1)


OPTIMIZER = SETTINGS.make_optimizer()
SWEEP = jax.jit(sweep, static_argnums=(0, 1, 2))
SAMPLE = jax.jit(functools.partial(sampled_batch, POLICY, trajectories=32))


def batch_of(seed, exact=False):
    table_CA, *arrays = (jnp.asarray(x, jnp.float32) for x in (TABLE_CA, MEAN, CHANCE))
    if exact:
        return expected_batch(POLICY, table_CA, arrays[0])
    return SAMPLE(table_CA, *arrays, jax.random.key(seed))


def once(recipe, seed, *, exact=False):
    """The parameters after one iteration of the laboratory."""
    algorithm = SETTINGS.algorithm(recipe)
    batch, zero = batch_of(seed, exact), jnp.zeros((), jnp.int32)
    value_C = jnp.zeros(7) if algorithm.advantage == "gae" else None
    params = LabParams(jnp.asarray(TABLE_CA, jnp.float32), value_C)
    state = TrainState(params, OPTIMIZER.init(params), zero, zero)
    if exact:
        credit = expected_credit(algorithm, batch)
    else:
        credit = sampled_credit(algorithm, batch, values_of(params, batch.context_NK), group_size=8)
    key = jax.random.key(seed)
    return SWEEP(POLICY, OPTIMIZER, algorithm, state, batch, credit, key).params


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def twin(seed, steps, *, scale="batch", weighted=True, clip=0.2, exact=False):
    """The table after one iteration; `steps` are the turns of each step."""
    context_NK, action_NK, reward_N, share_N = map(np.asarray, batch_of(seed, exact)[:4])
    if exact:
        deviation_N = reward_N - share_N @ reward_N
        deviation_N /= np.sqrt(share_N @ deviation_N**2)
    else:
        group = reward_N.reshape(4, 8)
        deviation = group - group.mean(axis=1, keepdims=True)
        std = np.sqrt((deviation**2).sum() / 31)
        if scale == "group":
            std = group.std(axis=1, ddof=1, keepdims=True) + 1e-6
        deviation_N = (deviation / std).ravel()
    table_CA, old_CA, weight_N = TABLE_CA.copy(), softmax(TABLE_CA), deviation_N
    for turns in steps:
        for _ in range(4):
            now_CA, grad_CA = softmax(table_CA), np.zeros_like(table_CA)
            for i, t in [(i, t) for i in range(len(share_N)) for t in turns]:
                c, a = context_NK[i, t], action_NK[i, t]
                ratio = now_CA[c, a] / old_CA[c, a]
                clipped = np.clip(ratio, 1 - clip, 1 + clip)
                if ratio * weight_N[i] <= clipped * weight_N[i]:
                    slope = share_N[i] * weight_N[i] * ratio
                    grad_CA[c] += slope * (np.eye(ACTIONS)[a] - now_CA[c])
            table_CA = table_CA + 3.0 * grad_CA
        if weighted:
            (turn,) = turns
            c_N, a_N = context_NK[:, turn], action_NK[:, turn]
            weight_N = weight_N * softmax(table_CA)[c_N, a_N] / old_CA[c_N, a_N]
    return table_CA


RECIPES = {
    "seeupo": ([(2,), (1,), (0,)], {}),
    "seeupo_forward": ([(0,), (1,), (2,)], {}),
    "seeupo_unweighted": ([(2,), (1,), (0,)], {"weighted": False}),
    "seeupo_group_std": ([(2,), (1,), (0,)], {"scale": "group"}),
    "parallel": ([(0, 1, 2)], {"weighted": False}),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_iteration_does_what_its_formula_says(recipe):
    steps, choices = RECIPES[recipe]
    for seed in SEEDS:
        np.testing.assert_allclose(
            once(recipe, seed).policy, twin(seed, steps, **choices), rtol=2e-4, atol=2e-5
        )


def test_recipes_differ_by_more_than_that_but_order_matters_through_weights_alone():
    tables = {name: twin(0, steps, **choices) for name, (steps, choices) in RECIPES.items()}
    np.testing.assert_allclose(tables.pop("parallel"), tables["seeupo_unweighted"], rtol=1e-12)
    for name, other in itertools.combinations(tables, 2):
        assert np.abs(tables[name] - tables[other]).max() > 0.01


def test_an_exact_iteration_does_what_its_formula_says():
    table_CA = once("seeupo", 0, exact=True).policy
    expected_CA = twin(0, [(2,), (1,), (0,)], exact=True)
    np.testing.assert_allclose(table_CA, expected_CA, rtol=2e-4, atol=2e-5)


def test_a_random_order_is_one_of_the_orders_and_another_one_for_another_key():
    orders = {
        "reverse": [(2,), (1,), (0,)],
        "forward": [(0,), (1,), (2,)],
        **{f"{a}{b}{c}": [(a,), (b,), (c,)] for a, b, c in ((0, 2, 1), (1, 0, 2), (1, 2, 0))},
        "201": [(2,), (0,), (1,)],
    }
    found = set()
    for seed in range(4):
        table_CA = once("seeupo_random", seed).policy
        close = [
            name
            for name, steps in orders.items()
            if np.abs(twin(seed, steps) - table_CA).max() < 2e-4
        ]
        assert len(close) == 1
        found |= set(close)
    assert len(found) > 1


def test_a_critic_moves_towards_the_returns_of_its_contexts():
    value_C, batch = np.asarray(once("ppo", 0).value_C), batch_of(0)
    seen = np.unique(batch.context_NK)
    assert np.all(value_C[seen] > 0)
    assert np.all(np.delete(value_C, seen) == 0)
    assert 0.1 < value_C[0] < batch.reward_N.mean()


@pytest.mark.parametrize("order", ["reverse", "forward", "parallel"])
@pytest.mark.parametrize("span", [1, 2, None])
def test_steps_are_those_of_training(order, span):
    algorithm = Algorithm(order=order, turns_per_update=span)
    turns_SUL, present_SUL = update_steps(algorithm, 5)
    actual = [
        [tuple(turns_L[present_L]) for turns_L, present_L in zip(*update, strict=True)]
        for update in zip(turns_SUL, present_SUL, strict=True)
    ]
    assert actual == [[*update.actions] for update in plan_sweep(algorithm, 5).updates]
    assert (turns_SUL[~present_SUL] == 0).all()


def test_a_random_order_is_drawn_from_the_reverse_one():
    drawn, reverse = (update_steps(Algorithm(order=order), 5) for order in ("random", "reverse"))
    np.testing.assert_array_equal(drawn, reverse)


def test_the_last_of_three_turns_in_pairs_is_alone():
    # Pairs count from the last turn: (1, 2), then (0,), whose padding must not count.
    paired = once("seeupo:turns_per_update=2:cumulative_ratio=False", 0).policy
    alone = once("seeupo_unweighted", 0).policy
    np.testing.assert_allclose(paired[0], alone[0], rtol=1e-5)
    assert np.abs(paired[1:] - alone[1:]).max() > 0.01


# Five trajectories whose turns all begin in one of two contexts: a step on some moves the others.
MIXED = np.random.default_rng(44)  # every choice matters
CONTEXT_NK, ACTION_NK = MIXED.integers(0, 2, (2, 5, TURNS))
SHARE_N = MIXED.dirichlet(np.ones(5))
ADVANTAGE_NK, RETURN_NK = MIXED.normal(size=(2, 5, TURNS))
SCALE_NK = MIXED.uniform(0.3, 1.7, (5, TURNS))
START = 0.3 * MIXED.normal(size=6)  # both contexts' tables, then their values


def mixed_logp(x):
    return np.log(softmax(x[:4].reshape(2, 2)))[CONTEXT_NK, ACTION_NK]


def kept_turns(choices, i, turns):
    """Those of some turns whose action is not likelier than `mask_above` as the sweep begins."""
    bound = 1 if choices.mask_above is None else choices.mask_above
    return [turn for turn in turns if np.exp(mixed_logp(START)[i, turn]) <= bound]


def mixed_objective(x, old_logp_NK, weight_NK, actions, choices):
    """What a step maximises; `actions` are the turns of each of its actions."""
    difference_NK, value_NK = mixed_logp(x) - old_logp_NK, x[4:][CONTEXT_NK]
    tokens_N = np.array([sum(len(kept_turns(choices, i, a)) for a in actions) for i in range(5)])
    counted = SHARE_N[tokens_N > 0].sum() if choices.normalize_by == "active" else 1.0
    old_value_NK, total = START[4:][CONTEXT_NK], 0.0
    longest = TURNS if choices.order == "parallel" else choices.turns_per_update  # row of actions
    for i, each in itertools.product(range(5), actions):
        turns = kept_turns(choices, i, each)
        if not turns:
            continue
        parts = [a_NK[i, turns] for a_NK in (difference_NK, weight_NK, SCALE_NK)]
        if choices.ratio != "token":
            parts = [part.mean(keepdims=True) for part in parts]
        difference, weight, scale = parts
        ratio = np.exp(difference * (len(turns) if choices.ratio == "product" else 1))
        near = np.clip(ratio, 1 - scale * choices.clip_low, 1 + scale * choices.clip_high)
        term = np.minimum(ratio * weight, near * weight)
        if choices.clip_dual is not None:
            term = np.where(weight < 0, np.maximum(term, choices.clip_dual * weight), term)
        value, old, wanted = (a_NK[i, turns] for a_NK in (value_NK, old_value_NK, RETURN_NK))
        held = np.clip(value, old - choices.critic.clip, old + choices.critic.clip)
        error = np.maximum((value - wanted) ** 2, (held - wanted) ** 2) / 2
        divisor = {
            "action": counted,
            "token": SHARE_N @ tokens_N / len(turns),
            "constant": counted * longest / len(turns),
        }[choices.loss_aggregation]
        total += SHARE_N[i] * (term.mean() - choices.critic.coef * error.mean()) / divisor
    return total


def mixed_twin(choices):
    """Tables and values after one iteration, whose gradients are differences of the objective."""
    steps = [[[1, 2], [0]]] if choices.order == "parallel" else [[[1, 2]], [[0]]]
    x, factor_N, old_NK = START, np.ones(5), mixed_logp(START)
    for actions in steps:
        old_NK = mixed_logp(x) if choices.old_policy == "turn" else old_NK
        given = old_NK, ADVANTAGE_NK * factor_N[:, None], actions, choices
        for _ in range(choices.inner_epochs):
            ends = [[mixed_objective(x + h, *given) for h in (-d, d)] for d in 1e-6 * np.eye(6)]
            x = x + 3.0 * np.diff(ends).ravel() / 2e-6
        if choices.order != "parallel":
            moved_NK = mixed_logp(x) - old_NK
            over = np.sum if choices.ratio == "product" else np.mean
            kept = [kept_turns(choices, i, actions[0]) for i in range(5)]
            moved_N = [over(moved_NK[i, own]) if own else 0 for i, own in enumerate(kept)]
            bounds = 1 - choices.weight_clip, 1 + choices.weight_clip
            factor_N = np.clip(factor_N * np.clip(np.exp(moved_N), *bounds), *bounds)
    return x


CRITIC = {"kind": "head", "clip": 0.1}
TOGETHER = {"order": "parallel", "inner_epochs": 3, "clip_dual": 1.3}
IN_TURN = {"order": "reverse", "inner_epochs": 2, "weight_clip": 0.6}


@pytest.mark.parametrize(
    "choices",
    [
        TOGETHER | {"loss_aggregation": "token"},
        TOGETHER | {"loss_aggregation": "constant", "ratio": "token"},
        IN_TURN | {"ratio": "product", "loss_aggregation": "constant"},
        IN_TURN | {"ratio": "token", "old_policy": "turn"},
        {"order": "parallel", "inner_epochs": 3, "loss_aggregation": "token", "mask_above": 0.59},
        IN_TURN | {"normalize_by": "active", "mask_above": 0.59},
    ],
    ids=str,
)
def test_every_choice_of_a_step_is_what_its_formula_says(choices):
    algorithm = Algorithm(turns_per_update=2, critic=CRITIC, **choices)
    zero = jnp.zeros((), jnp.int32)
    params = LabParams(jnp.float32(START[:4].reshape(2, 2)), jnp.float32(START[4:]))
    state = TrainState(params, OPTIMIZER.init(params), zero, zero)
    batch = Batch(*map(jnp.asarray, (CONTEXT_NK, ACTION_NK, np.zeros(5), np.float32(SHARE_N))))
    credit = TurnCredit(*map(jnp.float32, (ADVANTAGE_NK, RETURN_NK, SCALE_NK)))
    found = SWEEP(POLICY, OPTIMIZER, algorithm, state, batch, credit, jax.random.key(0)).params
    wanted = mixed_twin(algorithm)
    actual = np.concatenate([found.policy.ravel(), found.value_C])
    np.testing.assert_allclose(actual, wanted, rtol=2e-4, atol=2e-5)
    plain = vars(Algorithm(critic=CRITIC | {"clip": 1e9}))
    for name in {*choices, "critic"} - {"order"}:
        other = mixed_twin(dataclasses.replace(algorithm, **{name: plain[name]}))
        assert np.abs(other - wanted).max() > 0.01, name


def test_where_every_action_is_too_likely_no_step_is_taken():
    params, zero = LabParams(jnp.float32(TABLE_CA), None), jnp.zeros((), jnp.int32)
    state = TrainState(params, OPTIMIZER.init(params), zero, zero)
    algorithm, batch = Algorithm(mask_above=0.0, loss_aggregation="token"), batch_of(0)
    credit = TurnCredit(jnp.ones((32, TURNS)), jnp.zeros((32, TURNS)))
    after = SWEEP(POLICY, OPTIMIZER, algorithm, state, batch, credit, jax.random.key(0))
    np.testing.assert_array_equal(after.params.policy, np.float32(TABLE_CA))
    assert after.step == 0
