"""Groups that become trees: what is shared, what is replayed, and what the budget holds."""

import dataclasses
import functools
import itertools
import time
from collections import Counter

import numpy as np
import pytest
from fork_cases import BUDGET, PLAN, Counting, Drawing, Forking, assert_same, config, grow
from rollout_cases import make_worker

from seeupo_jax.configuration import schema
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.envs.snapshot import has_fork
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment
from seeupo_jax.envs.transport.remote import Remote
from seeupo_jax.rewards.reward_functions import RewardFunction
from seeupo_jax.rewards.scorer import Scorer
from seeupo_jax.rollout.branching import plans
from seeupo_jax.rollout.branching.fork_plan import Branch, EpisodeSummary
from seeupo_jax.rollout.branching.replay import check_replayable
from seeupo_jax.rollout.branching.tree_plan import scaled_factors
from seeupo_jax.rollout.collect import group_requests
from seeupo_jax.rollout.collection import Collection
from seeupo_jax.rollout.player import CollectionOptions
from seeupo_jax.trajectories.forks import shared_turns, turn_nodes
from seeupo_jax.types import CONTEXT


def test_a_group_is_the_plans_tree_and_shared_turns_are_equal_to_the_bit():
    collected, asked = grow(tasks=("4", "4", "3"))
    assert [t.group for t in collected.trajectories] == [0] * 12 + [1] * 12 + [2] * 12
    for group in range(3):
        tree = [t for t in collected.trajectories if t.group == group]
        assert [t.info["member"] % 12 for t in tree] == list(range(12))
        assert [(t.parent, t.fork) for t in tree[:2]] == [(None, 0)] * 2
        # Two children more for each of two nodes after a turn, one more for each of six after two.
        assert [t.fork for t in tree[2:]] == [1] * 4 + [2] * 6
        assert [t.parent for t in tree[2:]] == [0, 1, 0, 1, 0, 1, 2, 3, 4, 5]
        for child in tree[2:]:
            parent, turns = tree[child.parent], range(child.fork)
            (reference,), (own,) = parent.segments, child.segments
            until = 1 + int(np.flatnonzero(np.isin(reference.turn_L, turns))[-1])
            for name in ("tokens_L", "turn_L", "logp_L"):
                left, right = (getattr(x, name)[:until] for x in (reference, own))
                np.testing.assert_array_equal(left, right)
            assert child.turn_rewards[: child.fork] == parent.turn_rewards[: child.fork]
            assert child.reward == sum(child.turn_rewards)
            assert own.logp_L[-2] == -1.0 - child.info["member"]  # its own draws after the fork
        nodes = turn_nodes(tree)
        # Of each level's turn so many: 2 after one, 6 after two, 12 after three and four.
        turns = 3 if group == 2 else 4
        assert [len({own[k] for own in nodes}) for k in range(turns)] == [2, 6, 12, 12][:turns]
    assert collected.usage["forks"] == 30 and collected.usage["forks_failed"] == 0
    assert collected.usage["replayed_turns"] == 3 * (4 * 1 + 6 * 2)
    assert asked["step"] == sum(t.turns for t in collected.trajectories)
    assert collected.usage["reused_tokens"] == 2 * 3 * (4 * 1 + 6 * 2)
    every = sum(2 * t.turns for t in collected.trajectories)
    assert collected.sampled_tokens == every - collected.usage["reused_tokens"]
    assert collected.usage["unused_trajectories"] == 0


def test_a_copied_environment_continues_as_a_replayed_one():
    replayed, _ = grow(Counting)
    copied, asked = grow(Forking)
    assert_same(replayed.trajectories, copied.trajectories)
    assert copied.usage["replayed_turns"] == 0 and copied.usage["forks"] == 10
    # A snapshot of every node of two levels, and a copy for each branch; all are closed.
    assert asked["reset"] == 2 and asked["fork"] == (2 + 6) + (4 + 6)
    assert asked["close"] == asked["fork"] + 4


