"""A sweep that is stopped between two turns goes on, from files, to the same numbers."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import learner_cases as cases
import pytest

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.teacher_schema import Teacher
from seeupo_jax.learner import sweep as sweep_module
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.learner.sweep_state import SweepState
from seeupo_jax.learner.teacher import TeacherModel
from seeupo_jax.parallel.stop_signal import Stopped

# Of a teacher: its likeliest tokens, or else its term in advantages.
TEACHERS = {"a teacher's likeliest tokens": {"top_k": 3}, "a teacher": {"coef": 0.5}}
CASES = {
    "fused": {},
    "separate, old_policy=turn": {"inner_epochs": 2, "old_policy": "turn"},
    "fused, tis_clip, old_policy=turn": {"importance": {"clip": 1.1}, "old_policy": "turn"},
    "rejected tokens": {"importance": {"clip": 1.5, "method": "mask", "per": "token"}},
    "order=random": {"order": "random"},
    "Clip-Cov": {
        "ratio": "token",
        "covariance": {"kind": "clip", "low": -1.0, "share": 0.2},
    },
    "KL-Cov": {"ratio": "token", "covariance": {"kind": "kl", "share": 0.2}},
    "a clip range a turn": {"advantage": "a2tgpo", "clip_low": 0.01, "clip_high": 0.01},
    "fused, mask_above": {"advantage": "tree", "mask_above": 0.05},
    **dict.fromkeys(TEACHERS, {}),
}


def learner_of(name):
    """The learner of a case; a teacher is the reference policy."""
    made = cases.learner(**CASES[name])
    if name not in TEACHERS:
        return made
    teaching = Teacher(path="reference", **TEACHERS[name])
    taught = cases.unshared(made, teachers=[TeacherModel(None)], teaching=teaching)
    return cases.sharing(taught)


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
    state, metrics, stats, _ = run(learner_of(name))
    return cases.host(state), metrics, [*map(_arrays, stats)]


def _arrays(stats):
    return None if stats is None else vars(stats)


def stop_after(turns):
    """Asks to stop before the turn that comes after so many."""
    asked = iter([False] * turns)
    return lambda: next(asked, True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_stopped_sweep_goes_on_from_files_to_the_same_bits(tmp_path, name, turns):
    learner = learner_of(name)
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
    # Before each, while two may be under way; and after the last.
    assert received == [(0, 4), (0, 4), (1, 4), (2, 4), (4, 4)]


ALL_TURNS = Shapes((32,), action=16, rows=4, trajectories=12, turns=4)  # of a trajectory at once
STEPS = {
    **{name: (choices, 4) for name, choices in CASES.items()},
    "minibatches": ({"inner_epochs": 2, "minibatches_per_turn": 2}, 4),
    "merged turns": ({"turns_per_update": 3}, 2),
    "order=parallel": (
        {"order": "parallel", "inner_epochs": 2, "minibatches_per_turn": 2, "shapes": ALL_TURNS},
        1,
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("skipped", [False, True])
def test_the_steps_that_are_done_reach_their_total_at_last_and_never_fall(name, skipped):
    choices, total = STEPS[name]
    learner, received = cases.learner(**choices), []
    params = jax.tree.map(lambda x: x * jnp.nan if skipped else x, cases.policy()[1])
    state = cases.new_state(learner.optimizer, params)
    _, metrics, *_ = run(learner, state, on_step=lambda *logged: received.append(logged))
    assert metrics["sweep/updates_skipped"] == (metrics["sweep/steps"] if skipped else 0)
    assert received == sorted(received) and received[-1] == (total, total)


def test_the_steps_of_branching_episodes_reach_their_total():
    received = []
    learner = cases.learner(advantage="tree")
    run(learner, played=cases.trees(), on_step=lambda *logged: received.append(logged))
    assert received[-1][0] == received[-1][1] > 1


def test_the_steps_of_a_sweep_that_resumes_begin_where_it_stopped_and_reach_their_total():
    learner, received = cases.learner(), []
    with pytest.raises(SweepStopped) as stopped:
        run(learner, stop=stop_after(3), on_step=lambda *logged: received.append(logged))
    assert received[-1] == (2, 4)  # the third may be under way
    received.clear()
    resume = stopped.value.arrays, stopped.value.notes
    run(learner, resume[0]["state"], resume=resume, on_step=lambda *each: received.append(each))
    assert received == [(3, 4), (4, 4)]


def test_a_sweep_without_a_step_reports_none():
    run(
        cases.learner(advantage="tree", mask_above=1e-9),
        on_step=lambda *_: pytest.fail("no step was taken"),
    )


@pytest.mark.sampled(1)
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
