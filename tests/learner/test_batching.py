"""From ragged trajectories to padded batches: what stands where, by hand and for every token."""

from dataclasses import replace

import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.learner.batching import (
    SegmentBatch,
    Shapes,
    action_spans,
    all_actions,
    batch_shapes,
    lay_out,
    turn_batch,
)
from seeupo_jax.learner.expert_record import ExpertRecord
from seeupo_jax.learner.refresh_batch import make_refresh_batch, refresh_shapes
from seeupo_jax.learner.shapes import row_lengths
from seeupo_jax.policy.architecture import Routing
from seeupo_jax.types import NO_TARGET, Segment, Trajectory

# Two turns of two tokens and of one, an observation between them and one after; a turn alone; a
# failure; a segment each for turns 0 and 1.
TURNS = [[[-1, 0, 0, -1, 1, -1]], [[-1, -1, 0]], [[-1, 0, -1, 1, -1, 2]], [[-1, 0], [-1, -1, 1]]]
SHAPES = Shapes((4, 8), action=3, rows=2, trajectories=4)


def trajectories(turns=TURNS, failed=(2,), tokens=None):
    """Tokens 10 i + 1, 10 i + 2, ... for trajectory i, over its segments, if none are given."""
    result = []
    for i, segments in enumerate(turns):
        token, made = 10 * i + 1, []
        for number, turn_L in enumerate(segments):
            tokens_L = np.arange(token, token + len(turn_L), dtype=np.int32)
            if tokens is not None:
                tokens_L = np.array(tokens[i][number], np.int32)
            made.append(Segment(tokens_L, np.array(turn_L, np.int32), -0.1 * tokens_L))
            token += len(turn_L)
        result.append(Trajectory.of(tuple(made), 0.0, 0, stop="timeout" if i in failed else "done"))
    return result


def logps(rows, scale):
    """A log-probability a token that tells which token it is of."""
    return [scale * tokens_L.astype(np.float32) for tokens_L in rows.tokens]


def batch_of(rows, turns, shapes=SHAPES, lengths=None, action=3, importance=False):
    layout = lay_out(rows, action_spans(rows, turns), shapes, lengths)
    per_token = {"old_logp": logps(rows, -1.0), "ref_logp": logps(rows, -2.0)}
    if importance:
        per_token["importance"] = logps(rows, -3.0)
    return layout, turn_batch(rows, layout, shapes, per_token, action=action)


def refresh_of(rows, now, before, shapes=SHAPES):
    layout = lay_out(rows, action_spans(rows, now), shapes, shapes.lengths[-1:])
    previous = action_spans(rows, before)
    refresh, left = make_refresh_batch(rows, layout, previous, shapes, logps(rows, -1.0))
    return layout, refresh, [(p.segment, p.position_A.tolist()) for p in left]


def test_failed_trajectories_have_no_rows_and_no_turns_but_keep_their_place():
    rows = SegmentBatch.of(trajectories())
    assert rows.trajectory_S.tolist() == [0, 1, 3, 3]
    assert (rows.trajectories, rows.turns) == (4, 2)  # the failed one reached turn 2
    assert [tokens.tolist() for tokens in rows.tokens[2:]] == [[31, 32], [33, 34, 35]]
    none = SegmentBatch.of(trajectories(failed=(0, 1, 2, 3)))
    assert (none.turns, none.trajectories, none.tokens) == (0, 4, ())


