"""A sweep over adapters per turn: what moves, what stays, and the weights M.

The turns of `ragged` have three adapters, of which the last serves its third and fourth turn.
"""

import dataclasses
import functools
import json

import jax
import learner_cases as cases
import numpy as np
import numpy_model as model
import pytest

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration import schema
from seeupo_jax.learner.batching import (
    SegmentBatch,
    Shapes,
    all_actions,
    batch_shapes,
    lay_out,
    turn_batch,
)
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.adapter_moments import per_adapter
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.lora import TARGETS, attach_adapters, merge_adapters
from seeupo_jax.policy.network import join_params, split_model, split_trainable
from seeupo_jax.policy.turn_adapters import adapter_of

ADAPTERS = 3
LORA = LoraAdapters(rank=4, alpha=6.0, targets=TARGETS, per_turn=ADAPTERS)
TRAJECTORIES = cases.ragged()
SHAPES = Shapes((8, 24), action=16, rows=3, trajectories=9, turns=4)
EXACT = {"weight_clip": None, "refresh": "separate"}


@functools.cache
def trained(adapters=ADAPTERS, *, alike=False):
    """The network, adapters that matter (all turns' alike, or not), and frozen parameters."""
    network, params = cases.policy()
    lora = dataclasses.replace(LORA, per_turn=adapters)
    plain = network.bind(jax.device_put(params))
    one = attach_adapters(plain, dataclasses.replace(lora, per_turn=0), seed=7)
    stacked = attach_adapters(plain, lora, seed=7)
    noisy = cases.jittered(split_trainable(*split_model(one))[0], 0.1)
    network, params = split_model(stacked)
    own, frozen = split_trainable(network, params)
    if not adapters:
        own = noisy
    elif alike:
        own = jax.tree.map(lambda x, noise: np.stack([noise] * adapters), own, noisy)
    else:
        own = cases.jittered(own, 0.1)
    return network, own, frozen


def learner_of(
    optimizer="sgd", *, adapters=ADAPTERS, alike=False, rate=cases.RATE, clip=None, **choices
):
    """A learner, and the state that it begins with."""
    network, own, frozen = trained(adapters, alike=alike)
    made = cases.recording(optimizer, rate, clip)
    made = per_adapter(made, adapters, 0) if adapters else made
    algorithm = schema.Algorithm(**(EXACT | choices))
    learner = Learner(network, made, algorithm, SHAPES, 1.0, 5, frozen=frozen)
    return learner, cases.new_state(made, own)


def observed(learner, state, *, reference=1.0):
    """The result of a sweep, and what its programs returned, on the host, in their order.

    Args:
      reference: the reference policy's adapters, as a multiple of the policy's.
    """
    calls = []

    def call(name, program, *arguments):
        out = program(*arguments)
        calls.append((name, cases.host(jax.tree.map(jax.numpy.copy, out))))
        return out

    watched = dataclasses.replace(
        learner, wrap_program=lambda name, own: functools.partial(call, name, own)
    )
    other = jax.device_put(jax.tree.map(lambda x: reference * x, cases.host(state.params)))
    return sweep(watched, state, other, TRAJECTORIES, iteration=3), calls


def scored(learner, params):
    """Log-probabilities of every sampled token, one array a segment, by the learner's program."""
    rows = learner.rows(TRAJECTORIES)
    layout = lay_out(rows, all_actions(rows), learner.shapes, learner.shapes.long)
    room = {"action": learner.shapes.longest, "copies": learner.adapters}
    batch = turn_batch(rows, layout, learner.shapes, {}, **room)
    logp_PA = np.asarray(learner.scored(jax.device_put(params), batch).logp_PA)
    found = [np.full(len(tokens), np.nan, np.float32) for tokens in rows.tokens]
    for span, logp_A in zip(layout.spans, logp_PA, strict=False):
        found[span.segment][span.position_A] = logp_A[: span.position_A.size]
    return found


def twin_logp(own):
    """The same from whole matrices, with the turn's adapter merged, in NumPy and float64."""
    network, _, frozen = trained()
    bound = network.bind(join_params(jax.device_put(own), frozen))
    merged = [merge_adapters(adapter_of(bound, k)) for k in range(ADAPTERS)]
    weights = [cases.weights_of(cases.host(split_model(each)[1])) for each in merged]
    rows, found = learner_of()[0].rows(TRAJECTORIES), []
    for tokens_L, turn_L in zip(rows.tokens, rows.turn, strict=True):
        logps = [
            model.token_logps(each, tokens_L, cases.NUMPY_ARCH, temperature=1.0)[0]
            for each in weights
        ]
        adapter_L = np.minimum(turn_L, ADAPTERS - 1)
        chosen_L = [logps[k][i] if k >= 0 else np.nan for i, k in enumerate(adapter_L)]
        found.append(np.array(chosen_L))
    return rows, found


