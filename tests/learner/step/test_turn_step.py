"""The turn step, the score and the refresh: what reaches gradients, factors and the state."""

import dataclasses

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.learner.batching import (
    SegmentBatch,
    action_spans,
    batch_shapes,
    lay_out,
    turn_batch,
)
from seeupo_jax.learner.refresh_batch import make_refresh_batch
from seeupo_jax.types import NO_TARGET

LEARNER = cases.learner()
ROWS = SegmentBatch.of(cases.ragged())
EMPTY = lay_out(ROWS, (), cases.SHAPES, (24,))
ADVANTAGE_N = np.array([1.0, -0.5, 0.25, -1.0, 9.0, 0.5, 1.5, -2.0], np.float32)
FACTOR_N = np.array([1.1, 0.9, 1.0, 0.5, 7.0, 1.15, 0.85, 1.05], np.float32)


def logps(seed):
    rng = np.random.default_rng(seed)
    return [-3 * rng.random(len(tokens)).astype(np.float32) for tokens in ROWS.tokens]


def padded(spans, importance=None, advantage_N=ADVANTAGE_N):
    own_S = advantage_N[ROWS.trajectory_S]
    advantage = [np.full(len(t), own, t.dtype) for t, own in zip(ROWS.logp, own_S, strict=True)]
    per_token = {"old_logp": logps(0), "ref_logp": logps(1), "advantage": advantage}
    if importance is not None:
        per_token["importance"] = importance
    layout = lay_out(ROWS, spans, cases.SHAPES, cases.SHAPES.lengths[-1:])
    return turn_batch(ROWS, layout, cases.SHAPES, per_token, action=cases.SHAPES.action)


@dataclasses.dataclass
class Result:
    """A turn step's results on the host."""

    state: object
    cumulative_ratio_N: np.ndarray
    logp_PA: np.ndarray
    metrics: dict

    @property
    def gradients(self):
        return self.state.opt_state[0]


def step(batch, refresh=None, state=None, learner=LEARNER):
    if refresh is None:
        refresh, _ = make_refresh_batch(ROWS, EMPTY, [], cases.SHAPES, [])
    out = learner.turn_step(
        cases.new_state(LEARNER.optimizer) if state is None else state,
        batch,
        refresh,
        jnp.array(FACTOR_N),
        np.float32(7),
    )
    return Result(*cases.host(out)[:4])


def with_garbage(batch, seed=0):
    """The batch with other contents wherever there is no row, no token or no action token."""
    rng = np.random.default_rng(seed)
    mask, used = batch.mask_PA > 0, int(batch.microbatches)
    alone = batch.end_MRL == np.arange(1, batch.end_MRL.shape[2] + 1)[None, None, :]
    padding = alone & (batch.depth_MRL == 0)
    assert padding[:used].any() and padding[used:].all()
    nothing = batch.target_MRX == NO_TARGET
    per_token = [
        name
        for name in batch._fields
        if name.endswith(("logp_PA", "advantage_PA", "importance_PA"))
    ]
    held = {name: x for name in per_token if (x := getattr(batch, name)) is not None}

    def anything(x, low, high):
        return rng.integers(low, high, x.shape).astype(np.int32)

    return batch._replace(
        tokens_MRL=np.where(padding, anything(batch.tokens_MRL, 0, 20), batch.tokens_MRL),
        depth_MRL=np.where(padding, anything(batch.depth_MRL, 0, 20), batch.depth_MRL),
        parent_MRX=np.where(nothing, anything(batch.parent_MRX, 0, 24), batch.parent_MRX),
        slot_PA=np.where(mask, batch.slot_PA, anything(batch.slot_PA, 0, 200)),
        **{name: np.where(mask, x, np.nan) for name, x in held.items()},
    )


@pytest.fixture(scope="module")
def turn_1():
    """Turn 1: six spans."""
    return padded(action_spans(ROWS, (1,)))


@pytest.fixture(scope="module")
def turn_2():
    """Turn 2: five spans, in four rows of two microbatches."""
    return padded(action_spans(ROWS, (2,)))


@pytest.fixture(scope="module")
def result_2(turn_2):
    return step(turn_2)