def test_a_batch_by_hand():
    """Three members of a group: 1 2 | 3 4, and 1 2 | 5 (observed) 6; and 1 7 | 8."""
    turns = [[[-1, -1, 0, 0]], [[-1, -1, -1, 0]], [[-1, -1, 0]]]
    tokens = [[[1, 2, 3, 4]], [[1, 2, 5, 6]], [[1, 7, 8]]]
    rows = SegmentBatch.of(trajectories(turns, failed=(), tokens=tokens))
    shapes = Shapes((8,), action=2, rows=1, trajectories=3)
    _, batch = batch_of(rows, (0,), shapes, action=2, importance=True)
    assert batch.tokens_MRL.shape == (3, 1, 8) and batch.microbatches == 1
    # In pre-order: 1, below it 2 with 3 4 and 5 6, then 7 with 8.
    np.testing.assert_array_equal(batch.tokens_MRL[0, 0], [1, 2, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(batch.depth_MRL[0, 0], [0, 1, 2, 3, 2, 3, 1, 2])
    np.testing.assert_array_equal(batch.end_MRL[0, 0], [8, 6, 4, 4, 6, 6, 8, 8])
    np.testing.assert_array_equal(batch.end_MRL[1:], [[np.arange(1, 9)]] * 2)
    np.testing.assert_array_equal(batch.parent_MRX[0, 0], [1, 2, 4, 6, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.target_MRX[0, 0], [3, 4, 6, 8] + [NO_TARGET] * 4)
    np.testing.assert_array_equal(batch.slot_PA, [[0, 1], [2, 0], [3, 0]])
    mask = np.array([[1, 1], [1, 0], [1, 0]])
    old = -np.array([[3, 4], [6, 0], [8, 0]])
    np.testing.assert_array_equal(batch.mask_PA, mask)
    np.testing.assert_array_equal(batch.old_logp_PA, old)
    np.testing.assert_array_equal(batch.ref_logp_PA, 2 * old)
    np.testing.assert_array_equal(batch.importance_PA, 3 * old)
    np.testing.assert_array_equal(batch.trajectory_P, [0, 1, 2])
    held = {name: array for name, array in batch._asdict().items() if array is not None}
    real = {name for name, array in held.items() if array.dtype == np.float32}
    assert real == {"old_logp_PA", "ref_logp_PA", "importance_PA", "mask_PA"}
    assert all(array.dtype == np.int32 for name, array in held.items() if name not in real)


def test_an_action_that_two_members_share_is_predicted_once():
    turns, tokens = [[[-1, 0, 0]]] * 2, [[[1, 2, 3]], [[1, 2, 4]]]
    rows = SegmentBatch.of(trajectories(turns, failed=(), tokens=tokens))
    _, batch = batch_of(rows, (0,), Shapes((4,), action=2, rows=1, trajectories=2), action=2)
    np.testing.assert_array_equal(batch.target_MRX[0, 0], [2, 3, 4, NO_TARGET])
    np.testing.assert_array_equal(batch.parent_MRX[0, 0, :3], [0, 1, 1])
    np.testing.assert_array_equal(batch.slot_PA, [[0, 1], [0, 2]])


def test_groups_share_nothing_and_no_group_does_where_it_should_not():
    turns, tokens = [[[-1, 0]]] * 4, [[[1, 2]], [[1, 3]]] * 2
    made = [
        Trajectory.of(t.segments, t.reward, group=i // 2)
        for i, t in enumerate(trajectories(turns, failed=(), tokens=tokens))
    ]
    for share, computed in [(True, 6), (False, 8)]:
        shapes = Shapes((8,), action=1, rows=1, trajectories=4, share=share)
        layout, _ = batch_of(SegmentBatch.of(made), (0,), shapes, action=1)
        assert layout.tokens == computed


def test_turns_merged_into_one_step_are_one_action_a_segment():
    layout, batch = batch_of(SegmentBatch.of(trajectories()), (0, 1))
    assert [p.position_A.tolist() for p in layout.spans] == [[1, 2, 4], [2], [1], [2]]
    assert [p.end for p in layout.spans] == [5, 3, 2, 3]
    np.testing.assert_array_equal(batch.trajectory_P, [0, 1, 3, 3])


def test_a_turns_pieces_are_the_trajectories_that_have_it():
    rows = SegmentBatch.of(cases.ragged())
    whose = [
        [int(rows.trajectory_S[p.segment]) for p in action_spans(rows, (t,))] for t in range(5)
    ]
    assert whose == [[0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 5, 6, 7], [0, 2, 5, 6, 7], [0, 2], []]


def paths(tokens_L, depth_L, end_L):
    """The tokens that each token of a row sees, in order, its own included."""
    index = np.arange(len(tokens_L))
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < end_L[None, :])
    assert (seen.sum(axis=1) == depth_L + 1).all()
    return [tokens_L[row].tolist() for row in seen]


@pytest.mark.parametrize("make", [cases.ragged, cases.branching])
def test_every_sampled_token_is_predicted_in_one_turns_batch_from_all_that_precedes_it(make):
    made = make()
    rows = SegmentBatch.of(made)
    shapes = cases.SHAPES
    wanted = sum((s.turn_L >= 0).sum() for t in made if not t.failed for s in t.segments)
    seen = 0
    for turn in range(rows.turns):
        layout, batch = batch_of(rows, (turn,), shapes, action=8)

        def flat(x):
            return x.reshape(-1, x.shape[-1])

        tokens, depth, end = map(flat, (batch.tokens_MRL, batch.depth_MRL, batch.end_MRL))
        X = batch.target_MRX.shape[-1]
        for place, span in enumerate(layout.spans):
            real = batch.mask_PA[place] > 0
            row, slot_A = np.divmod(batch.slot_PA[place, real], X)
            assert len(set(row)) == 1
            used = int((end[row[0]] > np.arange(len(end[row[0]])) + 1).nonzero()[0].max()) + 1
            assert used <= layout.length
            parents = flat(batch.parent_MRX)[row[0], slot_A]
            own = rows.tokens[span.segment]
            seen_by = [paths(tokens[row[0]], depth[row[0]], end[row[0]])[p] for p in parents]
            assert seen_by == [own[:position].tolist() for position in span.position_A]
            np.testing.assert_array_equal(
                flat(batch.target_MRX)[row[0], slot_A], own[span.position_A]
            )
            np.testing.assert_array_equal(-batch.old_logp_PA[place, real], own[span.position_A])
            np.testing.assert_array_equal(
                span.position_A, np.flatnonzero(rows.turn[span.segment] == turn)
            )
            seen += int(real.sum())
        assert batch.mask_PA.sum() == sum(p.position_A.size for p in layout.spans)
    assert seen == wanted == sum(p.position_A.size for p in all_actions(rows))


def test_lengths_come_from_the_list():
    shapes = Shapes((4, 8, 16, 32), action=3, rows=2, trajectories=4)
    allowed = [shapes.allowed(n)[0] for n in (1, 4, 5, 8, 9, 32)]
    assert allowed == [4, 4, 8, 8, 16, 32] and shapes.allowed(9) == (16, 32)
    assert shapes.long == (16, 32) and Shapes((4,), 3, 2, 4).long == (4,)


@pytest.mark.parametrize(
    "longest, block, lengths",
    [
        (100, 64, range(16, 129, 16)),
        (1024, 64, (128, 256, 384, *range(512, 1025, 64))),
        (1024, 256, range(128, 1025, 128)),
        (1592, 64, (256, 512, 768, *range(1024, 2049, 128))),
        (16384, 256, (2048, 4096, 6144, *range(8192, 16385, 1024))),
        (16384, 8 * 256, range(2048, 16385, 2048)),
    ],
)
def test_lengths_are_eighths_and_sixteenths_of_whole_blocks(longest, block, lengths):
    assert row_lengths(longest, block=block) == tuple(lengths)


def test_the_length_is_that_which_computes_least():
    """Four chains of five tokens in microbatches of two rows."""
    rows = SegmentBatch.of(trajectories([[[-1] * 4 + [0]]] * 4, failed=()))
    spans = action_spans(rows, (0,))
    wanted = {(5, 8): 5, (8, 10): 10, (6, 16): 6, (4, 16, 32): 16}  # 20, 20, 24 and 32 tokens
    for lengths, length in wanted.items():
        shapes = Shapes(lengths, action=1, rows=2, trajectories=4)
        assert lay_out(rows, spans, shapes).length == length


@pytest.mark.parametrize("spans, microbatches, used", [(0, 2, 0), (3, 2, 1), (9, 4, 3)])
def test_the_number_of_microbatches_is_a_multiple_of_the_listed_one(spans, microbatches, used):
    rows = SegmentBatch.of(trajectories([[[-1, 0]]] * spans, failed=()))
    shapes = Shapes((4,), action=3, rows=2, trajectories=4)
    if spans:
        _, batch = batch_of(rows, (0,), shapes)
    else:
        batch = turn_batch(rows, lay_out(rows, (), shapes), shapes, {}, action=3)
    assert batch.tokens_MRL.shape == (microbatches, 2, 4)
    assert batch.mask_PA.shape == (4 * max(1, -(-spans // 4)), 3)
    assert batch.microbatches == used


def shapes_of(batch):
    return {name: (x.shape, x.dtype) for name, x in batch._asdict().items() if x is not None}


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("importance, arrays", [(False, 11), (True, 12)])
def test_a_batch_that_is_compiled_for_has_the_shapes_of_a_real_one(
    importance, arrays, share, replays
):
    shapes = replace(SHAPES, lengths=(8,), share=share)
    rows = SegmentBatch.of(trajectories())
    if replays:
        routing = Routing(experts=4, layers=2, per_token=1)
        records = tuple(np.zeros((len(t), routing.size), routing.dtype) for t in rows.tokens)
        rows = replace(rows, routing=routing, experts=ExpertRecord(routing, records))
    names = ["old_logp", "ref_logp", "action", *["importance"] * importance]
    spans = action_spans(rows, (0,))
    layout = lay_out(rows, spans, shapes)
    fields = {name: logps(rows, 0.0) for name in names}
    for copies in (1, 2, 4):
        real = turn_batch(rows, layout, shapes, fields, action=3, copies=copies)
        structs = batch_shapes(
            rows, shapes, dict.fromkeys(names, ()), length=8, action=3, copies=copies
        )
        assert shapes_of(structs) == shapes_of(real)
        assert len(shapes_of(real)) == arrays + 1 + (not share) + 2 * replays
    refresh, _ = make_refresh_batch(
        rows, layout, action_spans(rows, (1,)), shapes, fields["action"]
    )
    assert shapes_of(refresh_shapes(rows, shapes, 8)) == shapes_of(refresh)


def test_a_refresh_by_hand():
    turns = [[[-1, 0, 0, -1, 1, -1]], [[-1, -1, 0]], [[-1, -1, 0, 1, 1]]]
    rows = SegmentBatch.of(trajectories(turns, failed=()))
    layout, refresh, left = refresh_of(rows, now=(0,), before=(1,))
    assert left == [] and layout.length == 8
    # Row 0 holds 1 2 3 and 11 12 13, row 1 holds 21 22 23: two rows, one microbatch.
    assert layout.forest.row_S.tolist() == [0, 0, 1]
    assert refresh.tokens_MQRC.shape == (2, 5, 2, 4)
    assert refresh.chunks_M.tolist() == [1, 0]
    # From the last token of turn 0's action (position 2) to the end of turn 1's.
    np.testing.assert_array_equal(refresh.tokens_MQRC[0, 0], [[3, 4, 5, 0], [23, 24, 25, 0]])
    np.testing.assert_array_equal(refresh.depth_MQRC[0, 0], [[2, 3, 4, 0]] * 2)
    np.testing.assert_array_equal(refresh.end_MQRC[0, 0], [[3, 3, 3, 4]] * 2)
    np.testing.assert_array_equal(refresh.at_MQRC[0, 0], [[1, 1, 1, 0]] * 2)
    np.testing.assert_array_equal(refresh.parent_MQRC[0, 0, :, :2], [[1, 0], [0, 1]])
    targets = [[5, NO_TARGET, NO_TARGET, NO_TARGET], [24, 25, NO_TARGET, NO_TARGET]]
    np.testing.assert_array_equal(refresh.target_MQRC[0, 0], targets)
    np.testing.assert_array_equal(refresh.slot_PA[:2], [[0, 0, 0], [4, 5, 0]])
    np.testing.assert_array_equal(refresh.mask_PA, [[1, 0, 0], [1, 1, 0], [0] * 3, [0] * 3])
    np.testing.assert_array_equal(refresh.old_logp_PA[:2], [[-5, 0, 0], [-24, -25, 0]])
    np.testing.assert_array_equal(refresh.trajectory_P, [0, 2, 3, 3])  # 3: no trajectory


def test_continuations_of_one_row_share_a_chunk_as_long_as_they_fit():
    turns = [[[-1, 0, 1]], [[-1, 0, 1]], [[-1, 0, -1, 1]], [[-1, 0, 1]]]
    rows = SegmentBatch.of(trajectories(turns, failed=()))
    shapes = Shapes((4, 8), action=3, rows=1, trajectories=4)
    layout, refresh, left = refresh_of(rows, now=(0,), before=(1,), shapes=shapes)
    assert layout.forest.row_S.tolist() == [0] * 4 and left == []
    assert refresh.chunks_M.tolist() == [3, 0, 0, 0]  # 2 + 2, 3, and 2 tokens
    chunks = [[2, 3, 12, 13], [22, 23, 24, 0], [32, 33, 0, 0]]
    np.testing.assert_array_equal(refresh.tokens_MQRC[0, :3, 0], chunks)
    np.testing.assert_array_equal(refresh.end_MQRC[0, 0, 0], [2, 2, 4, 4])


def test_a_refresh_leaves_out_what_lies_in_another_segment():
    *_, left = refresh_of(SegmentBatch.of(trajectories()), now=(0,), before=(1,))
    assert left == [(3, [2])]


def test_a_refresh_leaves_out_what_is_longer_than_the_shortest_length():
    turns = [[[-1, 0, -1, -1, 1]], [[-1, 0, -1, -1, -1, 1]]]  # 4 and 5 tokens from the row's last
    rows = SegmentBatch.of(trajectories(turns, failed=()))
    _, refresh, left = refresh_of(rows, now=(0,), before=(1,))
    assert left == [(1, [5])]
    np.testing.assert_array_equal(refresh.mask_PA.sum(axis=1), [1, 0, 0, 0])
    assert refresh.chunks_M.sum() == 1


def test_a_refresh_leaves_out_what_a_row_has_no_chunk_for():
    # A row of 8 has five chunks of 4, and six spans that fill one each.
    turns, tokens = [[[-1, 0, -1, -1, 1]]] * 6, [[[1, 2, 10 + i, 3, 4]] for i in range(6)]
    rows = SegmentBatch.of(trajectories(turns, failed=(), tokens=tokens))
    shapes = Shapes((4, 8), action=3, rows=1, trajectories=6)
    _, refresh, left = refresh_of(rows, now=(0,), before=(1,), shapes=shapes)
    assert left == [(5, [4])] and refresh.chunks_M.tolist() == [5, 0, 0, 0, 0, 0]


def test_a_refresh_leaves_out_all_pieces_of_a_trajectory_with_several():
    # Both segments have a turn before and one now: their ratios multiply before they are clipped.
    turns = [[[-1, 0, 2], [-1, 1, 3]], [[-1, 0, 1, 2, 3]]]
    rows = SegmentBatch.of(trajectories(turns, failed=()))
    _, refresh, left = refresh_of(rows, now=(0, 1), before=(2, 3))
    assert left == [(0, [2]), (1, [2])]
    np.testing.assert_array_equal(refresh.mask_PA.sum(axis=1), [0, 0, 2, 0])


@pytest.mark.parametrize("make", [cases.ragged, cases.branching])
@pytest.mark.parametrize("order", [[(3,), (2,), (1,), (0,)], [(2, 3), (0, 1)]])
def test_a_refresh_and_what_it_leaves_are_the_previous_step(order, make):
    rows = SegmentBatch.of(make())
    for before, now in zip(order, order[1:], strict=False):
        layout, refresh, left = refresh_of(rows, now, before, cases.SHAPES)
        previous, found = action_spans(rows, before), list(left)
        C = refresh.tokens_MQRC.shape[-1]
        flat = [x.reshape(-1, C) for x in refresh[:6]]
        for place, span in enumerate(previous):
            real = refresh.mask_PA[place] > 0
            if not real.any():
                continue
            found.append((span.segment, span.position_A.tolist()))
            own = rows.tokens[span.segment]
            chunk, slot_A = np.divmod(refresh.slot_PA[place, real], C)
            tokens_C, depth_C, end_C, at_C, parent_C, target_C = (x[chunk[0]] for x in flat)
            parents = parent_C[slot_A]
            np.testing.assert_array_equal(target_C[slot_A], own[span.position_A])
            np.testing.assert_array_equal(depth_C[parents], span.position_A - 1)
            np.testing.assert_array_equal(tokens_C[parents], own[span.position_A - 1])
            np.testing.assert_array_equal(-refresh.old_logp_PA[place, real], target_C[slot_A])
            # What it continues: in the row of the span of now, the token before that one's last.
            (now_place,) = (i for i, p in enumerate(layout.spans) if p.segment == span.segment)
            M, Q, R, _ = refresh.tokens_MQRC.shape
            m, _, r = np.unravel_index(chunk[0], (M, Q, R))
            assert layout.forest.row_S[now_place] == m * R + r
            last = layout.spans[now_place].end - 1
            assert set(at_C[parents]) == {layout.forest.index[now_place][last - 1]}
            assert (end_C[parents] > parents).all()
        wanted = [(p.segment, p.position_A.tolist()) for p in previous]
        assert sorted(found) == sorted(wanted)
        assert len(left) < len(wanted) or before == (3,)


def test_a_row_longer_than_every_listed_length_is_told():
    with pytest.raises(ValueError, match="a row has 9 tokens; allowed: at most 8"):
        Shapes((4, 8), action=4, rows=1, trajectories=1).allowed(9)


def test_more_places_than_int32_counts_are_refused_before_they_are_made():
    # 32,768 conversations of 65,536 tokens: 2**31 places, which would need 8 GiB an array.
    rows = SegmentBatch.of(trajectories())
    shapes = Shapes((65_536,), action=8, rows=1, trajectories=2**15)
    with pytest.raises(ValueError, match=r"32768 rows of 65536 tokens.*fewer than 2\*\*31"):
        batch_shapes(rows, shapes, length=65_536, action=8)
    with pytest.raises(ValueError, match=r"98304 rows of 65536 tokens.*fewer than 2\*\*31"):
        refresh_shapes(rows, shapes, 65_536)
