"""An agent's time to think counts from its last answer, not from its last call."""

from seeupo_jax.agents.agent_episode import AgentEpisode, OpenTurn
from seeupo_jax.rollout.episode import Request


def test_a_call_without_an_answer_gives_no_time_for_new_thoughts():
    episode = AgentEpisode(Request("task", 0, 0), 0, _thought_s=1000.0)
    turn = OpenTurn(None, None, 0, None)
    for answered in (False, True):
        episode.add_turn(turn)
        assert not episode.thinks and episode.thought_s >= 1000
        episode.remove_turn(turn, answered=answered)
        assert episode.thinks and (episode.thought_s < 1000) == answered
