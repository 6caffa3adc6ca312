"""The experts that a sampler records of actions stay with the tokens of their trajectories."""

import asyncio

import numpy as np
import pytest
from fork_cases import BUDGET, Drawing, grow
from lineage_cases import END, Agents, CharTokenizer, ask, assistant

from seeupo_jax.configuration import schema
from seeupo_jax.rewards.reward_functions import RewardFunction
from seeupo_jax.rewards.scorer import Scorer
from seeupo_jax.rollout.branching.candidate_plan import CandidatePlan
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker
from seeupo_jax.types import CONTEXT

UNKNOWN = 255


class Recording(Drawing):
    """Says what no other member or turn says; its experts are a token's place and what was said."""

    def __init__(self, end=3):
        self._end = end

    def _action(self, turn):
        tokens = [40 + 8 * (turn.member % 12) + turn.turn, self._end]
        count = len(turn.context) + len(tokens) - 1
        experts = np.stack([np.arange(count), np.full(count, tokens[0])], axis=1)
        return Action(turn.key, tokens, [-1.0, -2.0], experts=experts.astype(np.uint8))

    def cancel(self, key):
        pass


def wanted(segment):
    """Each action's are of what was not recorded yet and of its word; its end is the next one's."""
    expert_LG, start = np.full((len(segment.tokens_L), 2), UNKNOWN, np.uint8), 0
    for word in np.flatnonzero(segment.turn_L != CONTEXT)[::2]:
        expert_LG[start : word + 1, 0] = range(start, word + 1)
        expert_LG[start : word + 1, 1] = segment.tokens_L[word]
        start = word + 1
    return expert_LG


def assert_recorded(segment, expert_LG):
    assert segment.expert_LG.dtype == np.uint8
    np.testing.assert_array_equal(segment.expert_LG, expert_LG)


def test_branches_have_the_experts_of_the_episode_that_they_leave_and_their_own():
    collected, _ = grow(engine=Recording())
    assert [t.fork for t in collected.trajectories] == [0] * 2 + [1] * 4 + [2] * 6
    for each in collected.trajectories:
        (segment,) = each.segments
        assert_recorded(segment, wanted(segment))


@pytest.mark.parametrize("failing", [None, 0, 2])
def test_candidates_have_their_own_experts_behind_those_of_the_one_that_was_executed(failing):
    def worth(episode):
        return None if episode.turns - 1 == failing else 1.0

    judge = Scorer((RewardFunction("judge", worth, 4, 5.0),))
    try:
        plan = CandidatePlan((3, 1, 4, 2), 0.7, BUDGET)
        collected, _ = grow(engine=Recording(), plan=plan, judge=judge)
    finally:
        judge.close()
    whole, *others = collected.trajectories
    assert len(others) == {None: 6, 0: 2, 2: 5}[failing]
    (chosen,) = whole.segments
    if whole.turns:
        assert_recorded(chosen, wanted(chosen))
    for one in others:
        (segment,) = one.segments
        expert_LG = wanted(segment)
        if one.fork < whole.turns:  # another one was executed, which read the same before
            start = int((chosen.turn_L == one.fork).argmax())
            expert_LG[:start] = wanted(chosen)[:start]
        assert_recorded(segment, expert_LG)


def test_calls_of_an_agent_that_cross_have_the_experts_of_their_own_contexts():
    async def agent(task, session):
        async def say(*history):
            answer = await session.complete(ask(*history))
            return (*history, assistant(answer.content))

        begun = await say("hi")
        left, right = await asyncio.gather(say(*begun, "left?"), say(*begun, "right?"))
        await asyncio.gather(say(*right, "on?"), say(*left, "on?"))
        return 1.0

    worker = RolloutWorker(
        Recording(END),
        Agents(agent).host(),
        CharTokenizer(),
        schema.Env(),
        schema.Rollout(max_turns=5, max_context=400),
    )
    try:
        requests = group_requests(("task",), 1, 1)
        (played,) = collect(worker, None, requests, CollectionOptions(3)).trajectories
    finally:
        worker.host.close()
    turns = [sorted({*s.turn_L.tolist()} - {CONTEXT}) for s in played.segments]
    assert sorted(map(len, turns)) == [2, 3] and not played.failed
    for segment in played.segments:
        assert_recorded(segment, wanted(segment))
