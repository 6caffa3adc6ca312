"""From ragged trajectories to padded batches: what stands where, by hand and for every token."""

import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.learner.batching import (
    Rows,
    Shapes,
    all_actions,
    empty_batch,
    pieces_of,
    refresh_batch,
    turn_batch,
)
from seeupo_jax.types import Segment, Trajectory

# Two turns of two tokens and of one, an observation between them and one after; a turn alone; a
# failure; a segment each for turns 0 and 1.
TURNS = [[[-1, 0, 0, -1, 1, -1]], [[-1, -1, 0]], [[-1, 0, -1, 1, -1, 2]], [[-1, 0], [-1, -1, 1]]]
SHAPES = Shapes((4, 8), action=3, rows=2, microbatches=2)


def trajectories(turns=TURNS, failed=(2,)):
    """Tokens 10 i + 1, 10 i + 2, ... for trajectory i, over its segments."""
    result = []
    for i, segments in enumerate(turns):
        token, made = 10 * i + 1, []
        for turn_L in segments:
            tokens_L = np.arange(token, token + len(turn_L), dtype=np.int32)
            made.append(Segment(tokens_L, np.array(turn_L, np.int32), -0.1 * tokens_L))
            token += len(turn_L)
        result.append(Trajectory(tuple(made), 0.0, 0, stop="timeout" if i in failed else "done"))
    return result


def logps(rows, scale):
    """A log-probability a token that tells which token it is of."""
    return [scale * tokens_L.astype(np.float32) for tokens_L in rows.tokens]


def batch_of(rows, turns, shapes=SHAPES, length=8, action=3, importance=False):
    pieces = pieces_of(rows, turns)
    known = {"old_logp": logps(rows, -1.0), "ref_logp": logps(rows, -2.0)}
    if importance:
        known |= {"start_logp": logps(rows, -3.0), "sampler_logp": rows.logp}
    return pieces, turn_batch(rows, pieces, shapes, known, length=length, action=action)


def refresh_of(rows, now, before, shapes=SHAPES):
    pieces, batch = batch_of(rows, now, shapes, shapes.lengths[-1], shapes.action)
    previous = pieces_of(rows, before)
    refresh, left = refresh_batch(rows, batch, pieces, previous, shapes, logps(rows, -1.0))
    return pieces, batch, refresh, [(p.segment, p.position_A.tolist()) for p in left]


def test_failed_trajectories_have_no_rows_and_no_turns_but_keep_their_place():
    rows = Rows.of(trajectories())
    assert rows.trajectory_S.tolist() == [0, 1, 3, 3]
    assert (rows.trajectories, rows.turns) == (4, 2)  # the failed one reached turn 2
    assert [tokens.tolist() for tokens in rows.tokens[2:]] == [[31, 32], [33, 34, 35]]
    none = Rows.of(trajectories(failed=(0, 1, 2, 3)))
    assert (none.turns, none.trajectories, none.tokens) == (0, 4, ())


def test_a_batch_by_hand():
    _, batch = batch_of(Rows.of(trajectories()), (0,), importance=True)
    tokens = [
        [[1, 2, 3, 0, 0, 0, 0, 0], [11, 12, 13, 0, 0, 0, 0, 0]],
        [[31, 32, 0, 0, 0, 0, 0, 0], [0] * 8],
    ]
    mask = [[[1, 1, 0], [1, 0, 0]], [[1, 0, 0], [0, 0, 0]]]
    old = [[[-2, -3, 0], [-13, 0, 0]], [[-32, 0, 0], [0, 0, 0]]]
    np.testing.assert_array_equal(batch.tokens_MRL, tokens)
    np.testing.assert_array_equal(batch.position_MRA, [[[1, 2, 1], [2, 1, 1]], [[1] * 3, [1] * 3]])
    np.testing.assert_array_equal(batch.mask_MRA, mask)
    np.testing.assert_array_equal(batch.old_logp_MRA, old)
    np.testing.assert_array_equal(batch.ref_logp_MRA, 2 * np.array(old))
    np.testing.assert_array_equal(batch.start_logp_MRA, 3 * np.array(old))
    np.testing.assert_allclose(batch.sampler_logp_MRA, 0.1 * np.array(old), rtol=1e-6)
    np.testing.assert_array_equal(batch.trajectory_MR, [[0, 1], [3, 4]])  # 4: no trajectory
    assert batch.microbatches == 2
    held = {name: array for name, array in batch._asdict().items() if array is not None}
    kinds = {name: array.dtype for name, array in held.items()}
    whole = {"tokens_MRL", "position_MRA", "trajectory_MR", "microbatches"}
    assert all((kind == np.int32) == (name in whole) for name, kind in kinds.items())


