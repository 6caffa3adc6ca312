"""Workloads by name: lengths as they are said to be, members that differ, real conversations."""

import dataclasses

import numpy as np
import pytest

from seeupo_jax.benchmarks.settings import BenchSettings
from seeupo_jax.benchmarks.workloads import (
    APPWORLD,
    Lengths,
    Workload,
    WorkloadConversation,
    bfcl_lengths,
    make,
)
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.policy.files.weights import read_tokenizer

VOCAB = 1000
FIRST, SECOND = (1, 2, 3), (4,)
RAGGED = Workload(
    "ragged",
    (
        WorkloadConversation(FIRST, (2, 1), ((5, 6),)),
        WorkloadConversation(FIRST, (3,), ()),
        WorkloadConversation(SECOND, (1,), ()),
        WorkloadConversation(SECOND, (4, 4, 1), ((7,), (8, 9))),
    ),
    group_size=2,
    vocab_size=10,
)


def groups_of(work):
    size = work.group_size
    return [work.conversations[i : i + size] for i in range(0, len(work.conversations), size)]


def made(name, **changes):
    return make(BenchSettings(workload=name, **changes), VOCAB)


def test_counts_of_a_workload_worked_by_hand():
    assert RAGGED.prompts == (FIRST, SECOND)
    assert [c.tokens for c in RAGGED.conversations] == [8, 6, 2, 13]
    assert RAGGED.sampled == 3 + 3 + 1 + 9
    assert RAGGED.tokens == 8 + 6 + 2 + 13
    assert RAGGED.least_computed == 4 + 16 + 5 - 4
    assert (RAGGED.turns, RAGGED.action_tokens, RAGGED.max_context) == (3, 4, 13)


@pytest.mark.parametrize(
    ("lengths", "observations"),
    [((4, 4), ((7,), (8, 9))), ((4, 0, 1), ((7,), (8, 9))), ((4, 4, 1), ((7,), ()))],
)
def test_parts_that_do_not_fit_together_are_refused(lengths, observations):
    with pytest.raises(ValueError, match="workload: got"):
        WorkloadConversation(SECOND, lengths, observations)
    with pytest.raises(ValueError, match="workload: got"):
        WorkloadConversation((), (1,), ())


def test_lengths_are_scaled_and_none_vanishes():
    assert Lengths(100, (10, 1), (6,)).scaled(0.25) == Lengths(25, (2, 1), (2,))


def test_turns_are_cut_or_gone_through_again():
    lengths = Lengths(9, (1, 2, 3), (7, 8))
    assert lengths.of_turns(2) == Lengths(9, (1, 2), (7,))
    assert lengths.of_turns(3) == lengths
    assert lengths.of_turns(5) == Lengths(9, (1, 2, 3, 1, 2), (7, 8, 7, 7))
    assert Lengths(9, (4,), ()).of_turns(3) == Lengths(9, (4, 4, 4), (4, 4))


@pytest.mark.parametrize("name", ["bfcl", "appworld", "long"])
def test_members_differ_within_bounds_and_some_end_early(name):
    work = made(name, scale=0.5, groups=4, group_size=16)
    assert work.prompts != made(name, scale=0.5, groups=4, group_size=16, seed=1).prompts
    assert work == made(name, scale=0.5, groups=4, group_size=16)
    early = 0
    for group in groups_of(work):
        lengths = [c.lengths for c in group]
        turns = [len(actions) for actions in lengths]
        early += sum(count < max(turns) for count in turns)
        first = [actions[0] for actions in lengths]
        assert len(set(lengths)) > 1 and max(first) <= 2 * min(first)  # (5/4) / (3/4), rounded
    assert 4 < early < 30  # a quarter of 64
    assert max(map(max, work.prompts)) < VOCAB


def test_bfcl_is_as_long_as_real_conversations():
    tasks = bfcl_lengths()
    assert len(tasks) == 100 and all(len(t.actions) <= 10 for t in tasks)
    assert 1985 <= min(t.prompt for t in tasks) and max(t.prompt for t in tasks) <= 4891
    work = made("bfcl", scale=1.0, groups=100, group_size=2)
    assert sorted(map(len, work.prompts)) == sorted(t.prompt for t in tasks)
    one = made("bfcl", scale=1.0, groups=1)
    task = next(t for t in tasks if t.prompt == len(one.prompts[0]))
    whole = max((c.lengths for c in one.conversations), key=len)
    assert len(whole) <= len(task.actions)
    low, high = (np.rint(f * np.array(task.actions[: len(whole)])) for f in (0.75, 1.25))
    assert all(low - 1 <= whole) and all(whole <= high + 1)


def test_appworld_is_as_long_as_the_papers_contexts():
    assert APPWORLD.prompt + sum(APPWORLD.actions) + sum(APPWORLD.observations) <= 16_000
    assert len(made("appworld", scale=0.01, groups=1).prompts[0]) == 130


def test_one_size_can_be_chosen_alone():
    work = made("long", turns=3, prompt=7, groups=1, group_size=16)
    assert (work.turns, *map(len, work.prompts)) == (3, 7)
    assert made("long", turns=20, groups=1, group_size=16).turns == 20


def test_order_desk_reads_as_the_environment_writes():
    workload = made("order_desk", groups=3, group_size=4)
    tokenizer = read_tokenizer("package:order_desk")
    for group, prompt in enumerate(workload.prompts):
        task = world.make_task("train", group)
        messages, tools = OrderDesk().reset(f"train/{group}", 0)
        assert list(prompt) == tokenizer.begin(messages, tools).tokens
        looked_up = f'{{"customer_id": "{task.customers[task.customer].customer_id}"}}'
        answer = [{"role": "tool", "content": looked_up}]
        begun = tokenizer.begin(messages, tools)
        received = begun.extend([], answer).tokens[len(prompt) :]
        for conversation in groups_of(workload)[group]:
            assert list(conversation.observations[0]) == received
    assert workload.vocab_size == tokenizer.vocab_size


def test_order_desk_conversations_differ_within_a_group():
    workload = made("order_desk", groups=4)
    assert len({len(c.lengths) for c in workload.conversations}) > 1
    assert all(len({c.lengths for c in group}) > 1 for group in groups_of(workload))
    assert all(3 <= len(c.lengths) <= 6 for c in workload.conversations)
    assert workload.max_context < 128  # what the shipped policy is trained to
    other = made("order_desk", groups=4, seed=1)
    assert workload == made("order_desk", groups=4)
    assert [c.lengths for c in workload.conversations] != [c.lengths for c in other.conversations]


@pytest.mark.parametrize("flag", ["scale", "turns", "prompt"])
def test_real_conversations_have_sizes_of_their_own(flag):
    settings = dataclasses.replace(BenchSettings(workload="order_desk"), **{flag: 3})
    with pytest.raises(ValueError, match=f"--{flag}: got 3; allowed with --workload=order_desk"):
        make(settings, VOCAB)


def test_small_vocabularies_are_refused():
    with pytest.raises(ValueError, match="--model: got a vocabulary of 9; allowed.*at least"):
        make(BenchSettings(workload="order_desk", groups=1, group_size=2), 9)
