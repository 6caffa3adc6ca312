"""Moments per turn: a step on a turn reads and writes those of its turn alone."""

import json

import jax
import learner_cases as cases
import numpy as np
import optax
import pytest

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.learner.optimization.turn_moments import of_turn, per_turn
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.parallel.device_memory import device_bytes

REVERSE = [(3,), (2,), (1,), (0,)]
RATE = 0.01


def learner(**choices):
    return cases.learner(optimizer=cases.recording("adam", RATE), **choices)


def state_of(made, turns=4):
    return cases.new_state(per_turn(made.optimizer, turns))


def run(made, state, iteration=1, **rest):
    return sweep(made, state, cases.policy()[1], cases.ragged(), iteration=iteration, **rest)


def counts(state):
    """Of the steps that each turn's state of the optimizer has seen."""
    sets = [jax.tree.leaves(own, is_leaf=_is_adam) for own in state.opt_state.sets]
    return [int(x.count) for own in sets for x in own if _is_adam(x)]


def _is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_sweep_is_the_twins_with_an_optimizer_for_each_turn(epochs):
    made = learner(moments="turn", inner_epochs=epochs)
    train, *_ = run(made, state_of(made))
    rest = {"optimizer": "adam", "learning_rate": RATE}
    wanted, shared = (
        cases.twin_sweep(made, cases.ragged(), REVERSE, moments=moments, **rest).weights
        for moments in ("turn", "shared")
    )
    # Adam divides by gradients that may be nearly 0: those of rarely seen tokens.
    for name, weight in cases.weights_of(cases.host(train.params)).items():
        np.testing.assert_allclose(weight, wanted[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert max(np.abs(wanted[name] - shared[name]).max() for name in wanted) > 1e-3
    assert counts(train) == [epochs] * 4 and train.step == 4 * epochs
    train, *_ = run(made, train, iteration=2)
    assert counts(train) == [2 * epochs] * 4


def test_moments_take_so_many_times_the_memory_and_no_program_more():
    made, shared = learner(moments="turn"), learner()
    state = state_of(made, turns=5)
    plain = cases.new_state(shared.optimizer)
    assert device_bytes(state.opt_state) == 5 * device_bytes(plain.opt_state)
    assert made.turn_step.func is shared.turn_step.func
    one = of_turn(state, (2,))
    assert jax.tree.structure(one) == jax.tree.structure(plain)


def test_a_turn_beyond_those_of_a_run_is_told():
    made = learner(moments="turn")
    with pytest.raises(ValueError, match="has 4 turns; allowed with moments=turn: at most 3"):
        run(made, state_of(made, turns=3))


def test_a_stopped_sweep_resumes_to_the_same_bits(tmp_path):
    made = learner(moments="turn")
    whole, metrics, *_ = run(made, state_of(made))
    asked = iter([False, False])
    with pytest.raises(SweepStopped) as stopped:
        run(made, state_of(made), stop=lambda: next(asked, True))
    assert counts(stopped.value.arrays["state"]) == [0, 0, 1, 1]
    files = Checkpoints(tmp_path, 1)
    files.save(1, stopped.value.arrays, json.loads(json.dumps(stopped.value.notes)))
    _, arrays, notes = files.restore(stopped_arrays(made, state_of(made), cases.ragged()))
    files.close()
    arrays = cases.reread(arrays)
    state, again, *_ = run(made, arrays["state"], resume=(arrays, notes))
    cases.assert_trees_equal(cases.host(state), cases.host(whole))
    assert again == metrics


@pytest.mark.parametrize("choices", [{"moments": "turn"}, {"advantage": "istar"}])
def test_a_warm_up_that_counts_steps_is_refused(choices):
    """Moments of each turn count their own steps; so does a model that scores turns."""
    values = {"algorithm": choices, "optimizer": {"warmup_steps": 3}}
    with pytest.raises(
        ValueError, match=r"^config\.optimizer\.warmup_steps: got 3 with .*; allowed"
    ):
        from_dict(values)
