"""A sweep that is stopped between two turns goes on, from files, to the same numbers."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import learner_cases as cases
import pytest

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.learner import sweep as sweep_module
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.learner.sweep_state import SweepState
from seeupo_jax.parallel.stop_signal import Stopped

CASES = {
    "fused": {},
    "separate, old_policy=turn": {"inner_epochs": 2, "old_policy": "turn"},
    "fused, tis_clip, old_policy=turn": {"tis_clip": 1.1, "old_policy": "turn"},
    "order=random": {"order": "random"},
    "Clip-Cov": {
        "ratio": "token",
        "covariance": "clip",
        "covariance_low": -1.0,
        "covariance_share": 0.2,
    },
    "KL-Cov": {"ratio": "token", "covariance": "kl", "covariance_share": 0.2},
    "a clip range a turn": {"advantage": "a2tgpo", "clip_low": 0.01, "clip_high": 0.01},
    "fused, mask_above": {"advantage": "tree", "mask_above": 0.05},
}


@functools.cache
def trajectories():
    return cases.as_sampled(cases.ragged(), spread=1.0)


@functools.cache
def reference():
    return cases.jittered(cases.policy()[1], 0.02)


def run(learner, state=None, played=None, **rest):
    state = cases.new_state(learner.optimizer) if state is None else state
    played = trajectories() if played is None else played
    return sweep(learner, state, reference(), played, iteration=3, **rest)


@functools.cache
def uninterrupted(name):
    """The state on the host, the metrics and the statistics after a sweep that is not stopped."""
    state, metrics, stats, _ = run(cases.learner(**CASES[name]))
    return cases.host(state), metrics, [*map(_arrays, stats)]


def _arrays(stats):
    return None if stats is None else vars(stats)


def stop_after(turns):
    """Asks to stop before the turn that comes after so many."""
    asked = iter([False] * turns)
    return lambda: next(asked, True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_stopped_sweep_goes_on_from_files_to_the_same_bits(tmp_path, name, turns):
    learner = cases.learner(**CASES[name])
    state, metrics, stats = uninterrupted(name)
    with pytest.raises(Stopped) as stopped:
        run(learner, stop=stop_after(turns))
    assert stopped.value.notes["done"] == turns
    files = Checkpoints(tmp_path, 1)
    files.save(3, stopped.value.arrays, json.loads(json.dumps(stopped.value.notes)))
    example = stopped_arrays(learner, cases.new_state(learner.optimizer), trajectories())
    _, arrays, notes = files.restore(example)
    files.close()
    arrays = cases.reread(arrays)
    resumed, resumed_metrics, again, _ = run(learner, arrays["state"], resume=(arrays, notes))
    cases.assert_trees_equal([*map(_arrays, again)], stats)
    cases.assert_trees_equal(resumed, state)
    assert resumed_metrics == metrics


def test_it_can_be_stopped_again_and_again():
    learner = cases.learner()
    state, metrics, _ = uninterrupted("fused")
    resume, given = None, None
    for done in (1, 2, 3):
        with pytest.raises(SweepStopped) as stopped:
            run(learner, given, stop=stop_after(1), resume=resume)
        assert stopped.value.notes["done"] == done
        resume = stopped.value.arrays, stopped.value.notes
        given = stopped.value.arrays["state"]
    resumed, resumed_metrics, *_ = run(learner, given, resume=resume)
    cases.assert_trees_equal(resumed, state)
    assert resumed_metrics == metrics


def test_the_host_is_never_far_ahead_of_the_device(monkeypatch):
    waited = []
    block = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(len(x)) or block(x))
    run(cases.learner())
    assert waited == [1, 1]  # of four turns' steps, before the third and before the fourth


def test_a_sweep_says_how_many_of_its_steps_the_device_has_done():
    received = []
    run(cases.learner(), on_step=lambda *logged: received.append(logged))
    assert received == [(0, 4), (0, 4), (1, 4), (2, 4)]  # before each; two may be under way


@pytest.mark.parametrize(
    "choices, fetches",
    [
        ({}, False),
        ({"old_policy": "turn"}, False),
        ({"old_policy": "turn", "inner_epochs": 2}, True),
    ],
)
def test_no_turn_waits_for_what_the_one_before_computes(choices, fetches, monkeypatch):
    """Nothing is fetched from the device; but by passes of their own for old log-probabilities."""
    Array, fetched, found = type(jnp.zeros(())), [], []
    value, with_logp, update_turn = Array._value, SweepState.with_logp, sweep_module.update_turn

    def watched(*given, **options):
        before = len(fetched)
        state = update_turn(*given, **options)
        found.append(len(fetched) > before)
        return state

    def fetch(get):
        return lambda *given: fetched.append(get) or get(*given)

    monkeypatch.setattr(Array, "_value", property(fetch(value.fget)))
    monkeypatch.setattr(SweepState, "with_logp", fetch(with_logp))  # whole arrays, by another way
    monkeypatch.setattr(sweep_module, "update_turn", watched)
    # Chunks hold every refresh: they are as long as rows, and no turn has several segments.
    roomy = dataclasses.replace(cases.SHAPES, lengths=(24,))
    whole = [each for each in trajectories() if len(each.segments) == 1]
    run(cases.learner(shapes=roomy, **choices), played=whole)
    assert fetched and found and set(found) == {fetches}
