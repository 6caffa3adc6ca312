"""Turns that began from the same state have the same number, by hand and by a search; and which
actions an environment could execute, by what it says itself."""

import dataclasses

import numpy as np
import pytest

from seeupo_jax.trajectories.states import executed_turns, turn_states
from seeupo_jax.types import CONTEXT, Segment, Trajectory


def segment(*parts):
    """Parts are context tokens, or (turn, action tokens)."""
    tokens, turns = [], []
    for part in parts:
        turn, said = part if isinstance(part, tuple) else (CONTEXT, part)
        tokens += said
        turns += [turn] * len(said)
    return Segment(np.array(tokens, np.int32), np.array(turns, np.int32), np.zeros(len(tokens)))


def played(*segments, **fields):
    return Trajectory.of(segments, 0.0, 0, **fields)


def states(*trajectories):
    state_NK = turn_states(trajectories)
    assert state_NK.dtype == np.int32
    return state_NK.tolist()


def test_a_state_is_what_was_read_since_the_action_before():
    first = played(segment([1, 2], (0, [7, 8]), [5, 6], (1, [9]), [5, 6], (2, [9, 9])))
    # Other actions, then the same answers; one that is longer; one in another order.
    second = played(segment([1, 2], (0, [3]), [5, 6], (1, [4, 4, 4]), [5, 6, 6], (2, [1])))
    third = played(segment([1, 2], (0, [7, 8]), [6, 5], (1, [9]), [1, 2], (2, [9]), [5, 6]))
    assert states(first, second, third) == [[0, 1, 1], [0, 1, 2], [0, 3, 0]]


def test_a_turn_that_was_not_reached_and_a_failed_trajectory_have_none():
    short = played(segment([1], (0, [2]), [3]))
    long = played(segment([1], (0, [2]), [3], (1, [4])))
    failed = played(segment([1], (0, [2])), stop="env_error", info={"states": []})
    unread = played(segment([]))
    assert states(short, failed, long, unread) == [[0, -1], [-1, -1], [0, 1], [-1, -1]]
    assert states() == []


def test_where_the_context_was_rewritten_a_state_is_all_of_it():
    whole = played(segment([1], (0, [2]), [3], (1, [4])))
    cut = played(segment([1], (0, [2])), segment([1, 2, 3], (1, [4]), [3], (2, [5])))
    same = played(segment([1, 2, 3], (0, [6]), [3], (1, [1])))
    # Read anew in `cut` and `same`; read after an action in `whole` and at the end of `cut`.
    assert states(whole, cut, same) == [[0, 1, -1], [0, 2, 1], [2, 1, -1]]


def test_segments_may_hold_their_turns_in_any_order():
    trajectory = played(segment([1], (0, [5]), [2], (2, [5])), segment([3], (1, [5])))
    assert states(trajectory) == [[0, 2, 1]]


def test_actions_without_anything_between_them_begin_from_the_same_empty_state():
    trajectory = played(segment((0, [5]), (1, [6]), [], (2, [7]), [1], (3, [7])))
    assert states(trajectory) == [[0, 0, 0, 1]]


def test_tokens_that_are_alike_byte_by_byte_but_not_one_by_one_differ():
    assert states(played(segment([1, 0], (0, [2]))), played(segment([256], (0, [2])))) == [[0], [1]]
    assert states(played(segment([0], (0, [2]))), played(segment([0, 0], (0, [2])))) == [[0], [1]]


def test_an_environments_own_names_count_and_are_no_tokens():
    said = segment([1], (0, [2]), [3], (1, [4]), [5], (2, [6]))
    named = played(said, info={"states": ["hall", "cellar", "hall"]})
    listed = played(said, info={"states": ("cellar", "", "attic")})
    assert states(named, listed, played(said)) == [[0, 1, 0], [1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    "names, got",
    [
        (["hall"], "got 1 of them"),
        (["hall"] * 3, "got 3 of them"),
        (["hall", 3], r"got \['hall', 3\]"),
        ("ab", "got 'ab'"),
        (None, "got None"),
    ],
)
def test_names_that_are_not_one_a_turn_are_told(names, got):
    said = segment([1], (0, [2]), [3], (1, [4]))
    trajectory = played(said, task_id="maze/3", info={"states": names})
    allowed = "a list of texts, one for each of its 2 turns."
    with pytest.raises(ValueError, match=f"task 'maze/3': {got}; allowed: {allowed}"):
        turn_states([trajectory])


def test_random_trajectories_are_numbered_as_a_search_numbers_them():
    rng = np.random.default_rng(0)
    trajectories, wanted = [], []
    for _ in range(50):
        parts, read = [], []
        for turn in range(rng.integers(0, 5)):
            context = rng.integers(0, 2, rng.integers(1, 3)).tolist()
            parts += [context, (turn, rng.integers(0, 2, rng.integers(1, 4)).tolist())]
            read.append(tuple(context))
        trajectories.append(played(segment(*parts, rng.integers(0, 2, 2).tolist())))
        wanted.append(read)
    state_NK, found = turn_states(trajectories), {}
    for row, read in zip(state_NK.tolist(), wanted, strict=True):
        assert row[len(read) :] == [-1] * (4 - len(read))
        for number, context in zip(row, read, strict=False):
            assert found.setdefault(context, number) == number
    assert len(set(found.values())) == len(found) == 6
    assert min(found.values()) == 0 and max(found.values()) == 5


def test_a_step_that_hung_named_no_state_and_has_what_was_read():
    turns = segment([1, 2], (0, [7]), [5, 6], (1, [9]))
    hung = played(turns, stop="timeout", timeout_counts=True, info={"states": ["start"]})
    named = played(turns, info={"states": ["start", "end"]})
    read = played(turns)
    first, second = states(hung, named)
    assert first[0] == second[0] and first[1] not in second
    assert states(hung, read)[0][1] == states(hung, read)[1][1]


TURN_L = np.array([-1, 0, 0, -1, 1, -1, 2], np.int32)
SEGMENT = Segment(np.zeros(7, np.int32), TURN_L, np.zeros(7, np.float32))
PLAIN = Trajectory.of((SEGMENT,), 0.0, 0)


def saying(executed, **fields):
    return dataclasses.replace(PLAIN, info={"executed": executed}, **fields)


def test_what_was_executed_is_what_the_environment_says_and_true_where_it_says_nothing():
    assert list(executed_turns(PLAIN)) == [True, True, True]
    assert list(executed_turns(saying([True, False, True]))) == [True, False, True]


def test_a_step_that_hung_was_not_executed():
    hung = saying([True, True], stop="timeout", timeout_counts=True)
    assert list(executed_turns(hung)) == [True, True, False]


@pytest.mark.parametrize("said", [[True, True], [1, 1, 1], "yes"])
def test_what_was_executed_as_no_list_of_a_flag_for_each_turn_is_refused(said):
    with pytest.raises(ValueError, match=r'info\["executed"\] of task .*; allowed: a list of True'):
        executed_turns(saying(said))
