"""A sweep of one step on what its own policy sampled leaves out the old policy's pass."""

import dataclasses

import jax
import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.program_warming import sweep_programs
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_plan import plan_sweep, scores_old_policy
from seeupo_jax.types import Trajectory

ALL = {"turns_per_update": None, "cumulative_ratio": False}
# One action each, of one turn: SeeUPO's own order then takes one step too.
SINGLE = Shapes((8, 24), action=8, rows=3, trajectories=9, turns=1)
SWEEPS = {
    "grpo": (ALL | {"ratio": "token", "scale": "group"}, {}),
    "gspo, no reference policy": (ALL | {"kl_coef": 0.0}, {}),
    "gmpo": (ALL | {"objective": "gmpo"}, {}),
    "dppo": (ALL | {"ratio": "token", "objective": "dppo_tv"}, {}),
    "logp, product": (ALL | {"objective": "logp", "ratio": "product"}, {}),
    "parallel": ({"order": "parallel", "cumulative_ratio": False}, {}),
    "old_policy=turn": (ALL | {"old_policy": "turn"}, {}),
    "entropy bonus": (ALL | {"entropy_coef": 0.1}, {}),
    "a single turn": ({}, {"shapes": SINGLE}),
    "critic": (ALL | {"advantage": "gae", "critic": {"kind": "head"}, "ratio": "token"}, {}),
}


def observed(made, trajectories):
    """The result of a sweep, and the names of the programs that it called."""
    called = []

    def wrap_program(program, own):
        run = made.wrap_program(program, own)
        return lambda *given: called.append(program) or run(*given)

    counted = dataclasses.replace(made, wrap_program=wrap_program)
    state = cases.new_state(made.optimizer)
    if made.critic is not None:
        state = state._replace(critic=made.critic.init(state.params))
    reference = cases.jittered(cases.policy()[1], 0.02)
    return sweep(counted, state, reference, trajectories, iteration=1), called


@pytest.mark.parametrize("name", SWEEPS)
def test_a_single_step_is_the_same_without_the_pass(name):
    choices, fixed = SWEEPS[name]
    made = cases.unshared(cases.learner(**fixed, **choices), entropy=True)
    trajectories = cases.ragged(3)
    if made.shapes.turns == 1:
        rng = np.random.default_rng(1)
        segments = [cases.segment(rng, (0, 2, 2 + i)) for i in range(4)]
        trajectories = [Trajectory.of((s,), float(i % 2), 0) for i, s in enumerate(segments)]
    (wanted, before), (found, after) = (
        observed(dataclasses.replace(made, on_policy=on_policy), trajectories)
        for on_policy in (False, True)
    )
    scoring = [*before]
    for program in after:
        scoring.remove(program)
    assert "score_in_full" in scoring and not {*scoring} - {"score", "score_in_full"}
    for one, other in zip(
        jax.tree.leaves(found.train.params), jax.tree.leaves(wanted.train.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert found.metrics.keys() == wanted.metrics.keys()
    counted = {"sweep/tokens"} if "old_policy" in choices else set()  # of that pass too
    for metric in wanted.metrics.keys() - counted:
        value = wanted.metrics[metric]
        np.testing.assert_allclose(
            found.metrics[metric], value, rtol=1e-4, atol=1e-6, err_msg=metric
        )
    for one, other in zip(found.stats, wanted.stats, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
                vars(one),
                vars(other),
            )
    assert found.metrics["logp/sampler_trainer_gap"] > 0
    assert np.isfinite(found.metrics["rollout/entropy"])


@pytest.mark.parametrize(
    "choices",
    [
        {},  # a step per turn
        ALL | {"inner_epochs": 2},
        ALL | {"minibatches_per_turn": 2},
        ALL | {"kl_in": "reward"},
        ALL | {"mask_above": 0.9},
        ALL | {"importance": {"clip": 2.0}},
        ALL | {"truncated": "mask"},
        ALL | {"advantage": "otb"},
        ALL | {"advantage": "canon", "estimator": {"metric": "entropy"}},
        ALL | {"advantage": "istar"},
        ALL | {"ratio": "token", "covariance": {"kind": "clip"}},
    ],
)
def test_what_reads_the_old_policy_before_the_step_keeps_the_pass(choices):
    assert scores_old_policy(Algorithm(**choices), 3)
    assert not scores_old_policy(Algorithm(**ALL), 3)


@pytest.mark.parametrize("choices", [{}, {"refresh": "separate"}, ALL], ids=str)
def test_the_programs_of_a_single_turn_can_be_made(choices):
    """None refreshes weights, which no later turn reads."""
    made = dataclasses.replace(cases.learner(shapes=SINGLE, **choices), on_policy=True)
    state, reference = cases.new_state(made.optimizer), cases.policy()[1]
    names = set()
    for program in sweep_programs(made, 9):
        program.lower(state, reference)
        names.add(program.name.partition(" ")[0])
    assert not made.scores_old_policy and "sweep/turn" in names
    assert not names & {"sweep/refresh", "sweep/old"}


def test_the_plan_without_the_pass():
    plan = plan_sweep(Algorithm(**ALL, old_policy="turn"), 3, score=False)
    assert [each.kind for each in plan.passes] == ["reference", "turn"]
    plan = plan_sweep(Algorithm(**ALL, kl_coef=0.0), 3, score=False)
    assert [each.kind for each in plan.passes] == ["turn"]


def test_what_another_policy_sampled_is_not_swept_so():
    made = cases.unshared(cases.learner(**ALL), on_policy=True)
    other = [dataclasses.replace(t, policy_version=4) for t in cases.ragged(3)]
    with pytest.raises(ValueError, match="max_lag: got 0 for trajectories of policy 4, "):
        observed(made, other)
