"""Workloads: their lengths, their counts, and the real order desk's conversations."""

import dataclasses

import pytest

from seeupo_jax.bench.workload import Workload, bfcl, order_desk
from seeupo_jax.envs import order_desk_world as world
from seeupo_jax.envs.order_desk import OrderDesk
from seeupo_jax.policy.weights import read_tokenizer

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
    assert RAGGED.least_computed == 4 + 16 + 5 - 4
    assert (RAGGED.group_size, RAGGED.turns, RAGGED.action_tokens) == (2, 3, 4)
    assert RAGGED.max_context == 1 + 9 + 3


def test_conversations_stand_in_groups_and_begin_with_the_group_prompt():
    assert [c.prompt for c in RAGGED.conversations] == [(1, 2, 3)] * 2 + [(4,)] * 2
    assert [c.lengths for c in RAGGED.conversations] == [(2, 1), (3,), (1,), (4, 4, 1)]
    assert [c.tokens for c in RAGGED.conversations] == [8, 6, 2, 13]


def test_bfcl_has_the_real_shape_at_scale_one():
    workload = bfcl(1.0, groups=2, vocab_size=50, seed=0)
    assert (len(workload.conversations), workload.group_size, workload.turns) == (16, 8, 8)
    assert {len(c.prompt) for c in workload.conversations} == {3700}
    assert {c.lengths for c in workload.conversations} == {(60,) * 8}
    observations = [tokens for c in workload.conversations for tokens in c.observations]
    assert [len(tokens) for tokens in observations] == [120] * 16 * 7
    assert len(set(observations)) == len(observations)  # random: nothing there to share
    used = {token for tokens in (*workload.prompts, *observations) for token in tokens}
    assert used == set(range(50))


def test_bfcl_scales_every_length_and_keeps_the_turns():
    workload = bfcl(0.1, groups=1, vocab_size=50, seed=0, group_size=3)
    (conversation, *_), turns = workload.conversations, workload.turns
    assert len(conversation.prompt) == 370 and turns == 8
    assert (conversation.lengths[0], len(conversation.observations[0])) == (6, 12)
    assert bfcl(1e-6, 1, 50, 0).max_context == 1 + 8 + 7  # nothing vanishes


def test_the_seed_decides_the_tokens():
    assert bfcl(0.01, 2, 50, seed=1) == bfcl(0.01, 2, 50, seed=1)
    assert bfcl(0.01, 2, 50, seed=1).prompts != bfcl(0.01, 2, 50, seed=2).prompts
    assert order_desk(2, seed=1) == order_desk(2, seed=1)
    assert order_desk(2, seed=1).lengths != order_desk(2, seed=2).lengths


def test_order_desk_reads_as_the_environment_writes():
    workload = order_desk(3, group_size=4)
    tokenizer = read_tokenizer("package:order_desk")
    for group, prompt in enumerate(workload.prompts):
        task = world.make_task("train", group)
        messages, tools = OrderDesk().reset(f"train/{group}", 0)
        assert list(prompt) == tokenizer.begin(messages, tools).tokens
        looked_up = f'{{"customer_id": "{task.customers[task.customer].customer_id}"}}'
        answer = [{"role": "tool", "content": looked_up}]
        begun = tokenizer.begin(messages, tools)
        heard = begun.extend([], answer).tokens[len(prompt) :]
        for member in range(4):
            assert list(workload.observations[group][member][0]) == heard
    assert workload.vocab_size == tokenizer.vocab_size


def test_order_desk_conversations_differ_within_a_group():
    workload = order_desk(4)
    assert len({len(c.lengths) for c in workload.conversations}) > 1
    assert all(len(set(group)) > 1 for group in workload.lengths)
    assert all(3 <= len(c.lengths) <= 6 for c in workload.conversations)
    assert workload.max_context < 128  # what the shipped policy is trained to


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bfcl(0.0, 1, 50, 0), "scale"),
        (lambda: bfcl(1.0, 0, 50, 0), "groups"),
        (lambda: bfcl(1.0, 1, 0, 0), "vocab_size"),
        (lambda: order_desk(0), "groups"),
        (lambda: order_desk(1, group_size=0), "group_size"),
    ],
)
def test_numbers_that_are_too_small_are_refused_by_name(make, words):
    with pytest.raises(ValueError, match=f"{words}: got 0"):
        make()


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
