"""The coefficient of the KL penalty is adapted, and the reference policy moves, both as said."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import numpy_model as model
import pytest

from seeupo_jax.algorithms.kl_control import adapted_kl_coef
from seeupo_jax.algorithms.surrogate import kl_estimate
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.learner.reference_policy import ema_update, sampled_kl
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.parallel.device_memory import device_bytes

REVERSE = [(3,), (2,), (1,), (0,)]
KL_COEF = 0.375  # of the state, unlike any of a configuration


@functools.cache
def reference():
    return cases.jittered(cases.policy()[1], 0.02)


def learner(**choices):
    given = {"kl_control": {"target": 0.05, "horizon": 70.0}, "reference": {"every": 3}}
    return cases.learner(**given | choices)


def state_of(made):
    """A state that adapts, with a reference policy of its own."""
    own = jax.tree.map(jnp.array, reference())
    return cases.new_state(made.optimizer)._replace(reference=own, kl_coef=jnp.float32(KL_COEF))


@pytest.mark.parametrize(
    "kl, trajectories, wanted",
    [
        (0.05, 64, 0.1),  # at the target
        (0.055, 64, 0.1 * (1 + 0.1 * 64 / 640)),
        (0.045, 64, 0.1 * (1 - 0.1 * 64 / 640)),
        (9.0, 64, 0.1 * (1 + 0.2 * 64 / 640)),  # the error is bounded
        (0.0, 64, 0.1 * (1 - 0.2 * 64 / 640)),
        (0.0, 10**6, 0.08),  # and so is the iteration's share of the horizon
    ],
)
def test_ppos_controller_by_hand(kl, trajectories, wanted):
    coef = adapted_kl_coef(0.1, kl, target=0.05, horizon=640, trajectories=trajectories)
    np.testing.assert_allclose(coef, wanted, rtol=1e-12)


def test_the_kl_that_is_compared_is_the_losses_estimate():
    rng = np.random.default_rng(0)
    logp, ref_logp = (-rng.exponential(2.0, 50).astype(np.float32) for _ in range(2))
    ref_logp[:2] += 60, -60  # beyond both bounds
    np.testing.assert_allclose(
        sampled_kl(logp, ref_logp), kl_estimate(logp, ref_logp).mean(), rtol=1e-5
    )


def test_the_states_coefficient_weighs_the_loss_and_is_adapted_by_what_was_sampled():
    made = learner()
    observed = cases.observe(made, cases.ragged(), state=state_of(made), ref_params={})
    wanted = cases.twin_sweep(
        made, cases.ragged(), REVERSE, ref_params=reference(), kl_coef=KL_COEF
    )
    np.testing.assert_allclose(observed.losses, [s.loss for s in wanted.steps], rtol=1e-5)
    params = cases.weights_of(observed.state.params)
    for name, weight in wanted.weights.items():
        np.testing.assert_allclose(params[name], weight, rtol=1e-5, atol=1e-5, err_msg=name)
    metrics = observed.metrics
    assert metrics["sweep/kl_coef"] == KL_COEF and metrics["sweep/kl_sampled"] > 0
    adapted = adapted_kl_coef(
        KL_COEF, metrics["sweep/kl_sampled"], target=0.05, horizon=70.0, trajectories=7
    )
    assert observed.state.kl_coef == np.float32(adapted) != KL_COEF


def test_the_kl_that_adapts_is_of_all_action_tokens_those_that_are_masked_too():
    made = learner(mask_above=0.05)
    _, metrics, *_ = sweep(made, state_of(made), {}, cases.ragged(), iteration=1)
    assert 0.1 < metrics["sweep/masked_fraction"] < 0.9
    weights, kl = [cases.weights_of(cases.policy()[1]), cases.weights_of(reference())], []
    for segment in (part for t in cases.ragged() if not t.failed for part in t.segments):
        own_L, ref_L = (
            model.token_logps(each, segment.tokens_L, cases.NUMPY_ARCH, made.temperature)[0]
            for each in weights
        )
        difference_A = (ref_L - own_L)[segment.turn_L >= 0]
        kl += [*(np.exp(difference_A) - difference_A - 1)]
    np.testing.assert_allclose(metrics["sweep/kl_sampled"], np.mean(kl), rtol=1e-3)


def test_a_penalty_in_the_reward_has_the_states_coefficient_and_the_loss_none():
    made = learner(kl_in="reward", scale="none")
    given = {"state": state_of(made), "ref_params": reference(), "kl_coef": KL_COEF}
    observed, wanted = cases.assert_equal_to_the_twin(made, cases.ragged(), REVERSE, **given)
    credited = [any(np.any(credit_L) for credit_L in own) for own in wanted.credit]
    assert credited.count(True) == 7 and observed.metrics["sweep/kl_coef"] == KL_COEF


@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_the_reference_policy_moves_after_every_so_many_iterations(decay):
    made = cases.unshared(learner(reference={"every": 3, "decay": decay})) if decay else learner()
    before = cases.host(state_of(made).reference)
    train, *_ = sweep(made, state_of(made), {}, cases.ragged(), iteration=2)
    cases.assert_trees_equal(cases.host(train.reference), before)
    train, *_ = sweep(made, state_of(made), {}, cases.ragged(), iteration=3)
    params, after = cases.host(train.params), cases.host(train.reference)
    if decay == 0:
        cases.assert_trees_equal(after, params)
        return
    wanted = jax.tree.map(lambda ref, own: 0.75 * ref + 0.25 * own, before, params)
    cases.assert_trees_close(after, wanted, 1e-6)


@pytest.mark.parametrize("nothing", ["all failed", "all too likely"])
def test_an_iteration_without_a_step_ends_as_any_other(nothing):
    """The reference policy and the average of the parameters move to where the policy is."""
    failed = nothing == "all failed"
    choices = {} if failed else {"mask_above": 1e-6}
    made = cases.unshared(learner(reference={"every": 3, "decay": 0.75}, **choices), ema=0.5)
    state = state_of(made)
    state = state._replace(ema=jax.tree.map(lambda x: x + 1, state.params))
    before = cases.host(state)
    stop = "env_error" if failed else "done"
    trajectories = [dataclasses.replace(t, stop=stop) for t in cases.ragged()]
    train, metrics, _, steps = sweep(made, state, {}, trajectories, iteration=3)
    assert metrics["sweep/turns"] == 0 and not steps
    train = cases.host(train)
    cases.assert_trees_equal(train.params, before.params)
    wanted = jax.tree.map(lambda ref, own: 0.75 * ref + 0.25 * own, before.reference, before.params)
    cases.assert_trees_close(train.reference, wanted, 1e-6)
    cases.assert_trees_close(train.ema, jax.tree.map(lambda x: x + 0.5, before.params), 1e-6)
    assert train.kl_coef == before.kl_coef


def test_a_policy_that_the_reference_moved_to_can_be_donated():
    """A program that returned its argument would share memory with the parameters."""
    params = jnp.arange(8.0)
    own = jax.jit(functools.partial(ema_update, decay=0.0))(params, jnp.zeros(8))
    jax.jit(lambda x: x + 1, donate_argnums=0)(params)
    np.testing.assert_array_equal(own, np.arange(8.0))


def test_a_stopped_sweep_resumes_with_both_to_the_same_bits(tmp_path):
    made = learner()
    whole, metrics, *_ = sweep(made, state_of(made), {}, cases.ragged(), iteration=3)
    asked = iter([False, False])
    with pytest.raises(SweepStopped) as stopped:

        def stop():
            return next(asked, True)

        sweep(made, state_of(made), {}, cases.ragged(), iteration=3, stop=stop)
    files = Checkpoints(tmp_path, 1)
    files.save(3, stopped.value.arrays, json.loads(json.dumps(stopped.value.notes)))
    _, arrays, notes = files.restore(stopped_arrays(made, state_of(made), cases.ragged()))
    files.close()
    arrays = cases.reread(arrays)
    resume = arrays, notes
    state, again, *_ = sweep(made, arrays["state"], {}, cases.ragged(), iteration=3, resume=resume)
    cases.assert_trees_equal(cases.host(state), cases.host(whole))
    assert again == metrics
    assert device_bytes(whole.reference) == device_bytes(whole.params)
