"""An agent's time to think counts from its last answer, and its end by what it may have been of."""

import pytest
from lineage_cases import HERMES, CharTokenizer

from seeupo_jax.agents.agent_episode import AgentEpisode, OpenTurn
from seeupo_jax.agents.calls import AgentFailure, AgentResult
from seeupo_jax.agents.lineages import Lineages
from seeupo_jax.rollout.episode import Request


def test_a_call_without_an_answer_gives_no_time_for_new_thoughts():
    episode = AgentEpisode(Request("task", 0, 0), 0, _thought_s=1000.0)
    turn = OpenTurn(None, None, 0, None)
    for answered in (False, True):
        episode.add_turn(turn)
        assert not episode.thinks and episode.thought_s >= 1000
        episode.remove_turn(turn, answered=answered)
        assert episode.thinks and (episode.thought_s < 1000) == answered


@pytest.mark.parametrize("reward, given, score", [(3, None, 1), (-2, None, 0), (3, 0.5, 0.5)])
def test_a_reward_that_is_the_score_too_is_cut_to_its_range(reward, given, score):
    episode = AgentEpisode(Request("task", 0, 0), 0, lineages=Lineages(CharTokenizer(), HERMES))
    episode.outcome = AgentResult(reward, given)
    episode.conclude(lambda *_: [reward], "failure")
    assert (episode.score, episode.turnless_reward) == (score, reward)


@pytest.mark.parametrize(
    "cause, exit_code, stop",
    [
        ("exception", None, "max_tokens"),
        ("exit", 1, "max_tokens"),
        ("exit", 3, "env_error"),
        ("crash", -11, "env_error"),
    ],
)
def test_after_a_refused_call_an_error_that_was_let_through_counts(cause, exit_code, stop):
    episode = AgentEpisode(Request("task", 0, 0), 0, lineages=Lineages(CharTokenizer(), HERMES))
    episode.refuse("max_tokens")
    answered = AgentResult(0.0, 0.0) if exit_code == 1 else None
    episode.outcome = AgentFailure("env_error", "its end", cause, answered)
    episode.conclude(lambda *_: [0.0], "failure")
    assert (episode.stop, episode.failed) == (stop, stop == "env_error")
