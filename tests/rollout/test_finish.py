"""What an environment pays when the trainer ends its episode reaches the trajectory."""

import re
import time

import pytest
from remote_cases import remote, served
from rollout_cases import play

from seeupo_jax.envs.base import StepResult, TransientError
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import truncation
from seeupo_jax.types import rewards_of


class Bare:
    """Its task says how many steps an episode takes; each pays 0.25."""

    def task_ids(self, split):
        return ["9"]

    def reset(self, task_id, seed):
        self._event, _, number = task_id.rpartition(" ")
        self._left, self._score = int(number), 0.0
        words = "1 " * (50 if self._event == "prompt" else 2)
        return ({"role": "user", "content": words},), ()

    def step(self, text):
        self._left -= 1
        words = "1 " * (40 if self._event == "long" else 1)
        return StepResult(({"role": "tool", "content": words},), 0.25, self._left == 0)

    def score(self):
        return self._score

    def close(self):
        pass


class PaysAtTheEnd(Bare):
    """Adds 2 at the end of an episode, whoever ends it."""

    logged = []  # of all objects

    def step(self, text):
        result = super().step(text)
        return StepResult(result.observation, result.reward + 2 * result.done, result.done)

    def finish(self, stop):
        self.logged.append(stop)
        if self._event == "late":
            time.sleep(30)
        if self._event == "broken":
            raise KeyError("ledger")
        if self._event == "busy" and self.logged.count("max_turns") == 1:
            raise TransientError("wait")
        self._score = 0.5
        return {"nothing": None, "word": "2"}.get(self._event, 2)


@pytest.fixture(autouse=True)
def nobody_told():
    PaysAtTheEnd.logged.clear()


def paid(trajectory):
    return trajectory.stop, trajectory.turn_rewards, trajectory.reward, trajectory.info["score"]


def test_the_last_reward_is_paid_once_whoever_ends_the_episode():
    done, turns, tokens = play(PaysAtTheEnd, ["a 2", "a 9", "long 9"], max_turns=3)
    assert paid(done) == ("done", (0.25, 2.25), 2.5, 0.0)
    assert paid(turns) == ("max_turns", (0.25, 0.25, 2.25), 2.75, 0.5)
    assert paid(tokens) == ("max_tokens", (2.25,), 2.25, 0.5)
    assert sorted(PaysAtTheEnd.logged) == ["max_tokens", "max_turns"]
    assert rewards_of(turns) == [0.25, 0.25, 2.25]


def test_none_is_no_reward_and_the_score_is_asked_again():
    (trajectory,) = play(PaysAtTheEnd, ["nothing 9"])
    assert paid(trajectory) == ("max_turns", (0.25, 0.25), 0.5, 0.5)


def test_an_environment_without_finish_ends_as_it_did():
    turns, tokens = play(Bare, ["a 9", "long 9"])
    assert paid(turns) == ("max_turns", (0.25, 0.25), 0.5, 0.0)
    assert paid(tokens) == ("max_tokens", (0.25,), 0.25, 0.0)


def test_a_prompt_that_leaves_no_room_is_told_and_its_reward_belongs_to_no_turn():
    (trajectory,) = play(PaysAtTheEnd, ["prompt 9"])
    assert paid(trajectory) == ("max_tokens", (), 2.0, 0.5)
    assert (trajectory.turns, rewards_of(trajectory)) == (0, [])
    assert PaysAtTheEnd.logged == ["max_tokens"]


def test_finish_is_called_like_step():
    broken, word, busy = play(PaysAtTheEnd, ["broken 9", "word 9", "busy 9"])
    line = PaysAtTheEnd.finish.__code__.co_firstlineno
    raised = rf"KeyError: 'ledger' \(finish, test_finish\.py:{line + 5}\)"
    assert broken.stop == "env_error" and re.fullmatch(raised, broken.info["failure"])
    assert word.info["failure"].startswith("finish(): got '2' (str); allowed: a finite number")
    assert paid(busy) == ("max_turns", (0.25, 2.25), 2.5, 0.5)
    (late,) = play(PaysAtTheEnd, ["late 9"], timeout_s=0.2)
    assert (late.stop, late.failed) == ("timeout", True)


def test_a_remote_environment_is_told_too(tmp_path):
    token = tmp_path / "token"
    for make, wanted in ((PaysAtTheEnd, 2.5), (Bare, 0.5)):
        with served(make, token) as server:
            there, here = (
                play(each, ["a 9"])[0] for each in (lambda: remote(server.url, token), make)
            )
            assert paid(there) == paid(here) and there.reward == wanted
    assert PaysAtTheEnd.logged == ["max_turns"] * 2


def test_more_than_a_tenth_stopped_by_the_limit_on_context_is_a_warning():
    tokens, other = play(Bare, ["long 9", "a 9"])
    (early,) = play(Bare, ["prompt 9"])
    few = Collected((tokens, *[other] * 9), 1.0, 0.0, 0, 0)
    assert truncation(few, 512) is None
    logged = truncation(Collected((tokens, early, *[other] * 9), 1.0, 0.0, 0, 0), 512)
    assert logged.startswith(
        "2 of 11 trajectories were stopped by max_tokens, 1 of them before their"
    )
    assert "rollout.max_context=512" in logged
