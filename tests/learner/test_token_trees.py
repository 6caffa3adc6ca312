"""Packing sequences as token trees: every row against its sequences, on random tries."""

import math

import numpy as np
import pytest

from seeupo_jax.learner.token_trees import choose_length


def pack(sequences, tree_S, *, capacity, share=True):
    """Packed into rows of one length."""
    return choose_length(sequences, tree_S, lengths=(capacity,), rows=1, share=share)[1]


def random_tries(seed, *, trees=4, sequences=40):
    """Sequences that are long walks over few tokens, so that they branch at every depth."""
    rng = np.random.default_rng(seed)
    trunks = [rng.integers(0, 3, 30) for _ in range(trees)]
    tree_S = rng.integers(0, trees, sequences).tolist()
    packed = []
    for tree in tree_S:
        kept = int(rng.integers(0, 20))
        tail = rng.integers(0, 2, int(rng.integers(1, 12)))
        packed.append(np.concatenate([trunks[tree][:kept], tail]).astype(np.int32))
    for other in range(1, sequences, 5):  # prefixes of other sequences, or equal to them
        packed[other - 1], tree_S[other - 1] = packed[other][:other], tree_S[other]
    return packed, tree_S


def bushes(trees, *, leaves):
    """Trees of one token and so many leaves on it."""
    pairs = [(tree, leaf) for tree in range(trees) for leaf in range(10, 10 + leaves)]
    return [np.array(pair, np.int32) for pair in pairs], [tree for tree, _ in pairs]


PROBLEMS = [
    pytest.param(seed, capacity, share, id=f"{seed}-{capacity}-{'shared' if share else 'alone'}")
    for seed in range(6)
    for capacity in (32, 60, 1000)
    for share in (True, False)
]


def test_three_sequences_make_the_row_that_hand_work_gives():
    #  5 - 6 - 7 - 8      sequence 1
    #   \   \
    #    \   256          sequence 0
    #     4               sequence 2
    sequences = [np.array(tokens, np.int32) for tokens in ([5, 6, 256], [5, 6, 7, 8], [5, 4])]
    forest = pack(sequences, [0, 0, 0], capacity=6)
    np.testing.assert_array_equal(forest.tokens, [[5, 4, 6, 7, 8, 256]])
    np.testing.assert_array_equal(forest.depth, [[0, 1, 1, 2, 3, 2]])
    np.testing.assert_array_equal(forest.end, [[6, 2, 6, 5, 5, 6]])
    np.testing.assert_array_equal(forest.row_S, [0, 0, 0])
    assert [index.tolist() for index in forest.index] == [[0, 2, 5], [0, 2, 3, 4], [0, 1]]
    arrays = (*forest.tokens, *forest.depth, *forest.end, *forest.index, forest.row_S)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_trees_in_one_row_stand_side_by_side_even_where_they_are_equal():
    sequences = [np.array([5, 6], np.int32), np.array([5, 6], np.int32), np.array([5], np.int32)]
    forest = pack(sequences, [3, 1, 1], capacity=9)
    np.testing.assert_array_equal(forest.tokens, [[5, 6, 5, 6]])
    np.testing.assert_array_equal(forest.depth, [[0, 1, 0, 1]])
    np.testing.assert_array_equal(forest.end, [[2, 2, 4, 4]])
    assert [index.tolist() for index in forest.index] == [[2, 3], [0, 1], [0]]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("seed", "capacity", "share"), PROBLEMS)
def test_every_sequence_is_read_back_through_its_index(seed, capacity, share):
    sequences, tree_S = random_tries(seed)
    forest = pack(sequences, tree_S, capacity=capacity, share=share)
    for tokens, row, index in zip(sequences, forest.row_S, forest.index, strict=True):
        np.testing.assert_array_equal(forest.tokens[row][index], tokens)
        np.testing.assert_array_equal(forest.depth[row][index], np.arange(len(tokens)))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("seed", "capacity", "share"), PROBLEMS)
