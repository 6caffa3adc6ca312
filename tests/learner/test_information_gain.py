"""Information gain: one pass with branches is separate passes, and it credits turns."""

import dataclasses

import learner_cases as cases
import numpy as np
import numpy_model as model
import pytest
from stored_fields import with_fields

from seeupo_jax.learner.batching import SegmentBatch, Shapes, all_actions, batch_shapes
from seeupo_jax.learner.credit.information_gain import (
    AnswerTokens,
    answer_branches,
    branch_batch,
    describe_gains,
    information_gain,
)
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.types import CONTEXT

SHAPES = Shapes((32,), action=16, rows=4, trajectories=12, turns=4)
SCORED = {"task 0": [0, 1, 1], "task 1": [1], "task 2": [1, 0, 1, 1, 1]}


def answers():
    """A template's token or two, and the answer's."""
    rng = np.random.default_rng(1)
    return {
        task: AnswerTokens(
            rng.integers(0, cases.VOCAB - 1, len(own)).astype(np.int32), np.array(own, bool)
        )
        for task, own in SCORED.items()
    }


def trajectories():
    """Ragged ones that begin alike; one failed, two are in two segments."""
    return [dataclasses.replace(t, task_id=f"task {t.group}") for t in cases.branching()]


def separately(made, references, temperature=1.0):
    """Of each trajectory, a pass for each of its turns' contexts."""
    weights, gains = cases.weights_of(cases.policy()[1]), []
    for trajectory in made:
        answer, known = references.get(trajectory.task_id), {}
        for segment in trajectory.segments if answer is not None else ():
            for turn in sorted(set(segment.turn_L.tolist()) - {CONTEXT}):
                start = int(np.flatnonzero(segment.turn_L == turn)[0])
                tokens_L = [*segment.tokens_L[:start], *answer.tokens_L]
                logp_L, _ = model.token_logps(weights, tokens_L, cases.NUMPY_ARCH, temperature)
                known[turn] = np.exp(logp_L[start:][answer.scored_L].mean())
        ends = [(known.get(t, np.nan), known.get(t + 1, np.nan)) for t in range(trajectory.turns)]
        gains.append(np.array([after - before for before, after in ends]))
    return gains


def in_one_pass(made, references, shapes=SHAPES, temperature=1.0):
    rows = SegmentBatch.of(made)
    branches = answer_branches(rows, made, references, shapes)
    batch, span_slots, _ = branch_batch(branches, all_actions(rows), shapes)
    learner = cases.unshared(cases.learner(shapes=shapes, temperature=temperature))
    logp_PA = np.asarray(learner.score(cases.policy()[1], batch))
    return information_gain(branches, span_slots, logp_PA, made), batch, logp_PA, branches


@pytest.mark.parametrize("temperature, share", [(1.0, True), (0.7, True), (1.0, False)])
def test_one_pass_gives_the_gains_of_separate_passes(temperature, share):
    made, references, shapes = trajectories(), answers(), dataclasses.replace(SHAPES, share=share)
    found, batch, logp_PA, branches = in_one_pass(made, references, shapes, temperature)
    wanted = separately(made, references, temperature)
    for trajectory, gain_K, wanted_K in zip(made, found, wanted, strict=True):
        if trajectory.failed:
            assert np.isnan(gain_K).all()
            continue
        np.testing.assert_allclose(gain_K, wanted_K, rtol=1e-5, atol=1e-5)
        assert np.isnan(gain_K[-1]) and not np.isnan(gain_K[:-1]).any()
    assert max(np.nanmax(np.abs(gain_K), initial=0) for gain_K in found) > 0.01

    # The sweep's own tokens are as without branches, which share nearly all of theirs.
    rows = SegmentBatch.of(made)
    weights, spans = cases.weights_of(cases.policy()[1]), all_actions(rows)
    for span, scored_A in zip(spans, logp_PA, strict=False):
        tokens_L = rows.tokens[span.segment]
        logp_L, _ = model.token_logps(weights, tokens_L, cases.NUMPY_ARCH, temperature)
        own_A = scored_A[: span.position_A.size]
        np.testing.assert_allclose(own_A, logp_L[span.position_A], rtol=1e-4, atol=1e-5)
    alone = sum(len(tokens) for tokens in branches.rows.tokens)
    computed = int(batch.microbatches) * SHAPES.rows * SHAPES.lengths[0]
    assert (computed < alone) == share