def of_turns(rows, numbers, turns):
    """The numbers at the tokens of some turns."""
    pairs = zip(numbers, rows.turn, strict=True)
    return np.concatenate([x_L[np.isin(turn_L, turns)] for x_L, turn_L in pairs])


def slices(tree, number):
    return jax.tree.map(lambda x: x[number], tree)


def test_each_turn_is_scored_under_its_own_adapter():
    learner, state = learner_of()
    rows, wanted = twin_logp(cases.host(state.params))
    found = scored(learner, cases.host(state.params))
    for turn in range(4):
        pair = of_turns(rows, found, [turn]), of_turns(rows, wanted, [turn])
        np.testing.assert_allclose(*pair, atol=2e-5)
    shared = scored(*(lambda made, state: (made, state.params))(*learner_of(adapters=0)))
    assert np.abs(of_turns(rows, found, [1]) - of_turns(rows, shared, [1])).max() > 1e-3


@pytest.mark.parametrize("order", ["reverse", "forward"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_on_a_turn_changes_no_bit_of_the_others(optimizer, order):
    """Neither log-probabilities, nor parameters, moments, counts of steps or decayed weights."""
    learner, state = learner_of(optimizer, rate=0.01, clip=0.01, order=order)
    before, rows = cases.host((state.params, state.opt_state)), learner.rows(TRAJECTORIES)
    logp = scored(learner, before[0])
    result, calls = observed(learner, state)
    steps = [out.train for name, out in calls if name == "turn_step"]
    turns = [3, 2, 1, 0] if order == "reverse" else [0, 1, 2, 3]
    assert [step.turns for step in result.steps] == [(turn,) for turn in turns]
    for turn, train in zip(turns, steps, strict=True):
        adapter, after = min(turn, ADAPTERS - 1), scored(learner, train.params)
        own = [t for t in range(4) if min(t, ADAPTERS - 1) == adapter]
        others = [t for t in range(4) if t not in own]
        assert np.abs(of_turns(rows, after, own) - of_turns(rows, logp, own)).max() > 1e-5
        np.testing.assert_array_equal(of_turns(rows, after, others), of_turns(rows, logp, others))
        now = train.params, train.opt_state
        for number in range(ADAPTERS):
            if number != adapter:
                cases.assert_trees_equal(slices(now, number), slices(before, number))
            else:
                moved = jax.tree.map(
                    lambda x, y: bool((x != y).any()),
                    *(slices(x[0], number) for x in (now, before)),
                )
                assert all(jax.tree.leaves(moved))
        before, logp = now, after


@pytest.mark.parametrize("ratio", ["geometric", "product"])
@pytest.mark.parametrize("old_policy", ["iteration", "turn"])
def test_m_is_the_product_of_the_exact_ratios_of_the_updated_turns(ratio, old_policy):
    """Steps on other turns change no ratio, so either old policy gives the same product."""
    learner, state = learner_of(ratio=ratio, old_policy=old_policy)
    first = cases.host(state.params)
    result, calls = observed(learner, state)
    refreshed = [out for name, out in calls if name == "refresh"]
    params = [out.train.params for name, out in calls if name == "turn_step"]
    rows, old = twin_logp(first)
    wanted_N = np.ones(len(TRAJECTORIES))
    for turn, after, got_N in zip([3, 2, 1], params, refreshed, strict=False):
        _, new = twin_logp(after)
        ratio_N = np.ones(len(TRAJECTORIES))
        for number in range(len(TRAJECTORIES)):
            own = [
                (new[s] - old[s])[rows.turn[s] == turn]
                for s in np.flatnonzero(rows.trajectory_S == number)
            ]
            delta = np.concatenate(own) if own else np.zeros(0)
            if delta.size:
                log = delta.mean() if ratio == "geometric" else delta.sum()
                ratio_N[number] = np.exp(log)
        if turn == 3:  # the second step on the last adapter moves this turn again, after its ratio
            assert np.abs(ratio_N - 1).max() > 1e-3
        wanted_N *= ratio_N
        np.testing.assert_allclose(got_N, wanted_N, rtol=2e-5)
        if old_policy == "turn":
            old = [np.where(rows.turn[s] < turn, new[s], old[s]) for s in range(len(old))]
    assert len(refreshed) == 3 and len(result.steps) == 4


def test_adapters_that_begin_alike_have_the_gradients_of_one_in_parts():
    """The loss of all turns together is the same, and the parts add up to its gradient."""
    parallel = {"order": "parallel", "turns_per_update": 1, "scale": "none"}
    (several, state), (one, alone) = (
        learner_of(adapters=adapters, alike=True, **parallel) for adapters in (ADAPTERS, 0)
    )
    (result, calls), (wanted, _) = observed(several, state), observed(one, alone)
    for name in ("sweep/loss", "sweep/weight_max", "sweep/clip_fraction"):
        np.testing.assert_allclose(result.metrics[name], wanted.metrics[name], rtol=1e-5)
    parts, whole = (cases.host(each.train.opt_state[0]) for each in (result, wanted))
    assert len(result.steps) == 1
    for got, all_turns in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert (np.abs(got).reshape(ADAPTERS, -1).max(axis=1) > 0).all()
        largest = np.abs(all_turns).max()
        np.testing.assert_allclose(got.sum(axis=0), all_turns, atol=1e-5 * largest + 1e-7)
    assert [name for name, _ in calls if name == "turn_step"] == ["turn_step"]


@pytest.mark.parametrize(
    "choices",
    [
        {"order": "parallel", "turns_per_update": None, "ratio": "token"},
        {"order": "parallel", "turns_per_update": None, "ratio": "geometric"},
        {"order": "reverse", "turns_per_update": 3},
    ],
)
def test_actions_of_several_adapters_have_one_ratio(choices):
    """A joint step on whole trajectories (GRPO, GSPO) is that of one adapter, in parts.

    With a penalty towards another policy, since the surrogate of the first step is a sum of
    advantages, which is 0 where they are normalised: the loss would compare rounding errors.
    """
    (several, state), (one, alone) = (
        learner_of(adapters=adapters, alike=True, inner_epochs=1, kl_coef=0.1, **choices)
        for adapters in (ADAPTERS, 0)
    )
    (result, calls), (wanted, others) = (
        observed(*each, reference=0.5) for each in ((several, state), (one, alone))
    )
    first, one_step = (
        next(out for name, out in each if name == "turn_step") for each in (calls, others)
    )
    losses = first.metrics["loss"], one_step.metrics["loss"]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    parts, whole = first.train.opt_state[0], one_step.train.opt_state[0]
    for got, all_turns in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        largest = np.abs(all_turns).max()
        np.testing.assert_allclose(got.sum(axis=0), all_turns, atol=1e-5 * largest + 1e-7)
    assert result.metrics["sweep/turns"] == wanted.metrics["sweep/turns"]


def test_a_stopped_sweep_resumes_to_the_same_bits(tmp_path):
    learner, state = learner_of("adamw", rate=0.01)
    _, own, _ = trained()
    whole, metrics, *_ = sweep(learner, state, own, TRAJECTORIES, iteration=1)
    asked = iter([False, False])
    with pytest.raises(SweepStopped) as stopped:
        state = learner_of("adamw", rate=0.01)[1]
        sweep(learner, state, own, TRAJECTORIES, iteration=1, stop=lambda: next(asked, True))
    files = Checkpoints(tmp_path, 1)
    files.save(1, stopped.value.arrays, json.loads(json.dumps(stopped.value.notes)))
    example = learner_of("adamw", rate=0.01)[1]
    _, arrays, notes = files.restore(stopped_arrays(learner, example, TRAJECTORIES))
    files.close()
    arrays = cases.reread(arrays)
    again = sweep(learner, arrays["state"], own, TRAJECTORIES, iteration=1, resume=(arrays, notes))
    cases.assert_trees_equal(cases.host(again.train), cases.host(whole))
    assert again.metrics == metrics


def test_segments_share_no_token_across_adapters():
    rows = SegmentBatch.of(TRAJECTORIES, adapters=ADAPTERS)
    plain = SegmentBatch.of(TRAJECTORIES)
    assert len(all_actions(plain)) == len(plain.tokens)
    spans = all_actions(rows)
    assert [span.adapter for span in spans if span.segment == 0] == [0, 1, 2]
    layout = lay_out(rows, spans, SHAPES, SHAPES.long)
    batch = turn_batch(rows, layout, SHAPES, {}, action=24, copies=ADAPTERS)
    flat = batch.adapter_MRL.reshape(-1, layout.length)
    for span, row, index_L in zip(spans, layout.forest.row_S, layout.forest.index, strict=True):
        assert (flat[row, index_L] == span.adapter).all()
    structs = batch_shapes(rows, SHAPES, length=layout.length, action=24, copies=ADAPTERS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), structs) == jax.tree.map(
        lambda x: (np.shape(x), np.asarray(x).dtype), batch
    )