def test_neither_workers_nor_arrival_nor_other_groups_change_a_tree():
    tasks = ("4", "3", "4")
    alone, _ = grow(tasks=tasks, workers=1)
    together, _ = grow(tasks=tasks, workers=4)
    assert_same(alone.trajectories, together.trajectories)
    first, _ = grow(tasks=tasks[:2])
    assert_same(first.trajectories, alone.trajectories[:24])


def test_how_long_reward_functions_take_changes_no_step_of_a_deterministic_engine():
    class Logged(Drawing):
        def step(self, unfinished, stop=False):
            if self._open:
                self.log.append(sorted((turn.task, turn.member, turn.turn) for turn in self._open))
            return super().step(unfinished, stop)

    def steps(delays):
        waits, engine = itertools.cycle(delays), Logged()
        engine.log = []
        pay = RewardFunction("pay", lambda _: time.sleep(next(waits)) or 1.0, 4, 5.0)
        scorer = Scorer((pay,), {})
        grow(tasks=("4", "2", "3"), engine=engine, deterministic=True, rewards=scorer)
        scorer.close()
        return engine.log

    assert steps([0.0]) == steps([0.0, 0.03, 0.1]) == steps([0.1, 0.0, 0.0, 0.03])


def test_processes_share_the_trees_out():
    class Part(Drawing):
        def __init__(self, number):
            self.shard_owners = -number, 1 - number  # this process is 0

    whole, _ = grow(tasks=("4", "3", "4"))
    finished, plan = {}, PLAN
    for number in range(2):
        pool = EnvPool(Counting, 4, workers=2, timeout_s=5.0)
        worker = make_worker(Part(number), pool, max_turns=4)
        requests = plans.root_requests(group_requests(("4", "3", "4"), 12, 1), plan)
        options = CollectionOptions(3, forks=plan)
        worker.engine.begin(None)
        collection = Collection(worker, requests, options, lambda *_: None)
        collection.run()
        pool.close()
        assert not finished.keys() & collection.finished.keys()
        finished |= collection.finished
    assert_same([finished[key] for key in sorted(finished)], whole.trajectories)


def test_other_processes_and_servers_replay():
    assert not any(map(has_fork, (IsolatedEnvironment("order_desk", {}), object.__new__(Remote))))


@pytest.mark.parametrize("turn", [1, 2])
def test_an_environment_that_replays_otherwise_fails_its_branch_alone(turn):
    collected, _ = grow(tasks=(f"4@{turn}",))
    wrong = [t for t in collected.trajectories if t.failed]
    assert collected.usage["forks_failed"] == len(wrong) > 0
    assert all(t.fork >= turn and t.stop == "env_error" for t in wrong)
    for trajectory in wrong:
        said = f"fork: step() observation of turn {turn - 1}: got [{{'role': 'tool', 'content': "
        assert trajectory.info["failure"].startswith(said)
        assert "allowed: what it was before, " in trajectory.info["failure"]
    assert not any(t.failed for t in collected.trajectories[:2])
    # A branch that failed has no branches.
    assert all(not collected.trajectories[t.parent].failed for t in collected.trajectories[2:])


def test_episodes_that_are_over_have_no_branches_and_the_rest_of_the_budget_is_counted():
    collected, _ = grow(tasks=("1", "2", "4"))
    size = Counter(t.group for t in collected.trajectories)
    assert size == {0: 2, 1: 6, 2: 12}
    assert collected.usage["unused_trajectories"] == 10 + 6


@pytest.mark.parametrize("tokens", [32, 45, 60, 61, 1000])
def test_a_group_never_samples_more_than_its_tokens(tokens):
    plan = dataclasses.replace(PLAN, budget=dataclasses.replace(BUDGET, tokens=tokens))
    collected, _ = grow(plan=plan)
    assert collected.sampled_tokens <= tokens
    assert collected.usage["unused_tokens"] == tokens - collected.sampled_tokens
    # Nothing more would certainly have fitted: a branch after two turns may sample 8.
    complete = len(collected.trajectories) == 12
    assert complete == (tokens == 1000) or collected.usage["unused_tokens"] < 8


def played(*turns, shared=()):
    shared = itertools.chain(shared, itertools.repeat(0))
    return [EpisodeSummary(next(shared), t, 2 * t, False) for t in turns]