def test_what_padding_and_empty_rows_hold_reaches_nothing(turn_2, result_2):
    changed = step(with_garbage(turn_2))
    assert turn_2.microbatches == 2 and not turn_2.tokens_MRL[1, 1:].any()  # computed empty rows
    cases.assert_trees_close(changed.state, result_2.state, 1e-6)
    cases.assert_trees_close(changed.metrics, result_2.metrics, 1e-6)
    np.testing.assert_array_equal(changed.cumulative_ratio_N, result_2.cumulative_ratio_N)


@pytest.mark.parametrize("ratio", ["geometric", "token"])
def test_what_padding_holds_reaches_no_importance_weight(ratio):
    learner = cases.learner(importance={"clip": 1.1}, ratio=ratio)
    batch = padded(action_spans(ROWS, (2,)), importance=[-logp_L for logp_L in logps(2)])
    wanted, changed = (step(b, learner=learner) for b in (batch, with_garbage(batch)))
    assert np.isnan(with_garbage(batch).importance_PA).any()
    cases.assert_trees_close(changed.state, wanted.state, 1e-6)
    cases.assert_trees_close(changed.metrics, wanted.metrics, 1e-6)


@pytest.mark.parametrize("ratio", ["geometric", "product", "token"])
def test_importance_multiplies_the_surrogate_and_not_the_kl_term(ratio):
    # One action of four tokens, of trajectory 0, at ratio 1: its surrogate is M. The weights of its
    # tokens are averaged, as an action has one term and terms of tokens are averaged.
    (span, *_) = action_spans(ROWS, (2,))
    importance = [np.ones_like(logp) for logp in ROWS.logp]
    importance[span.segment][span.position_A] = 0.5, 1.1, 0.0, 2.0
    batch = padded([span], importance)
    params = cases.new_state(LEARNER.optimizer).params
    batch = batch._replace(old_logp_PA=np.asarray(LEARNER.score(params, batch)))
    learner = cases.learner(importance={"clip": 2.0}, ratio=ratio)
    metrics = step(batch, learner=learner).metrics
    kl_share = learner.algorithm.kl_coef * metrics["kl"]
    assert kl_share > 1e-3
    M = ADVANTAGE_N[0] * FACTOR_N[0]
    np.testing.assert_allclose(metrics["loss"], (kl_share - 0.9 * M) / 7, rtol=1e-5)


def test_microbatches_without_rows_are_not_computed(turn_2, result_2):
    def poison(x_PA, value):
        x_PA = x_PA.copy()
        x_PA[5, 0] = value  # the first place without a span
        return x_PA

    poisoned = turn_2._replace(
        mask_PA=poison(turn_2.mask_PA, 1),
        old_logp_PA=poison(turn_2.old_logp_PA, np.nan),
        slot_PA=poison(turn_2.slot_PA, 2 * 3 * 24),  # in the third microbatch
    )
    assert turn_2.microbatches == 2
    cases.assert_trees_equal(vars(step(poisoned)), vars(result_2))
    computed = step(poisoned._replace(microbatches=np.int32(3)))
    assert np.isnan(computed.metrics["loss"])


def test_the_score_is_zero_where_nothing_is_computed(turn_2):
    params = cases.new_state(LEARNER.optimizer).params
    logp_PA = np.asarray(LEARNER.score(params, turn_2))
    assert (logp_PA[turn_2.mask_PA > 0] < 0).all()
    assert not logp_PA[turn_2.mask_PA == 0].any()


def test_the_step_returns_the_log_probabilities_from_before_it(turn_2, result_2):
    params = cases.new_state(LEARNER.optimizer).params
    logp_PA = LEARNER.score(params, turn_2)
    np.testing.assert_allclose(result_2.logp_PA, logp_PA, rtol=1e-6, atol=1e-6)


def test_rows_of_unequal_length_add_up_under_one_denominator(turn_2, result_2):
    # Two parts of the rows, each divided by the same 7, sum to the whole; so do their losses.
    spans = action_spans(ROWS, (2,))
    assert len({span.position_A.size for span in spans}) > 1
    parts = [step(padded(spans[:1])), step(padded(spans[1:]))]
    summed = jax.tree.map(np.add, *(part.gradients for part in parts))
    cases.assert_trees_close(summed, result_2.gradients, 1e-6)
    losses = sum(part.metrics["loss"] for part in parts)
    np.testing.assert_allclose(losses, result_2.metrics["loss"], rtol=1e-6)