def test_turns_merged_into_one_step_are_one_action_a_segment():
    pieces, batch = batch_of(Rows.of(trajectories()), (0, 1))
    assert [p.position_A.tolist() for p in pieces] == [[1, 2, 4], [2], [1], [2]]
    assert [p.end for p in pieces] == [5, 3, 2, 3]
    np.testing.assert_array_equal(batch.tokens_MRL[0, 0], [1, 2, 3, 4, 5, 0, 0, 0])
    np.testing.assert_array_equal(batch.trajectory_MR, [[0, 1], [3, 3]])


def test_a_turns_rows_are_the_trajectories_that_have_it():
    rows = Rows.of(cases.ragged())
    whose = [[int(rows.trajectory_S[p.segment]) for p in pieces_of(rows, (t,))] for t in range(5)]
    assert whose == [[0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 5, 6, 7], [0, 2, 5, 6, 7], [0, 2], []]


def test_every_sampled_token_is_in_one_turns_batch_with_all_that_precedes_it_and_no_more():
    trajectories = cases.ragged()
    rows = Rows.of(trajectories)
    shapes = cases.SHAPES
    wanted = sum((s.turn_L >= 0).sum() for t in trajectories if not t.failed for s in t.segments)
    seen = 0
    for turn in range(rows.turns):
        pieces, batch = batch_of(rows, (turn,), shapes, length=32, action=8)
        read = [batch.tokens_MRL, batch.position_MRA, batch.mask_MRA, batch.old_logp_MRA]
        flat = [x.reshape(9, *x.shape[2:]) for x in read]
        for piece, tokens_L, position_A, mask_A, old_A in zip(pieces, *flat, strict=False):
            real_A = position_A[mask_A > 0]
            turn_L = rows.turn[piece.segment]
            np.testing.assert_array_equal(real_A, np.flatnonzero(turn_L == turn))
            end = real_A[-1] + 1
            np.testing.assert_array_equal(tokens_L[:end], rows.tokens[piece.segment][:end])
            assert not tokens_L[end:].any()
            np.testing.assert_array_equal(-old_A[mask_A > 0], tokens_L[real_A])
            seen += real_A.size
        assert flat[2].sum() == sum(p.position_A.size for p in pieces)
    assert seen == wanted == sum(p.position_A.size for p in all_actions(rows))


def test_lengths_come_from_the_list():
    shapes = Shapes((4, 8, 16, 32), action=3, rows=2, microbatches=2)
    assert [shapes.length(n) for n in (1, 4, 5, 8, 9, 32)] == [4, 4, 8, 8, 16, 32]
    assert [shapes.long(n) for n in (1, 16, 17, 32)] == [16, 16, 32, 32]


@pytest.mark.parametrize("pieces, microbatches, used", [(0, 2, 0), (3, 2, 2), (4, 2, 2), (5, 4, 3)])
def test_the_number_of_microbatches_is_a_multiple_of_the_listed_one(pieces, microbatches, used):
    rows = Rows.of(trajectories([[[-1, 0]]] * pieces, failed=()))
    _, batch = batch_of(rows, (0,))
    assert batch.tokens_MRL.shape == (microbatches, 2, 8)
    assert batch.microbatches == used


@pytest.mark.parametrize("importance, arrays", [(False, 7), (True, 9)])
def test_an_empty_batch_has_the_shapes_of_a_real_one(importance, arrays):
    rows = Rows.of(trajectories())
    _, real = batch_of(rows, (0,), importance=importance)
    known = ["old_logp", "ref_logp", *["start_logp", "sampler_logp"] * importance]
    empty = empty_batch(rows, SHAPES, known, length=8, action=3)
    assert empty.microbatches == 0 and not empty.mask_MRA.any()
    held = [name for name, array in real._asdict().items() if array is not None]
    assert len(held) == arrays
    assert held == [name for name, array in empty._asdict().items() if array is not None]
    for name in held:
        assert getattr(real, name).shape == getattr(empty, name).shape, name
        assert getattr(real, name).dtype == getattr(empty, name).dtype, name