def test_every_node_has_a_second_child_before_any_has_a_third():
    plan = dataclasses.replace(PLAN, budget=dataclasses.replace(BUDGET, group_size=5))
    assert plan.branches(played(4, 4), []) == [(0, 1), (1, 1), (0, 1)]
    assert plan.branches(played(4, 1), []) == [(0, 1), (0, 1)]  # the second has no node there
    begun = [Branch(0, 1), Branch(0, 1)]
    assert plan.branches(played(4, 1, 4, 1, shared=(0, 0, 1, 1)), begun) == [(0, 2)]
    failed = [one._replace(failed=True) for one in played(4, 4)]
    assert plan.branches(failed, []) == []
    wide = dataclasses.replace(PLAN, every=2, factors=(2, 2))
    assert [wide.may_fork(turns, (), 0.0) for turns in range(1, 6)] == [
        False,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "group_size, factors",
    [(216, (6, 6, 6)), (8, (2, 2, 2)), (16, (4, 2, 2)), (2, (2, 1, 1)), (36, (4, 3, 3))],
)
def test_trees_are_scaled_to_the_group(group_size, factors):
    assert scaled_factors((6, 6, 6), group_size) == factors


def test_what_cannot_branch_is_refused_before_anything_is_sampled():
    assert plans.make_plan(config(forks={"kind": "none"})) is None
    assert plans.make_plan(config()).factors == (2, 2, 2)
    with pytest.raises(ValueError, match="forks.tokens: got 29; allowed: at least 30, what 2 epi"):
        plans.make_plan(config(forks={"kind": "tree", "tokens": 29}))
    agent = dataclasses.replace(config(), agent=schema.Agent(name="json:dumps"))
    with pytest.raises(ValueError, match="forks.kind: got 'tree' with config.agent; allowed: none"):
        plans.make_plan(agent)


class Unlike(Counting):
    def reset(self, task_id, seed, *, episode_seed=None):
        self.asked["reset"] += 1
        return ({"role": "user", "content": str(self.asked["reset"])},), ()


def test_an_environment_that_begins_otherwise_each_time_is_refused():
    check_replayable(Counting(), ["4"], 0)
    with pytest.raises(ValueError, match=r"Unlike.reset\('4', 0\), called twice: messages: got"):
        check_replayable(Unlike(), ["4"], 0)
    unlike_with_fork = type("UnlikeWithFork", (Unlike,), {"fork": lambda self: self})
    check_replayable(unlike_with_fork(), ["4"], 0)


def test_every_task_that_is_named_is_tried():
    class Mixed(Counting):
        def reset(self, task_id, seed, *, episode_seed=None):
            reset = (Unlike if task_id == "5" else Counting).reset
            return reset(self, task_id, seed, episode_seed=episode_seed)

    check_replayable(Mixed(), ["4", "3"], 0)
    with pytest.raises(ValueError, match=r"Mixed.reset\('5', 0\), called twice"):
        check_replayable(Mixed(), ["4", "5"], 0)


def test_a_fork_that_is_no_environment_fails_its_episode():
    itself = type("Itself", (Counting,), {"fork": lambda self: self})
    collected, _ = grow(itself)
    assert all(t.failed for t in collected.trajectories) and len(collected.trajectories) == 2
    assert "fork(): got " in collected.trajectories[0].info["failure"]


def test_a_failed_owner_leaves_its_turns_to_the_next_one():
    collected, _ = grow()
    tree = list(collected.trajectories)
    kept = [True] * len(tree)
    assert shared_turns(tree, kept) == [t.fork for t in tree]
    kept[0] = False
    # The second child of its first node has that turn now, and the others of the node share it.
    assert shared_turns(tree, kept)[:5] == [0, 0, 0, 1, 1]
    owned = Counter(
        node
        for own, first, counts in zip(turn_nodes(tree), shared_turns(tree, kept), kept, strict=True)
        for node in own[first:]
        if counts
    )
    assert set(owned.values()) == {1}
    assert functools.reduce(set.union, map(set, turn_nodes(tree)[1:])) == set(owned)
    assert all((s.turn_L != CONTEXT).any() for t in tree for s in t.segments)