def test_the_place_of_a_row_does_not_matter(turn_2, result_2):
    spans = action_spans(ROWS, (2,))
    moved = step(padded([spans[i] for i in (3, 0, 4, 2, 1)]))
    cases.assert_trees_close(moved.state, result_2.state, 1e-6)
    np.testing.assert_array_equal(moved.cumulative_ratio_N, result_2.cumulative_ratio_N)


def test_a_trajectory_without_the_turn_has_no_part_in_the_step(result_2):
    absent = [1, 3, 4]
    advantage_N = ADVANTAGE_N.copy()
    advantage_N[absent] = 1e6, np.nan, np.inf
    turn_2 = padded(action_spans(ROWS, (2,)), advantage_N=advantage_N)
    cases.assert_trees_equal(vars(step(turn_2)), vars(result_2))


def test_factors_of_trajectories_without_the_turn_stay_bit_for_bit(turn_1):
    # 0.5 and 7 are outside the weight clip: a factor that is touched at all would change.
    previous = action_spans(ROWS, (2,))
    layout = lay_out(ROWS, action_spans(ROWS, (1,)), cases.SHAPES, cases.SHAPES.lengths[-1:])
    refresh, left = make_refresh_batch(ROWS, layout, previous, cases.SHAPES, logps(0))
    held = {int(ROWS.trajectory_S[p.segment]) for p in previous if p not in left}
    result = step(turn_1, refresh)
    changed = set(np.flatnonzero(result.cumulative_ratio_N != FACTOR_N))
    assert changed == held == {0, 5}

    params = cases.new_state(LEARNER.optimizer).params
    batch = padded(left)
    cumulative_ratio_N = LEARNER.refresh(params, batch, jnp.array(FACTOR_N))
    assert set(np.flatnonzero(np.asarray(cumulative_ratio_N) != FACTOR_N)) == {2, 6, 7}


def test_the_tokens_of_a_trajectorys_pieces_are_averaged_before_the_clip():
    # Trajectory 6 has turn 0 in one segment, 3 tokens, and turn 1 in the other, 2 tokens.
    spans = [p for p in action_spans(ROWS, (0, 1)) if ROWS.trajectory_S[p.segment] == 6]
    batch = padded(spans)
    params = cases.new_state(LEARNER.optimizer).params
    logp_PA = np.asarray(LEARNER.score(params, batch))
    # Ratios e^0.7 = 2.01 and e^-0.6 = 0.55: (3 x 0.7 - 2 x 0.6) / 5 = 0.18, within the clip.
    shift = [0.7, -0.6]
    old_PA = logp_PA - np.array([*shift, *[0.0] * 7], np.float32)[:, None]
    shifted = batch._replace(old_logp_PA=old_PA.astype(np.float32))
    cumulative_ratio_N = LEARNER.refresh(params, shifted, jnp.ones(8))
    wanted = np.ones(8)
    wanted[6] = np.exp(0.18)
    np.testing.assert_allclose(cumulative_ratio_N, wanted, rtol=1e-5)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(turn_2):
    old_PA = turn_2.old_logp_PA.copy()
    old_PA[3, 0] = np.nan  # one token of one trajectory
    before = cases.host(cases.new_state(LEARNER.optimizer))
    result = step(turn_2._replace(old_logp_PA=old_PA))
    assert result.metrics["update_skipped"] == 1
    cases.assert_trees_equal(result.state, before._replace(skipped=np.int32(1)))


@pytest.mark.parametrize("zeros", [False, True])
def test_a_batch_without_rows_changes_no_bit(zeros):
    """zeros: as programs are warmed."""
    before = cases.host(cases.new_state(LEARNER.optimizer))
    action, fields = cases.SHAPES.action, LEARNER.per_token
    if zeros:
        structs = batch_shapes(ROWS, cases.SHAPES, fields, length=24, action=action)
        empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), structs)
    else:
        none = dict.fromkeys(fields, ())
        empty = turn_batch(ROWS, EMPTY, cases.SHAPES, none, action=action)
    result = step(empty)
    cases.assert_trees_equal(result.state, before)
    np.testing.assert_array_equal(result.cumulative_ratio_N, FACTOR_N)
    assert result.metrics["update_skipped"] == 0


def test_the_state_is_donated(turn_2):
    state = cases.new_state(LEARNER.optimizer)
    step(turn_2, state=state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
