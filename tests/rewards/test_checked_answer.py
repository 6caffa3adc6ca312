"""Built-in checkers as functions of `config.rewards`."""

from dataclasses import replace

import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.rewards.reward_functions import load_functions

FUNCTION = "seeupo_jax.rewards.checked_answer:CheckedAnswer"
MESSAGES = (
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>Perhaps 5?</think>\nIt is 4"},
    {"role": "user", "content": "#### 5"},
)
EPISODE = FinishedEpisode("t", "train", MESSAGES, (), "done", 1, 0, {}, 0, {"gold": "#### 4"})


def loaded(**options):
    reward = {"function": FUNCTION, "name": "number", "options": options}
    return load_functions(from_dict({"rewards": [reward]}).rewards)[0]


def test_the_last_message_is_checked_without_its_thoughts():
    reward = loaded(check="number", answer="gold")
    assert reward.call(EPISODE) == 1
    assert reward.call(replace(EPISODE, info={"gold": 5})) == 0
    reward.close()


def test_a_format_sees_the_thoughts():
    reward = loaded(check="format", check_options={"pattern": "<think>.*</think>.*"})
    assert reward.call(EPISODE) == 1


def test_several_checks_have_weights():
    weights = {"number": 0.75, "length": 0.25}
    reward = loaded(check=weights, check_options={"length": {"max": 1}}, answer="gold")
    assert reward.call(EPISODE) == 0.75


def test_wrong_options_are_refused_before_the_run_and_a_missing_answer_in_it():
    with pytest.raises(ValueError, match=r"config.rewards\[0\].*check: got 'nubmer'; allowed: "):
        loaded(check="nubmer", answer="gold")
    with pytest.raises(ValueError, match="without 'gold'"):
        loaded(check="number", answer="gold").call(replace(EPISODE, info={}))
