"""What a replayed environment has to say again: all of its messages, and its tools."""

import pytest

from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.validation import ProtocolError
from seeupo_jax.rewards.reward_ledger import RewardLedger
from seeupo_jax.rollout.branching.replay import begin_call, check_replayable, step_call
from seeupo_jax.rollout.episode import Episode, EpisodeRequest, Fork

OPENING = [{"role": "user", "content": "begin"}]
ACTION = {"role": "assistant", "content": "look"}
REPLIES = [[{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}], []]
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"name": "look", "description": "", "parameters": SCHEMA}


def branch():
    """A branch after two turns, which were answered by two messages and by none."""
    start = Episode(
        EpisodeRequest("task", 0, 0),
        0,
        tools=(TOOL,),
        ledger=RewardLedger([0.0, 0.0]),
        action_message_indices=[1, 4],
    )
    start.messages = [*OPENING, ACTION, *REPLIES[0], ACTION]
    return Episode(EpisodeRequest("task", 0, 1, Fork(0, 2, 0, start)), slot=1)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_replayed_turn_is_answered_by_all_of_its_messages_and_no_other(turn):
    read = step_call(branch(), turn).read
    read(None, StepResult(REPLIES[turn], 0.0, False, {}))
    for other in (REPLIES[1 - turn], REPLIES[0][:1], [*REPLIES[0], *REPLIES[0]]):
        with pytest.raises(ProtocolError, match=rf"step\(\) observation of turn {turn}: got"):
            read(None, StepResult(other, 0.0, False, {}))


def test_a_replay_begins_with_the_same_messages_and_tools():
    read = begin_call(branch(), seed=1, episode_seed=2).read
    read(None, (OPENING, [TOOL]))
    with pytest.raises(ProtocolError, match=r"reset\(\) messages: got"):
        read(None, ([*OPENING, *OPENING], [TOOL]))
    for tools in ([], [TOOL | {"description": "Looks."}]):
        with pytest.raises(ProtocolError, match=r"reset\(\) tools: got"):
            read(None, (OPENING, tools))


def test_an_environment_that_exits_cannot_be_replayed():
    class Exiting:
        def reset(self, task_id, seed):
            raise SystemExit(3)

    with pytest.raises(ValueError, match=r"Exiting.reset\('a', 0\), .*: SystemExit: 3; allowed"):
        check_replayable(Exiting(), ["a"], 0)
