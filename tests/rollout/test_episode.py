"""What an episode records of the rewards of its turns, and what a copy of it has."""

import itertools

import pytest

from seeupo_jax.envs.pool import CallOutcome
from seeupo_jax.envs.validation import OWN_REWARD
from seeupo_jax.rewards.scorer import ScoringResult
from seeupo_jax.rollout.episode import Episode, EpisodeRequest


def played(*rewards):
    """An episode whose turns were paid by its environment."""
    episode = Episode(EpisodeRequest("task", group=0, member=0), slot=0)
    for reward in rewards:
        episode.ledger.open_turn()
        episode.on_scored(ScoringResult({OWN_REWARD: reward}), [reward])
    return episode


def test_a_copy_keeps_its_rewards_whatever_becomes_of_the_episode():
    episode = played(1.0, 2.0)
    copy = episode.copy()
    episode.on_scored(ScoringResult({OWN_REWARD: 4.0, "judge": 8.0}), [12.0])
    assert episode.ledger.named_turns == {OWN_REWARD: [1.0, 6.0], "judge": [0.0, 8.0]}
    assert copy.ledger.named_turns == {OWN_REWARD: [1.0, 2.0]}
    assert (copy.ledger.named, copy.ledger.turns) == ({OWN_REWARD: 3.0}, [1.0, 2.0])


def test_an_episode_paid_the_same_in_another_order_has_the_same_reward():
    """Added up one by one, 0.1 + 0.7 + 0.2 is 0.9999999999999999 and 0.2 + 0.1 + 0.7 is 1."""
    for rewards in itertools.permutations((0.1, 0.7, 0.2)):
        assert played(*rewards).ledger.earned == 1.0


@pytest.mark.parametrize("last", [4.0, [0.5, 4.0]])
def test_what_finish_pays_has_the_environments_name(last):
    """A number is of the last turn, a list of the last turns."""
    episode = played(1.0, 2.0)
    episode.stop = "done"
    paid = last if isinstance(last, list) else [last]
    episode.on_result(CallOutcome((last, paid, 1.0), retries=0), "env_error")
    turns = [1.0 + paid[0] if len(paid) == 2 else 1.0, 6.0]
    assert episode.ledger.named_turns == {OWN_REWARD: turns}
    assert episode.ledger.turns == turns
    assert episode.ledger.named == {OWN_REWARD: sum(turns)}
