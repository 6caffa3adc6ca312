"""An agent's time to think counts from its last answer, and its end by what it may have been of."""

import time

import pytest
from lineage_cases import HERMES, CharTokenizer

from seeupo_jax.agents.agent_episode import AgentEpisode, OpenTurn
from seeupo_jax.agents.calls import AgentFailure, AgentResult
from seeupo_jax.agents.lineages import Lineages
from seeupo_jax.rollout.episode import EpisodeRequest


def test_a_call_without_an_answer_gives_no_time_for_new_thoughts():
    episode = AgentEpisode(EpisodeRequest("task", 0, 0), 0, _thought_s=1000.0)
    turn = OpenTurn(None, None, 0, None)
    for answered in (False, True):
        episode.add_turn(turn)
        assert not episode.thinks and episode.thought_s >= 1000
        episode.remove_turn(turn, answered=answered)
        assert episode.thinks and (episode.thought_s < 1000) == answered


def test_a_call_without_an_answer_gives_back_none_of_the_time_before_it():
    """1,000 s before a call that is taken back, and 1,000 s after it."""
    turn, past = OpenTurn(None, None, 0, None), time.monotonic() - 1000
    episode = AgentEpisode(EpisodeRequest("task", 0, 0), 0, _since=past)
    episode.add_turn(turn)
    episode.remove_turn(turn, answered=False)
    episode._since = past
    assert 2000 <= episode.thought_s < 3000


def test_what_the_first_refused_call_showed_ends_the_messages():
    first, second = ({"role": "user", "content": text} for text in ("first", "second"))
    episode = AgentEpisode(
        EpisodeRequest("task", 0, 0), 0, lineages=Lineages(CharTokenizer(), HERMES)
    )
    episode.refuse("max_turns", (first,))
    episode.refuse("max_turns", (second,))
    episode.outcome = AgentResult(1.0)
    episode.conclude(lambda *_: [1.0], "failure")
    assert episode.messages == [first]


@pytest.mark.parametrize("reward, given, score", [(3, None, 1), (-2, None, 0), (3, 0.5, 0.5)])
def test_a_reward_that_is_the_score_too_is_cut_to_its_range(reward, given, score):
    episode = AgentEpisode(
        EpisodeRequest("task", 0, 0), 0, lineages=Lineages(CharTokenizer(), HERMES)
    )
    episode.outcome = AgentResult(reward, given)
    episode.conclude(lambda *_: [reward], "failure")
    assert (episode.score, episode.ledger.turnless) == (score, reward)


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
    episode = AgentEpisode(
        EpisodeRequest("task", 0, 0), 0, lineages=Lineages(CharTokenizer(), HERMES)
    )
    episode.refuse("max_tokens")
    answered = AgentResult(0.0, 0.0) if exit_code == 1 else None
    episode.outcome = AgentFailure("env_error", "its end", cause, answered)
    episode.conclude(lambda *_: [0.0], "failure")
    assert (episode.stop, episode.failed) == (stop, stop == "env_error")
    reason = None if episode.failed else "its end"  # what the agent's author looks for
    assert episode.info.get("agent_error") == reason
