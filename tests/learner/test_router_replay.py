"""All passes of a sweep run a token through the experts that its first pass chose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import pytest
from flax import nnx
from stored_fields import with_fields

from seeupo_jax.configuration import schema
from seeupo_jax.learner.batching import all_actions, lay_out, turn_batch
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.information_gain import (
    AnswerTokens,
    answer_branches,
    branch_batch,
)
from seeupo_jax.learner.credit.turn_scores import score_turns
from seeupo_jax.learner.expert_record import ExpertRecord, describe_routers
from seeupo_jax.learner.step.expert_load import RouterCounts
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.learner.sweep_start import begin_sweep
from seeupo_jax.policy.architecture import Moe, Routing
from seeupo_jax.policy.network import compute, split_model
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.types import CriticState

EXPERTS, EACH = 5, 2
MOE = Moe(EXPERTS, EACH, mlp_width=12, normalize=True, dense_layers=(1,))
ARCH = dataclasses.replace(cases.ARCH, layers=3, moe=MOE)
RATE = 0.3  # of steps that change what routers choose


@functools.cache
def policy():
    network, params = split_model(Transformer(ARCH, nnx.Rngs(0)))
    return network, cases.jittered(params, 0.2)


def learner(shapes=cases.SHAPES, **choices):
    return learner_of(schema.Algorithm(**choices), shapes)


@functools.cache
def learner_of(algorithm, shapes):
    return Learner(policy()[0], cases.recording("sgd", RATE), algorithm, shapes, 1.0, seed=5)


def run(made, played=None):
    state, reference = cases.new_state(made.optimizer, policy()[1]), jax.device_put(policy()[1])
    played = cases.branching() if played is None else played
    found = sweep(made, state, reference, played, iteration=3)
    return cases.host(found.train.params), found.metrics


def difference(one, other):
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), one, other)
    return max(jax.tree.leaves(gaps))


@functools.cache
def alone(tokens):
    """The experts [L, G] of one sequence in a row of its own, padded to the length of all."""
    row_1L = np.zeros((1, 32), np.int32)
    row_1L[0, : len(tokens)] = tokens
    found = jax.jit(compute, static_argnums=0)(*policy(), row_1L)
    return np.asarray(found.routed_NLG[0, : len(tokens)])


@functools.cache
def replayed():
    return run(learner(router_replay="old"))


def test_counts_are_of_every_token_once():
    load_YE, seen = np.zeros((2, EXPERTS), int), set()
    rows = learner(router_replay="old").rows(cases.branching())
    for tokens_L, turn_L, group in zip(rows.tokens, rows.turn, rows.group_S, strict=True):
        end = 1 + int(np.flatnonzero(turn_L >= 0)[-1])
        for at, expert_G in enumerate(alone(tuple(tokens_L[:end].tolist()))):
            prefix = int(group), tuple(tokens_L[: at + 1].tolist())
            if prefix not in seen:
                np.add.at(load_YE, (np.repeat([0, 1], EACH), expert_G), 1)
            seen.add(prefix)
    wanted = describe_routers(RouterCounts(load_YE, np.zeros(()), np.zeros(())))
    _, metrics = replayed()
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    plain = run(learner())[1]
    assert {name: plain[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    assert "sweep/router_mismatch" not in plain


def test_load_metrics_are_their_definitions():
    counts = RouterCounts(np.array([[4, 0, 4, 0], [2, 2, 2, 2]]), np.float32(8), np.float32(2))
    assert describe_routers(counts) == {
        "sweep/expert_load_max": 2.0,
        "sweep/expert_load_entropy": pytest.approx((0.5 + 1) / 2),
        "sweep/dead_experts": 2,
        "logp/router_mismatch": 0.25,
    }


def test_routers_that_moved_are_counted_and_overruled():
    params, metrics = replayed()
    own, _ = run(learner())
    assert 0 < metrics["sweep/router_mismatch"] < 1
    assert difference(params, own) > 1e-4  # other experts learned
    # By the same programs, which numbers are arguments of: hardly a step where little is at stake.
    played = [with_fields(t, reward=3e-4 * t.reward) for t in cases.branching()]
    small = {"scale": "none", "kl_coef": 0.0}
    still, metrics = run(learner(router_replay="old", **small), played)
    assert metrics["sweep/router_mismatch"] == 0
    assert 1e-7 < difference(still, policy()[1])
    assert difference(still, run(learner(**small), played)[0]) < 1e-6


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "shapes, choices",
    [
        (cases.SHAPES, {"refresh": "separate"}),
        (dataclasses.replace(cases.SHAPES, share=False, rows=2), {}),
        (dataclasses.replace(cases.SHAPES, lengths=(48,), rows=1), {}),
    ],
    ids=["separate refresh", "no shared tokens", "other rows"],
)
def test_how_a_sweep_is_computed_does_not_matter(shapes, choices):
    wanted, metrics = replayed()
    params, other = run(learner(shapes=shapes, router_replay="old", **choices))
    assert difference(params, wanted) < 2e-5
    if shapes.share:
        load = "sweep/expert_load_entropy"
        assert other[load] == pytest.approx(metrics[load], abs=1e-6)


def test_a_stopped_sweep_replays_what_it_recorded():
    made, asked = learner(router_replay="old"), iter([False, False])
    state = cases.new_state(made.optimizer, policy()[1])
    reference, played = jax.device_put(policy()[1]), cases.branching()
    with pytest.raises(SweepStopped) as stopped:
        sweep(made, state, reference, played, iteration=3, stop=lambda: next(asked, True))
    example = stopped_arrays(made, cases.new_state(made.optimizer, policy()[1]), played)

    def shape(x):
        return (x.shape, x.dtype)

    assert jax.tree.map(shape, example) == jax.tree.map(shape, stopped.value.arrays)
    arrays = cases.reread(stopped.value.arrays)
    resume = arrays, stopped.value.notes
    found = sweep(made, arrays["state"], reference, played, iteration=3, resume=resume)
    wanted, metrics = replayed()
    cases.assert_trees_equal(cases.host(found.train.params), wanted)
    assert found.metrics == metrics


def sampled(change=0):
    """The trajectories as sampled with these very experts; but some of the last layer's."""

    def of(segment):
        expert_LG = alone(tuple(segment.tokens_L.tolist())).copy()
        expert_LG[:change, -1] = (expert_LG[:change, -2] + 1) % EXPERTS
        expert_LG[-1] = policy()[0].arch.routing.unknown  # nothing was sampled behind it
        return dataclasses.replace(segment, expert_LG=expert_LG)

    return [dataclasses.replace(t, segments=tuple(map(of, t.segments))) for t in cases.branching()]


