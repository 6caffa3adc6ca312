"""What a sweep says that it learned: of each trajectory, and at each turn."""

import dataclasses
import functools

import learner_cases as cases
import numpy as np
import numpy_model as model
import numpy_twin as twin
import pytest
from metric_names import undeclared

from seeupo_jax.learner.sweep import sweep
from seeupo_jax.metric_table import STEPS
from seeupo_jax.types import CONTEXT, learnable

REVERSE = [(3,), (2,), (1,), (0,)]


@functools.cache
def reference():
    return cases.jittered(cases.policy()[1], 0.02)


def learner(**choices):
    """One that finds entropies, with the step of one that does not."""
    plain = cases.learner(**choices)
    made = dataclasses.replace(plain, entropy=True)
    return cases.with_programs(made, turn_step=plain.turn_step, refresh=plain.refresh)


def run(made, trajectories=None):
    state, metrics, stats, steps = sweep(
        made,
        cases.new_state(made.optimizer),
        reference(),
        cases.ragged() if trajectories is None else trajectories,
        iteration=3,
    )
    counted = {metric.counted for metric in STEPS}
    assert not undeclared(metrics)
    assert all(step.metrics.keys() <= counted | {"actions"} for step in steps)
    return cases.host(state), metrics, stats


@functools.cache
def default():
    return run(learner())


@functools.cache
def default_twin():
    return cases.twin_sweep(cases.learner(), cases.ragged(), REVERSE, ref_params=reference())


def test_entropies_change_no_bit_of_anything_else():
    state, metrics, stats = run(cases.learner())
    with_entropy, more, found = default()
    cases.assert_trees_equal(state, with_entropy)
    assert more.pop("rollout/entropy") > 0 and metrics == more
    for plain, full in zip(stats, found, strict=True):
        assert (plain is None) == (full is None)
        if plain is not None:
            cases.assert_trees_equal(plain.logp, full.logp)
            assert all(np.isnan(x_L).all() for x_L in plain.entropy)


def test_only_what_counts_was_learned_from():
    kept = [stats is not None for stats in default()[2]]
    assert kept == learnable(cases.ragged()).tolist() and not all(kept)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies_are_the_twins(temperature):
    made = cases.unshared(learner(), temperature=temperature)
    _, metrics, found = run(made)
    weights, every = cases.weights_of(cases.policy()[1]), []
    for trajectory, stats in zip(cases.ragged(), found, strict=True):
        if stats is None:
            continue
        for number, segment in enumerate(trajectory.segments):
            acted_L = segment.turn_L != CONTEXT
            given = weights, segment.tokens_L, cases.NUMPY_ARCH, temperature
            logp_L, _ = model.token_logps(*given)
            entropy_L, _ = model.token_entropies(*given)
            for got_L, wanted_L in (
                (stats.logp[number], logp_L),
                (stats.entropy[number], entropy_L),
            ):
                assert got_L.shape == segment.tokens_L.shape
                assert np.isnan(got_L[~acted_L]).all()
                np.testing.assert_allclose(got_L[acted_L], wanted_L[acted_L], rtol=1e-5, atol=1e-5)
            every.append(entropy_L[acted_L])
    np.testing.assert_allclose(metrics["rollout/entropy"], np.concatenate(every).mean(), rtol=1e-5)


@pytest.mark.parametrize("choices", [{"truncated": "mask"}, {"mask_above": 0.05}])
def test_the_logged_entropy_is_of_the_tokens_of_the_loss(choices):
    trajectories = cases.ragged()
    for cut in (0, 2, 3):
        trajectories[cut] = dataclasses.replace(trajectories[cut], stop="max_turns")
    _, metrics, _ = run(learner(**choices), trajectories)
    weights, trained, others = cases.weights_of(cases.policy()[1]), [], []
    for trajectory, keep in zip(trajectories, learnable(trajectories), strict=True):
        masked = "truncated" in choices and trajectory.truncated
        for segment in trajectory.segments if keep else ():
            logp_L, _ = model.token_logps(weights, segment.tokens_L, cases.NUMPY_ARCH, 1.0)
            entropy_L, _ = model.token_entropies(weights, segment.tokens_L, cases.NUMPY_ARCH, 1.0)
            of_loss_L = (np.exp(logp_L) <= choices.get("mask_above", 1)) & (not masked)
            acted_L = segment.turn_L != CONTEXT
            trained.append(entropy_L[acted_L & of_loss_L])
            others.append(entropy_L[acted_L & ~of_loss_L])
    wanted, rest = (np.concatenate(each) for each in (trained, others))
    np.testing.assert_allclose(metrics["rollout/entropy"], wanted.mean(), rtol=1e-5)
    assert abs(rest.mean() - wanted.mean()) > 1e-3


