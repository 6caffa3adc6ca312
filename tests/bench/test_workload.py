"""Conversations of a workload: their counts, and parts that do not fit together."""

import dataclasses

import pytest

from seeupo_jax.bench.workload import Workload

RAGGED = Workload(
    name="ragged",
    prompts=((1, 2, 3), (4,)),
    lengths=(((2, 1), (3,)), ((1,), (4, 4, 1))),
    observations=((((5, 6),), ()), ((), ((7,), (8, 9)))),
    vocab_size=10,
)


def test_counts_of_a_workload_worked_by_hand():
    assert RAGGED.prompt_tokens == 4
    assert RAGGED.sampled == 3 + 3 + 1 + 9
    assert RAGGED.observed == 2 + 0 + 0 + 3
    assert RAGGED.tokens == 8 + 6 + 2 + 13
    assert RAGGED.least_computed == 4 + 16 + 5 - 4
    assert (RAGGED.group_size, RAGGED.turns, RAGGED.action_tokens) == (2, 3, 4)
    assert RAGGED.max_context == 1 + 9 + 3


def test_conversations_stand_in_groups_and_begin_with_the_group_prompt():
    assert [c.prompt for c in RAGGED.conversations] == [(1, 2, 3)] * 2 + [(4,)] * 2
    assert [c.lengths for c in RAGGED.conversations] == [(2, 1), (3,), (1,), (4, 4, 1)]
    assert [c.tokens for c in RAGGED.conversations] == [8, 6, 2, 13]


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": ((1, 2, 3),)},
        {"prompts": ((1, 2, 3), ())},
        {"lengths": (((2, 1), (3,)), ((1,),))},
        {"lengths": (((2, 1), (3,)), ((1,), (4, 4)))},
        {"lengths": (((2, 1), (3,)), ((1,), (4, 0, 1)))},
        {"observations": ((((5, 6),), ()), ((), ((7,), ())))},
    ],
)
def test_parts_that_do_not_fit_together_are_refused(change):
    with pytest.raises(ValueError, match="workload ragged: got"):
        dataclasses.replace(RAGGED, **change)