def test_a_token_sees_exactly_its_own_prefix(seed, capacity, share):
    sequences, tree_S = random_tries(seed)
    forest = pack(sequences, tree_S, capacity=capacity, share=share)
    place = [np.arange(len(end)) for end in forest.end]
    seen = [
        (k[None, :] <= k[:, None]) & (k[:, None] < end[None, :])
        for k, end in zip(place, forest.end, strict=True)
    ]
    for row, index in zip(forest.row_S, forest.index, strict=True):
        for position in range(len(index)):
            keys = np.flatnonzero(seen[row][index[position]])
            np.testing.assert_array_equal(keys, index[: position + 1])


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("seed", "capacity", "share"), PROBLEMS)
def test_rows_hold_what_sequences_need_and_nothing_else(seed, capacity, share):
    sequences, tree_S = random_tries(seed)
    forest = pack(sequences, tree_S, capacity=capacity, share=share)
    used = [np.zeros(len(tokens), bool) for tokens in forest.tokens]
    for row, index in zip(forest.row_S, forest.index, strict=True):
        used[row][index] = True
    assert all(row.all() for row in used)
    assert all(1 <= len(tokens) <= capacity for tokens in forest.tokens)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("seed", "capacity", "share"), PROBLEMS)
def test_a_path_of_a_tree_stands_once_in_a_row(seed, capacity, share):
    sequences, tree_S = random_tries(seed)
    forest = pack(sequences, tree_S, capacity=capacity, share=share)
    owners = tree_S if share else range(len(sequences))
    paths = {
        (int(row), owner, tuple(tokens[: size + 1]))
        for tokens, owner, row in zip(sequences, owners, forest.row_S, strict=True)
        for size in range(len(tokens))
    }
    assert sum(len(tokens) for tokens in forest.tokens) == len(paths)


def test_no_token_of_a_tree_that_fits_stands_twice():
    sequences, tree_S = random_tries(0)
    kept = [[s for s, tree in zip(sequences, tree_S, strict=True) if tree == t] for t in range(4)]
    sizes = [len(pack(tree, [0] * len(tree), capacity=1000).tokens[0]) for tree in kept]
    forest = pack(sequences, tree_S, capacity=max(sizes))
    assert sum(map(len, forest.tokens)) == sum(sizes)


def test_a_tree_that_does_not_fit_is_cut_where_the_least_is_shared():
    # Two pairs; each has seven tokens of its own kind before it parts, and one before that is
    # everyone's. Pairs stay together: rows of 10 tokens instead of 8 + 10 + 9 of another cut.
    trunks = [[1, *[kind] * 7] for kind in (2, 3)]
    sequences = [np.array([*trunk, leaf], np.int32) for leaf in (4, 5) for trunk in trunks]
    forest = pack(sequences, [0] * 4, capacity=16)
    assert [len(tokens) for tokens in forest.tokens] == [10, 10]
    np.testing.assert_array_equal(forest.row_S, [0, 1, 0, 1])


def test_what_is_left_of_rows_is_filled_by_what_fits_best():
    sequences = [np.full(size, size, np.int32) for size in (2, 3, 4, 5, 6)]
    forest = pack(sequences, range(5), capacity=10)
    assert [set(tokens) for tokens in forest.tokens] == [{2, 3, 5}, {4, 6}]


def test_a_tree_that_fits_is_cut_where_that_saves_a_row():
    # Three trees of 6 tokens: 1 and five leaves. Cut into 1 + 3 and 1 + 2, one fills two rows.
    sequences, tree_S = bushes(3, leaves=5)
    assert sorted(map(len, pack(sequences, tree_S, capacity=10).tokens)) == [9, 10]
    # 1 + 2 and 1 + 2 leave one leaf over: then all trees stay whole.
    assert [len(tokens) for tokens in pack(sequences, tree_S, capacity=9).tokens] == [6, 6, 6]
    # A second row is saved in the room that the first one has left.
    sequences, tree_S = bushes(6, leaves=5)
    assert sorted(map(len, pack(sequences, tree_S, capacity=10).tokens)) == [9, 9, 10, 10]