def test_the_samplers_experts_are_replayed_in_every_pass():
    made = learner(router_replay="rollout")
    params, metrics = run(made, played=sampled())
    wanted, of_own = replayed()
    assert difference(params, wanted) < 2e-5
    assert metrics["logp/router_mismatch"] == 0
    assert metrics["sweep/router_mismatch"] == pytest.approx(
        of_own["sweep/router_mismatch"], abs=0.02
    )
    other, metrics = run(made, played=sampled(change=2))
    assert 0 < metrics["logp/router_mismatch"] < 0.2
    assert difference(other, wanted) > 1e-4


def test_the_reference_and_the_scorer_run_by_their_own_routers():
    # Nobody records theirs: what the sampler recorded does not reach their passes.
    choices = {"router_replay": "rollout", "advantage": "istar"}
    choices["estimator"] = {"success_above": 100.0}
    found = []
    for made in (learner(**choices), learner(**choices | {"router_replay": "none"})):
        state = cases.new_state(made.optimizer, policy()[1])
        other = jax.tree.map(jnp.array, cases.jittered(policy()[1], 0.1))
        state = state._replace(scorer=CriticState({"head": {}, "trunk": other}, ()))
        played = sampled(change=2)
        rows = made.rows(played)
        plan = made.plan(rows.updated_turns, iteration=3)
        begun = begin_sweep(made, state, other, rows, played, plan, shaped=played, version=2)
        known = begun.per_token
        scores = score_turns(made, state, rows, played, known, epochs=1).per_token["scorer_logp"]
        found.append((known["old_logp"], known["ref_logp"], scores))
    (replayed_old, *replayed_others), (old, *others) = found
    cases.assert_trees_close(replayed_others, others, 1e-5)
    assert difference(replayed_old, old) > 1e-3  # as it reaches the policy's


def test_a_critics_own_transformer_runs_by_its_own_routers():
    made, (_, params) = (
        learner(router_replay="rollout", critic={"kind": "model"}, advantage="gae"),
        policy(),
    )
    critic = cases.jittered(made.critic.init(params).params, 0.2)
    rows = made.rows(sampled())
    layout = lay_out(rows, all_actions(rows), made.shapes, made.shapes.long)
    batch = turn_batch(rows, layout, made.shapes, {}, action=made.shapes.longest)
    others = batch._replace(expert_MRLG=(batch.expert_MRLG + 1) % EXPERTS)
    values = [np.asarray(made.value(params, critic, each)) for each in (batch, others)]
    np.testing.assert_array_equal(*values)
    assert np.ptp(values[0][np.asarray(batch.mask_PA) > 0]) > 0.01


def test_answers_that_are_scored_are_not_replayed_and_what_precedes_them_is():
    played, made = sampled(), learner(router_replay="rollout")
    rows = made.rows(played)
    answer = AnswerTokens(np.array([1, 2, 3], np.int32), np.array([False, True, True]))
    branches = answer_branches(rows, played, {"": answer}, made.shapes)
    assert len(branches.spans) > 5
    for span, owner, turn in zip(
        branches.spans, branches.trajectory_B, branches.turn_B, strict=True
    ):
        record_LG = branches.rows.experts.expert_LG[span.segment]
        (segment,) = (s for s in played[owner].segments if (s.turn_L == turn).any())
        start = len(record_LG) - 3
        assert (record_LG[start:] == 255).all()
        np.testing.assert_array_equal(record_LG[:start], segment.expert_LG[:start])
    batch, span_slots, _ = branch_batch(branches, all_actions(rows), made.shapes)
    assert batch.expert_MRLG.shape[:3] == batch.tokens_MRL.shape
    assert len(span_slots) == len(branches.spans)


def test_trajectories_without_a_record_are_refused():
    with pytest.raises(ValueError, match="record of experts is none; allowed: uint8 .* of each"):
        run(learner(router_replay="rollout"))


def test_tokens_are_shared_where_their_experts_are_the_same():
    routing = Routing(1, 2, 300)
    assert (routing.dtype, routing.unknown) == (np.uint16, 65535)
    tokens = [np.array([7, 8, 9]), np.array([7, 8, 9]), np.array([7, 8])]
    expert = [[[0, 1], [2, 299], [5, 6]], [[0, 1], [2, 43], [5, 6]], [[0, 1], [2, 299]]]
    record = ExpertRecord(routing, tuple(np.array(each, np.uint16) for each in expert))
    a, b, c = record.identity(tokens, np.array([0, 0, 1]))
    assert a[0] == b[0] and a[1] != b[1] and a[2] == b[2] and len(c) == 2