def test_weights_are_those_that_the_twins_steps_were_taken_by():
    wanted, (_, _, found) = default_twin(), default()
    # A step weighs its rows by the factors after the steps before it.
    before = [np.ones(8), *(step.cumulative_ratio_N for step in wanted.steps)]
    factor = dict(zip((3, 2, 1, 0), before, strict=False))
    moved = 0
    for number, (trajectory, stats) in enumerate(zip(cases.ragged(), found, strict=True)):
        if stats is None:
            continue
        advantage = wanted.advantage_N[number]
        np.testing.assert_allclose(stats.advantage, advantage, rtol=1e-5)
        turns = {int(t) for s in trajectory.segments for t in s.turn_L if t != CONTEXT}
        assert stats.weight_K.shape == (trajectory.turns,)
        for turn in range(trajectory.turns):
            expected = advantage * factor[turn][number] if turn in turns else np.nan
            np.testing.assert_allclose(stats.weight_K[turn], expected, rtol=1e-5)
        moved += np.ptp(stats.weight_K) > 1e-3
    assert moved >= 2


@pytest.mark.parametrize("choices", [{}, {"refresh": "separate", "inner_epochs": 2}])
def test_metrics_of_each_turn(choices):
    made = learner(**choices)
    _, metrics, found = run(made)
    observed = cases.observe(cases.learner(**choices), cases.ragged(), ref_params=reference())
    for update in observed.updates:
        ((turn,), steps) = update.turns, update.metrics
        weights = [w.weight_K[turn] for w in found if w is not None and len(w.weight_K) > turn]
        actions = sum(step["actions"] for step in steps)
        expected = {
            "weight_mean": np.mean(weights),
            "weight_max": np.abs(weights).max(),
            "clip_fraction": sum(step["clipped"] for step in steps) / actions,
            "kl": sum(step["kl"] for step in steps) / actions,
        }
        for name, value in expected.items():
            got = metrics[f"sweep/{name}/turn={turn + 1}"]
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-9)
        largest = max(step["weight_max"] for step in steps)
        np.testing.assert_allclose(metrics[f"sweep/weight_max/turn={turn + 1}"], largest, rtol=1e-5)
    assert {name.rpartition("=")[2] for name in metrics if "turn=" in name} == set("1234")


def test_turns_updated_together_share_a_factor_and_no_step():
    _, metrics, found = run(learner(turns_per_update=2))
    for turn in range(1, 5):
        assert f"sweep/weight_mean/turn={turn}" in metrics
        assert f"sweep/kl/turn={turn}" not in metrics
        assert f"sweep/clip_fraction/turn={turn}" not in metrics
    whole = found[0]
    assert whole.weight_K[2] == whole.weight_K[3] and whole.weight_K[0] == whole.weight_K[1]
    assert whole.weight_K[0] != whole.weight_K[2]


def test_a_turn_without_a_step_has_no_weight():
    _, metrics, found = run(learner(order="custom", custom_order=(2, 0), refresh="separate"))
    trained = [turn for turn in range(1, 5) if f"sweep/weight_max/turn={turn}" in metrics]
    assert trained == [1, 3]
    assert np.isnan(found[0].weight_K).tolist() == [False, True, False, True]


def test_a_sweep_without_turns_learned_nothing():
    silent = [dataclasses.replace(t, segments=()) for t in cases.ragged()]
    state, metrics, stats = run(learner(), silent)
    assert stats == [None] * len(silent) and metrics == {"sweep/turns": 0}


def test_the_old_policy_of_each_turn_does_not_replace_the_one_that_the_sweep_began_with():
    _, _, found = run(learner(old_policy="turn"))
    cases.assert_trees_equal([f and f.logp for f in found], [f and f.logp for f in default()[2]])
    spans = twin.step_pieces(cases.ragged(), range(9))
    assert len(spans) == sum(len(f.logp) for f in found if f is not None)