def test_the_batch_has_the_shape_that_is_compiled_ahead_whatever_the_turns():
    made, references = trajectories(), answers()
    rows = SegmentBatch.of(made)
    structs = batch_shapes(rows, SHAPES, length=32, action=32, copies=2)
    shape = [x.shape for x in structs if x is not None]
    for kept in (made, made[:2], [t for t in made if t.turns == 1] * 2):
        _, batch, *_ = in_one_pass(kept, references)
        assert [np.shape(x) for x in batch if x is not None] == shape


def test_tasks_without_an_answer_and_rows_without_room_have_no_gain():
    made, references = trajectories(), answers()
    del references["task 1"]
    references["task 2"] = AnswerTokens(np.ones(31, np.int32), np.ones(31, bool))
    found, *_ = in_one_pass(made, references)
    gained = [bool((~np.isnan(gain_K)).any()) for gain_K in found]
    assert gained == [t.group == 0 and not t.failed and t.turns > 1 for t in made]
    metrics = describe_gains(found, SegmentBatch.of(made))
    turns = [t.turns - 1 for t in made if not t.failed]
    own = sum(t.turns - 1 for t in made if t.group == 0)
    assert metrics["sweep/gain_scored"] == pytest.approx(own / sum(turns))
    flat = np.concatenate([gain_K[~np.isnan(gain_K)] for gain_K in found])
    assert metrics["sweep/gain_mean"] == pytest.approx(flat.mean())
    nothing = describe_gains(in_one_pass(made, {})[0], SegmentBatch.of(made))
    assert np.isnan(nothing["sweep/gain_mean"]) and nothing["sweep/gain_scored"] == 0


@pytest.mark.parametrize("size, branches", [(16, 2), (17, 0)])
def test_an_answer_longer_than_a_trajectory_may_be_has_no_branch(size, branches):
    """The rows of a run are twice that, by default."""
    shapes, rng = dataclasses.replace(SHAPES, context=16), np.random.default_rng(0)
    made = [
        cases.Trajectory.of((cases.segment(rng, (0, 4, 2)),), float(i), 0, task_id="task")
        for i in range(2)
    ]
    rows, answer = SegmentBatch.of(made), AnswerTokens(np.ones(size, np.int32), np.ones(size, bool))
    found = answer_branches(rows, made, {"task": answer}, shapes)
    batch, span_slots, _ = branch_batch(found, all_actions(rows), shapes)
    assert len(span_slots) == branches
    assert batch.mask_PA.sum() == 2 * 2 + branches * size


@pytest.mark.parametrize("order", ["parallel", "reverse"])
def test_a_sweep_credits_turns_with_what_they_gained(order):
    """As if the gains of all but the last turn were their rewards."""
    made, references = trajectories(), answers()
    gains = separately(made, references)
    rewarded = [
        with_fields(t, turn_rewards=(*map(float, gain_K[:-1]), 5.0))
        for t, gain_K in zip(made, gains, strict=True)
    ]
    learner = cases.learner(
        shapes=SHAPES,
        order=order,
        cumulative_ratio=False,
        advantage="a2tgpo",
        scale="group",
        kl_coef=0.0,
    )
    results = []
    for batch, given in ((made, references), (rewarded, None)):
        state = cases.new_state(learner.optimizer)
        more = {"iteration": 1, "references": given}
        results.append(sweep(learner, state, cases.policy()[1], batch, **more))
    own, wanted = results
    for advantage_L, wanted_L in zip(
        own.steps[0].advantage, wanted.steps[0].advantage, strict=True
    ):
        np.testing.assert_allclose(advantage_L, wanted_L, rtol=1e-3, atol=1e-4)
    cases.assert_trees_close(own.train.params, wanted.train.params, 1e-4)
    assert own.metrics["sweep/gain_scored"] == 1
    assert "sweep/gain_scored" not in wanted.metrics
