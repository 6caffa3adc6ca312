"""The plan of a sweep, by hand from the algorithm; and the programs that real sweeps run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_plan import (
    SweepPlan,
    action_numbers,
    actions_per_update,
    optimizer_steps,
    plan_sweep,
    sweep_kinds,
)
from seeupo_jax.options import Setting
from seeupo_jax.types import Trajectory


def written(each):
    """A pass in words: `turn 2,3 x2 rescored 1 refreshing 4`."""
    words = [each.kind, ",".join(map(str, each.turns))] if each.turns else [each.kind]
    words += [f"x{each.times}"] * (each.times > 1)
    words += [f"rescored {each.rescored}"] * (each.rescored > 0)
    if each.refreshes:
        words.append(f"refreshing {','.join(map(str, each.refreshes))}")
    return " ".join(words)


START = ["score", "reference"]  # of the old policy, and of that of the KL penalty
TWICE = {"inner_epochs": 2, "minibatches_per_turn": 2}
KL_COV = {"ratio": "token", "covariance": {"kind": "kl"}}
# Choices, K, and the passes: Eq. 6 is `turn`; Eq. 8 `refresh`, or `refreshing` within a step.
PLANS = {
    "the paper's, last turn first": (
        {},
        3,
        [*START, "turn 2", "turn 1 refreshing 2", "turn 0 refreshing 1"],
    ),
    "its refreshes apart: none after the last step": (
        {"refresh": "separate"},
        3,
        [*START, "turn 2", "refresh 2", "turn 1", "refresh 1", "turn 0"],
    ),
    "forward": (
        {"order": "forward"},
        3,
        [*START, "turn 0", "refresh 0", "turn 1", "refresh 1", "turn 2"],
    ),
    "custom": (
        {"order": "custom", "custom_order": (1, 3, 0, 2)},
        4,
        [*START, "turn 1", "refresh 1", "turn 3", "refresh 3", "turn 0", "refresh 0", "turn 2"],
    ),
    "custom, of turns that no trajectory has": (
        {"order": "custom", "custom_order": (3, 1, 0, 2), "cumulative_ratio": False},
        3,
        [*START, "turn 1", "turn 0", "turn 2"],
    ),
    "parallel: one step, which nothing weighs": ({"order": "parallel"}, 3, [*START, "turn 0,1,2"]),
    "without weights": ({"cumulative_ratio": False}, 2, [*START, "turn 1", "turn 0"]),
    "two turns a step, counted from the last": (
        {"turns_per_update": 2},
        5,
        [*START, "turn 3,4", "turn 1,2 refreshing 3,4", "turn 0 refreshing 1,2"],
    ),
    "all turns a step": ({"turns_per_update": None}, 3, [*START, "turn 0,1,2"]),
    "more turns a step than there are": ({"turns_per_update": 9}, 2, [*START, "turn 0,1"]),
    "epochs": (
        {"inner_epochs": 2},
        2,
        [*START, "turn 1", "turn 1", "refresh 1", "turn 0", "turn 0"],
    ),
    "minibatches": (
        {"minibatches_per_turn": 3},
        2,
        [*START, "turn 1 x3", "refresh 1", "turn 0 x3"],
    ),
    "old_policy=turn, in steps that find it themselves": (
        {"old_policy": "turn"},
        2,
        [*START, "turn 1", "turn 0 refreshing 1"],
    ),
    "old_policy=turn, by passes": (
        {"old_policy": "turn", **TWICE},
        2,
        [*START, *["old 1", "turn 1 x2", "turn 1 x2", "refresh 1"], "old 0"]
        + ["turn 0 x2", "turn 0 x2"],
    ),
    "covariance: before all steps but the first": (
        {**KL_COV, **TWICE},
        2,
        [*START, "turn 1 x2 rescored 1", "turn 1 x2 rescored 2", "refresh 1"]
        + ["turn 0 x2 rescored 2", "turn 0 x2 rescored 2"],
    ),
    "covariance, fused": (
        {"ratio": "token", "covariance": {"kind": "clip"}},
        3,
        [*START, "turn 2", "turn 1 rescored 1 refreshing 2", "turn 0 rescored 1 refreshing 1"],
    ),
    "no KL": ({"kl_coef": 0.0}, 1, ["score", "turn 0"]),
    "critic": ({"advantage": "gae", "critic": {"kind": "head"}}, 1, [*START, "value", "turn 0"]),
    "scorer": (
        {"advantage": "istar", "estimator": {"scorer_epochs": 2}},
        1,
        [*START, "scores", "scorer", "scores", "scorer", "turn 0"],
    ),
    "critic and scorer": (
        {"advantage": "spa", "critic": {"kind": "head"}},
        1,
        [*START, "value", "scores", "scorer", "turn 0"],
    ),
    "a reference policy that moves": (
        {"reference": {"every": 3}},
        1,
        [*START, "turn 0", "move reference"],
    ),
    "no turn": ({"reference": {"every": 1}}, 0, ["move reference"]),
    "no turn of a custom order": ({"order": "custom", "custom_order": (1, 0)}, 0, []),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_by_hand(name):
    choices, turns, wanted = PLANS[name]
    algorithm = Algorithm(**choices)
    plan = plan_sweep(algorithm, turns)
    assert [written(each) for each in plan.passes] == wanted
    if "custom" not in name:
        steps = Setting(algorithm, turns, ahead=False).steps  # which the rules of options read
        assert optimizer_steps(algorithm, turns) == steps == plan.count("turn")
    assert plan.count("turn") == sum(update.steps for update in plan.updates)
    assert {each.kind for each in plan.passes} <= sweep_kinds(algorithm)


def test_a_random_order_has_every_step_once_and_follows_its_seed_and_iteration():
    algorithm = Algorithm(order="random", turns_per_update=2)

    def order(iteration, seed=3):
        updates = plan_sweep(algorithm, 6, seed=seed, iteration=iteration).updates
        return [update.turns for update in updates]

    orders = [order(iteration) for iteration in range(8)]
    assert all(sorted(each) == [(0, 1), (2, 3), (4, 5)] for each in orders)
    assert len({tuple(each) for each in orders}) > 2
    assert orders[0] == order(0) and any(order(i, seed=4) != orders[i] for i in range(8))
    last = plan_sweep(algorithm, 6, seed=3, iteration=0).updates[-1]
    assert [written(each) for each in last.passes] == [f"turn {last.turns[0]},{last.turns[1]}"]


@pytest.mark.parametrize("order", ["reverse", "forward", "random", "custom", "parallel"])
def test_no_turns_are_no_steps(order):
    algorithm = Algorithm(order=order, custom_order=(1, 0) if order == "custom" else ())
    assert plan_sweep(algorithm, 0) == SweepPlan((), (), ())
    assert optimizer_steps(algorithm, 0) == 0


def test_an_unknown_order_is_refused_with_the_names():
    message = "order: got 'backward'; allowed: reverse, forward, random, custom, parallel"
    with pytest.raises(ValueError, match=message):
        plan_sweep(Algorithm(order="backward"), 3)


def test_what_follows_an_iteration_is_due_in_every_one_or_in_every_so_many():
    algorithm = Algorithm(reference={"every": 3})
    plans = [plan_sweep(algorithm, 0, iteration=i, ema=True).after for i in range(1, 7)]
    moves = ["average", "move reference"]
    due = [["average"], ["average"], moves, ["average"], ["average"], moves]
    assert [[each.kind for each in after] for after in plans] == due


def test_teachers_score_once_each_after_the_reference_policy():
    plan = plan_sweep(Algorithm(), 1, teachers=2)
    assert [written(each) for each in plan.before] == [*START, "teacher x2"]
    assert plan_sweep(Algorithm(), 0, teachers=2).before == ()
    assert "teacher" in sweep_kinds(Algorithm(), teachers=1) - sweep_kinds(Algorithm())


def test_passes_have_no_more_steps_than_trajectories():
    algorithm = Algorithm(minibatches_per_turn=8)
    assert plan_sweep(algorithm, 2, trajectories=3).count("turn") == 6
    assert optimizer_steps(algorithm, 2) == plan_sweep(algorithm, 2).count("turn") == 16


@pytest.mark.parametrize(
    "turns_per_update, actions",
    [(1, [(4,), (3,), (2,), (1,), (0,)]), (2, [(3, 4), (1, 2), (0,)]), (None, [(0, 1, 2, 3, 4)])],
)
def test_with_order_parallel_a_step_has_several_actions_numbered_from_the_last(
    turns_per_update, actions
):
    algorithm = Algorithm(order="parallel", turns_per_update=turns_per_update)
    (update,) = plan_sweep(algorithm, 5).updates
    assert list(update.actions) == actions
    assert actions_per_update(algorithm, 5) == len(actions)
    numbers = action_numbers(algorithm, 5, np.arange(5))
    assert [number for turn in range(5) for number, own in enumerate(actions) if turn in own] == [
        *numbers
    ]
    each = Algorithm(turns_per_update=turns_per_update)
    assert [update.actions for update in plan_sweep(each, 5).updates] == [(own,) for own in actions]
    assert actions_per_update(each, 5) == 1


def test_steps_and_actions_of_a_billion_turns_are_counted_at_once():
    many = 10**9
    assert optimizer_steps(Algorithm(inner_epochs=3, turns_per_update=2), many) == 3 * many // 2
    assert optimizer_steps(Algorithm(order="parallel"), many) == 1
    assert actions_per_update(Algorithm(order="parallel"), many) == many


@functools.cache
def trajectories():
    """Two groups of four trajectories, each of three turns in one segment: room for everything."""
    rng = np.random.default_rng(1)
    return [
        Trajectory.of((cases.segment(rng, (0, 3, 2), (1, 1, 2), (2, 2, 1)),), float(i % 3), i // 4)
        for i in range(8)
    ]


PARALLEL = {
    "order": "parallel",
    "shapes": Shapes((24,), action=12, rows=3, trajectories=9, turns=3),
}
SWEEPS = {
    "fused": {},
    "apart": {"refresh": "separate"},
    "forward, old_policy=turn": {"order": "forward", "old_policy": "turn"},
    "epochs of minibatches": TWICE,
    "random": {"order": "random", "kl_coef": 0.0},
    "Clip-Cov, fused": {"ratio": "token", "covariance": {"kind": "clip", "low": -1.0}},
    "KL-Cov": KL_COV | TWICE,
    "critic": {"advantage": "gae", "critic": {"kind": "head"}, "ratio": "token"},
    "scorer of tokens": {"advantage": "istar", "estimator": {"scorer_epochs": 2}},
    "scorer of turns": {
        "advantage": "spa",
        "critic": {"kind": "head"},
        "estimator": {"scorer_epochs": 2},
    },
    "entropy in the first pass": {"advantage": "canon", "estimator": {"metric": "entropy"}},
    "parallel": PARALLEL,
    "moving": {"reference": {"every": 2}, "turns_per_update": 2},
}


def programs_of(learner, plan):
    """The learner's programs that a plan runs, in order."""
    begin = "score_in_full" if learner.finds_entropy else "score"
    by_turns = learner.scorer is not None and not learner.scorer.of_tokens
    names = {"score": begin, "reference": begin, "scores": "value" if by_turns else begin}
    names |= {"old": "score", "turn": "turn_step", "scorer": "scorer_step"}
    called = []
    for each in plan.passes:
        for number in range(each.times):
            called += [begin] * (number >= each.times - each.rescored)
            called.append(names.get(each.kind, each.kind.replace(" ", "_")))
    return called


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("iteration", [1, 2])
def test_a_sweep_runs_the_programs_of_its_plan(name, iteration):
    made, called = cases.learner(**SWEEPS[name]), []

    def wrap_program(program, own):
        run = made.wrap_program(program, own)
        return lambda *given: called.append(program) or run(*given)

    counted = dataclasses.replace(
        made, wrap_program=wrap_program, ema=0.9 if name == "moving" else None
    )
    state = cases.new_state(made.optimizer)
    if made.critic is not None:
        state = state._replace(critic=made.critic.init(state.params))
    if made.scorer is not None:
        state = state._replace(scorer=made.scorer.init(state.params))
    if name == "moving":
        copies = (jax.tree.map(jnp.copy, state.params) for _ in range(2))
        state = state._replace(ema=next(copies), reference=next(copies))
    reference = jax.tree.map(jnp.array, cases.policy()[1])
    _, metrics, _, steps = sweep(counted, state, reference, trajectories(), iteration=iteration)
    plan = counted.plan(3, iteration)
    assert called == programs_of(counted, plan)
    assert [step.turns for step in steps] == [
        update.turns for update in plan.updates for _ in range(update.steps)
    ]
    assert metrics["sweep/turns"] == len(plan.updates)
    assert metrics["sweep/steps"] == plan.count("turn") == optimizer_steps(made.algorithm, 3)
