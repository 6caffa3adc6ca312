"""Which tokens have one weight, which are rejected, and what the metrics say of them."""

import dataclasses

import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.learner.importance_weights import effective_share, weigh_tokens
from seeupo_jax.types import CONTEXT


def weighed(**options):
    """The ragged trajectories, and their tokens where trainer and sampler differ by log 2, by turn.

    The trainer finds every token of turn t likelier by t - 1 doublings.
    """
    learner = cases.learner(importance={"clip": 100.0} | options)
    rows = learner.rows(cases.ragged())
    trainer_logp = [
        np.where(turn_L == CONTEXT, np.nan, logp_L + np.log(2) * (turn_L - 1)).astype(np.float32)
        for turn_L, logp_L in zip(rows.turn, rows.logp, strict=True)
    ]
    return rows, weigh_tokens(learner, rows, {"trainer_logp": trainer_logp})


def of_tokens(rows, result):
    """Trajectory, turn, weight and whether it is rejected of every sampled token."""
    owner_X = np.repeat(rows.trajectory_S, [len(tokens) for tokens in rows.tokens])
    turn_X, after_X = np.concatenate(rows.turn), np.concatenate(result.rows.turn)
    weight_X = np.concatenate(result.per_token["importance"])
    own = turn_X != CONTEXT
    assert (weight_X[~own] == 1).all() and (after_X[~own] == CONTEXT).all()
    return owner_X[own], turn_X[own], weight_X[own], (after_X == CONTEXT)[own]


@pytest.mark.parametrize("per", ["token", "turn", "action", "trajectory"])
def test_tokens_of_a_unit_have_one_weight(per):
    rows, result = weighed(per=per, clip=1000.0)
    owner_X, turn_X, weight_X, rejected_X = of_tokens(rows, result)
    assert not rejected_X.any() and result.rows is rows
    doublings_X = turn_X - 1
    for owner, turn in {*zip(owner_X.tolist(), turn_X.tolist(), strict=True)}:
        own = owner_X == owner
        unit = own if per == "trajectory" else own & (turn_X == turn)
        exponent = turn - 1 if per == "token" else doublings_X[unit].sum()
        weights = weight_X[own & (turn_X == turn)]
        np.testing.assert_allclose(weights, min(2.0**exponent, 1000.0), rtol=1e-5)


def test_rejected_tokens_are_context_and_counted():
    rows, result = weighed(per="turn", level="geometric", method="mask", clip=1.5, low=0.75)
    _, turn_X, weight_X, rejected_X = of_tokens(rows, result)
    np.testing.assert_array_equal(rejected_X, turn_X != 1)  # the quotients are 1/2, 1, 2 and 4
    np.testing.assert_allclose(weight_X, turn_X == 1, rtol=1e-5)
    metrics = result.metrics
    np.testing.assert_allclose(metrics["sweep/importance_rejected"], np.mean(turn_X != 1))
    turns = [set(turn_L[turn_L != CONTEXT].tolist()) for turn_L in rows.turn]
    share = sum(1 in of_segment for of_segment in turns) / sum(map(len, turns))
    np.testing.assert_allclose(metrics["sweep/importance_ess"], share, rtol=1e-5)
    np.testing.assert_allclose(metrics["sweep/tis_weight_mean"], 1, rtol=1e-5)
    assert "sweep/tis_truncated" not in metrics


def test_where_all_tokens_are_rejected_no_step_is_taken():
    learner = cases.learner(importance={"clip": 1e-30, "method": "reject"})
    observed = cases.observe(learner, cases.as_sampled(cases.ragged(), spread=0.1))
    assert observed.metrics["sweep/turns"] == 0 and not observed.updates
    assert observed.metrics["sweep/importance_rejected"] == 1


def test_a_token_without_a_recorded_log_probability_is_refused():
    first, *others = cases.ragged()
    (segment,) = first.segments
    logp_L = np.where(segment.turn_L == CONTEXT, 0, np.nan).astype(np.float32)
    unknown = dataclasses.replace(first, segments=(dataclasses.replace(segment, logp_L=logp_L),))
    count = int((segment.turn_L != CONTEXT).sum())
    learner = cases.learner(importance={"clip": 2.0})
    with pytest.raises(ValueError, match=f"^logp: got none for {count} of .*importance reads"):
        cases.observe(learner, [unknown, *others])


def test_effective_share_by_hand():
    assert effective_share(np.array([2.0, 2.0, 2.0])) == 1
    assert effective_share(np.array([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_share(np.array([3.0, 1.0])) == 16 / 20
    assert effective_share(np.zeros(3)) == 0
    assert np.isnan(effective_share(np.zeros(0)))