def test_a_fuller_row_is_saved_where_the_emptiest_cannot_be_cut():
    sequences, tree_S = bushes(1, leaves=7)
    sequences += [np.arange(size, dtype=np.int32) for size in (7, 7, 7, 8)]
    forest = pack(sequences, [*tree_S, 1, 2, 3, 4], capacity=10)
    assert [len(tokens) for tokens in forest.tokens] == [10, 10, 10, 10]


def test_rows_follow_the_order_of_the_trees():
    forest = pack([np.arange(3), np.arange(9), np.arange(4)], [2, 0, 1], capacity=10)
    np.testing.assert_array_equal(forest.row_S, [1, 0, 1])
    np.testing.assert_array_equal(forest.index[0], [4, 5, 6])


def test_the_rows_do_not_depend_on_the_order_of_the_sequences():
    sequences, tree_S = random_tries(0)
    forest = pack(sequences, tree_S, capacity=60)
    order = np.random.default_rng(1).permutation(len(sequences))
    other = pack([sequences[s] for s in order], [tree_S[s] for s in order], capacity=60)
    for name in ("tokens", "depth", "end"):
        for row, same in zip(getattr(forest, name), getattr(other, name), strict=True):
            np.testing.assert_array_equal(row, same)


def test_nothing_makes_no_row():
    forest = pack([], [], capacity=4)
    assert forest.tokens == forest.depth == forest.end == forest.index == ()
    assert forest.row_S.shape == (0,)


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a sequence has 5 tokens; allowed: at most 4"):
        pack([np.arange(3), np.arange(5)], [0, 1], capacity=4)


def random_lengths(seed):
    """Row lengths and rows of a microbatch to choose from for `random_tries(seed)`."""
    rng = np.random.default_rng(seed)
    lengths = sorted(rng.choice(np.arange(32, 200), 4, replace=False).tolist())
    return [8, *lengths], int(rng.integers(1, 5))


@pytest.mark.parametrize("seed", range(8))
def test_no_other_length_computes_fewer_tokens(seed):
    sequences, tree_S = random_tries(seed)
    lengths, rows = random_lengths(seed)
    length, forest = choose_length(sequences, tree_S, lengths=lengths, rows=rows)

    def padded(other):
        count = len(pack(sequences, tree_S, capacity=other).tokens)
        return math.ceil(count / rows) * rows * other

    assert length == min(lengths[1:], key=lambda other: (padded(other), -other))
    wanted = pack(sequences, tree_S, capacity=length)
    for name in ("tokens", "depth", "end", "index"):
        for row, same in zip(getattr(forest, name), getattr(wanted, name), strict=True):
            np.testing.assert_array_equal(row, same)


def test_the_longest_of_equally_good_lengths_is_chosen():
    sequences = [np.full(4, tree, np.int32) for tree in range(4)]
    for lengths, wanted in (([4, 8], 8), ([4, 8, 16, 24], 16), ([4, 9], 4)):
        assert choose_length(sequences, range(4), lengths=lengths, rows=1)[0] == wanted
    # A microbatch of four rows of 8 would be half empty.
    assert choose_length(sequences, range(4), lengths=[4, 8], rows=4)[0] == 4


def test_what_is_shared_decides_on_the_length():
    sequences = [np.array([*range(6), leaf], np.int32) for leaf in range(10, 14)]
    shared = choose_length(sequences, [0] * 4, lengths=[7, 10], rows=1)
    alone = choose_length(sequences, [0] * 4, lengths=[7, 10], rows=1, share=False)
    assert (shared[0], len(shared[1].tokens)) == (10, 1)
    assert (alone[0], len(alone[1].tokens)) == (7, 4)


def test_a_sequence_longer_than_every_length_is_refused():
    with pytest.raises(ValueError, match="a sequence has 9 tokens; allowed: at most 8"):
        choose_length([np.arange(9)], [0], lengths=[4, 8], rows=2)