def test_a_refresh_by_hand():
    turns = [[[-1, 0, 0, -1, 1, -1]], [[-1, -1, 0]], [[-1, -1, 0, 1, 1]]]
    rows = Rows.of(trajectories(turns, failed=()))
    _, _, refresh, left = refresh_of(rows, now=(0,), before=(1,))
    # From the last token of turn 0's action (position 2) to the end of turn 1's.
    np.testing.assert_array_equal(
        refresh.tokens_MRS, [[[3, 4, 5, 0], [0] * 4], [[23, 24, 25, 0], [0] * 4]]
    )
    np.testing.assert_array_equal(refresh.start_MR, [[2, 0], [2, 0]])
    np.testing.assert_array_equal(
        refresh.position_MRA, [[[2, 1, 1], [1, 1, 1]], [[1, 2, 1], [1, 1, 1]]]
    )
    np.testing.assert_array_equal(
        refresh.mask_MRA, [[[1, 0, 0], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]]]
    )
    np.testing.assert_array_equal(
        refresh.old_logp_MRA, [[[-5, 0, 0], [0] * 3], [[-24, -25, 0], [0] * 3]]
    )
    assert left == []


def test_a_refresh_leaves_out_what_lies_in_another_segment():
    *_, left = refresh_of(Rows.of(trajectories()), now=(0,), before=(1,))
    assert left == [(3, [2])]


def test_a_refresh_leaves_out_what_is_longer_than_the_shortest_length():
    turns = [[[-1, 0, -1, -1, 1]], [[-1, 0, -1, -1, -1, 1]]]  # 4 and 5 tokens from the row's last
    rows = Rows.of(trajectories(turns, failed=()))
    _, _, refresh, left = refresh_of(rows, now=(0,), before=(1,))
    assert left == [(1, [5])]
    np.testing.assert_array_equal(refresh.mask_MRA.sum(axis=2), [[1, 0], [0, 0]])
    assert not refresh.tokens_MRS[0, 1].any()


def test_a_refresh_leaves_out_all_pieces_of_a_trajectory_with_several():
    # Both segments have a turn before and one now: their ratios multiply before they are clipped.
    turns = [[[-1, 0, 2], [-1, 1, 3]], [[-1, 0, 1, 2, 3]]]
    rows = Rows.of(trajectories(turns, failed=()))
    _, _, refresh, left = refresh_of(rows, now=(0, 1), before=(2, 3))
    assert left == [(0, [2]), (1, [2])]
    np.testing.assert_array_equal(refresh.mask_MRA.sum(axis=2), [[0, 0], [2, 0]])


@pytest.mark.parametrize("order", [[(3,), (2,), (1,), (0,)], [(2, 3), (0, 1)]])
def test_a_refresh_and_what_it_leaves_are_the_previous_step(order):
    rows = Rows.of(cases.ragged())
    for before, now in zip(order, order[1:], strict=False):
        pieces, batch, refresh, left = refresh_of(rows, now, before, cases.SHAPES)
        flat = [x.reshape(9, *x.shape[2:]) for x in refresh]
        found = list(left)
        for piece, tokens_S, start, position_A, mask_A, old_A in zip(pieces, *flat, strict=False):
            real_A = position_A[mask_A > 0]
            if not real_A.size:
                continue
            assert start == piece.end - 1 and real_A[0] >= 1
            found.append((piece.segment, (start + real_A).tolist()))
            np.testing.assert_array_equal(
                tokens_S[real_A], rows.tokens[piece.segment][start + real_A]
            )
            np.testing.assert_array_equal(-old_A[mask_A > 0], tokens_S[real_A])
        wanted = [(p.segment, p.position_A.tolist()) for p in pieces_of(rows, before)]
        assert sorted(found) == sorted(wanted)
        assert 0 < len(left) < len(wanted) or before == (3,)
        assert batch.trajectory_MR.shape == refresh.start_MR.shape


def test_a_row_longer_than_every_listed_length_is_told():
    with pytest.raises(ValueError, match="a row has 9 tokens; allowed: at most 8"):
        Shapes((4, 8), action=4, rows=1, microbatches=1).length(9)
