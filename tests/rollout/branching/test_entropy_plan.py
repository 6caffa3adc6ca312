"""ARPO's trees are its authors' loop's, and depend on nothing but the group's own episodes."""

import dataclasses

import numpy as np
import pytest
from fork_cases import BUDGET, Counting, Drawing, config, grow

from seeupo_jax.rollout.branching import plans
from seeupo_jax.rollout.branching.entropy_plan import EntropyPlan
from seeupo_jax.rollout.branching.fork_plan import Branch, EpisodeSummary
from seeupo_jax.rollout.engine.sampling import task_number

PLAN = EntropyPlan(roots=3, coef=2.0, probability=0.4, budget=BUDGET)


class Doubting(Drawing):
    """Draws the entropy of an action, too."""

    def _action(self, turn):
        rng = np.random.default_rng([7, turn.task, turn.member, turn.turn])
        return dataclasses.replace(super()._action(turn), entropy=float(rng.random()))


def doubting(plan=PLAN, **options):
    return grow(plan=plan, engine=Doubting(), **options)


def authors_loop(own_turns, fires, roots, size):
    """Their rounds, all episodes in step: (parent, turns) of those that are no roots.

    Args:
      own_turns: of the episode of each place, those that it samples. fires: whether it branches
        after so many of all its turns, if there is room.
    """
    turns, ends, began = [0] * roots, list(own_turns[:roots]), []
    active = list(range(roots))
    while active:
        for i in active:
            turns[i] += 1
        active = [i for i in active if turns[i] < ends[i]]
        new = []
        for i in active:
            if len(ends) + len(new) < size and fires[i][turns[i]]:
                new.append((i, turns[i]))
        if not active and len(ends) < size:
            new.append((0, 0))
        for i, shared in new:
            began.append((i, shared))
            active.append(len(ends))
            turns.append(shared)
            ends.append(shared + own_turns[len(ends)])
    return began


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_the_tree_is_that_of_the_authors_loop(seed):
    rng = np.random.default_rng(seed)
    size, longest = int(rng.integers(2, 17)), 12
    roots = int(rng.integers(1, size + 1))
    own_turns = rng.integers(1, 5, size)
    fires = rng.random((size, longest * size)) < rng.random()
    plan = dataclasses.replace(PLAN, roots=roots)
    plan = dataclasses.replace(plan, budget=dataclasses.replace(BUDGET, group_size=size))
    begun: list[Branch] = []
    while True:
        played = [
            EpisodeSummary(
                shared, turns, 0, False, tuple(np.flatnonzero(fires[place][:turns]).tolist())
            )
            for place, (shared, turns) in enumerate(
                [(0, int(turns)) for turns in own_turns[:roots]]
                + [(b.turns, b.turns + int(own_turns[roots + i])) for i, b in enumerate(begun)]
            )
        ]
        new = plan.branches(played, begun)
        if not new:
            break
        begun += new
    assert begun == authors_loop(own_turns, fires, roots, size)
    assert len(begun) == size - roots  # a group is always full


def test_a_branch_is_where_the_rule_fires_and_nowhere_else():
    collected, _ = doubting(tasks=("4", "3", "4"))
    assert [t.group for t in collected.trajectories] == [0] * 12 + [1] * 12 + [2] * 12
    assert 3 < collected.usage["forks"] < 27 and collected.usage["unused_trajectories"] == 0
    branched = {True: 0, False: 0}
    for group in range(3):
        tree = [t for t in collected.trajectories if t.group == group]
        forks = {(t.parent, t.fork) for t in tree if t.fork}
        for place, one in enumerate(tree):
            entropy = one.info["entropy"]
            assert len(entropy) == one.turns
            if one.fork:  # the first turn is the root's, also of a branch
                assert entropy[: one.fork] == tree[one.parent].info["entropy"][: one.fork]
            for turns in range(one.fork + 1, one.turns):
                numbers = [3, 1, task_number(one.task_id), one.info["member"]]
                draw = np.random.SeedSequence(numbers, spawn_key=(turns,))
                score = np.random.default_rng(draw).random() - 2 * (entropy[turns - 1] - entropy[0])
                fires = min(1, max(0, score)) <= 0.4
                branched[fires] += (place, turns) in forks
    assert branched[False] == 0 < branched[True]
    # Their code would keep the first entropies of another batch's prompts: here nothing of others.
    alone, _ = doubting(tasks=("4", "3"))
    for one, other in zip(alone.trajectories, collected.trajectories, strict=False):
        assert (one.parent, one.fork, one.messages) == (other.parent, other.fork, other.messages)


def test_with_probability_one_it_branches_also_where_a_turn_is_much_more_certain():
    """clamp(0.5 - 2 (0 - 1), 0, 1) is 1."""
    for probability, keeps in ((1.0, True), (0.99, False)):
        plan = dataclasses.replace(PLAN, probability=probability)
        assert plan.may_fork(1, [1.0, 0.0], 0.5) is keeps


@pytest.mark.parametrize("tokens", [36, 40, 1000])
def test_a_group_never_samples_more_than_its_tokens(tokens):
    plan = dataclasses.replace(PLAN, budget=dataclasses.replace(BUDGET, tokens=tokens))
    collected, _ = doubting(plan)
    assert collected.sampled_tokens <= tokens
    assert collected.usage["unused_tokens"] == tokens - collected.sampled_tokens
    assert (len(collected.trajectories) == 12) == (tokens == 1000)


def test_where_nothing_branches_episodes_begin_anew_until_the_group_is_full():
    never = dataclasses.replace(PLAN, probability=0.0, coef=0.0)
    collected, asked = doubting(never)
    assert [t.fork for t in collected.trajectories] == [0] * 12
    assert collected.usage["forks"] == 0 and asked["reset"] == 12
    assert len({str(t.messages) for t in collected.trajectories}) > 4
    failing, _ = doubting(make=Failing)  # and those that failed have no branches
    assert [t.fork for t in failing.trajectories] == [0] * 12


class Failing(Counting):
    def step(self, text):
        if len(self.actions) == 2:
            raise RuntimeError("broken")
        return super().step(text)


def test_what_cannot_be_a_tree_is_refused():
    plan = plans.make_plan(config(forks={"kind": "entropy"}, estimator={"baseline": "root"}))
    assert (plan.roots, plan.coef, plan.probability) == (4, 0.2, 0.5)
    with pytest.raises(ValueError, match="forks.roots: got 9; allowed: at most 8, rollout.group_"):
        plans.make_plan(config(forks={"kind": "entropy", "roots": 9}))
    with pytest.raises(ValueError, match="forks.tokens: got 59; allowed: at least 60, what 4 epi"):
        plans.make_plan(config(forks={"kind": "entropy", "tokens": 59}))
