"""An episode whose environment hung is left out, or counts without a reward for that turn."""

import dataclasses
import threading

import numpy as np
import pytest
from rollout_cases import play

from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.configuration.schema import Config, Env
from seeupo_jax.envs.base import StepResult
from seeupo_jax.policy_io.resume_check import check_same_run
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import rollout_metrics
from seeupo_jax.trajectories.episodes import to_episode
from seeupo_jax.types import learnable, rewards_of

ZERO = Env(timeout_as="zero_reward")


class Hangs:
    """Task `METHOD N`: the call of a method number N never returns; each step pays 0.25."""

    released = threading.Event()

    def task_ids(self, split):
        return ["step 1"]

    def reset(self, task_id, seed):
        self._method, number = task_id.split()
        self._left = int(number)
        self._wait("reset")
        return ({"role": "user", "content": "1 2"},), ()

    def step(self, text):
        self._wait("step")
        return StepResult(({"role": "tool", "content": "1"},), 0.25, False)

    def finish(self, stop):
        self._wait("finish")

    def score(self):
        return 1.0

    def close(self):
        pass

    def _wait(self, method):
        self._left -= method == self._method
        if self._left == 0 and method == self._method:
            self.released.wait(30)


@pytest.fixture
def hangs():
    Hangs.released = threading.Event()

    def played(tasks, env):
        timer = threading.Timer(3, Hangs.released.set)  # the threads that hang end with the test
        timer.start()
        return play(Hangs, tasks, timeout_s=0.5, env=env)

    yield played
    Hangs.released.set()


def test_by_default_an_episode_that_hung_counts_nowhere(hangs):
    hung, well = hangs(["step 2", "step 9"], Env())
    assert (hung.stop, hung.failed, well.stop, well.failed) == ("timeout", True, "max_turns", False)
    assert np.isnan(to_episode(hung, {}).success) and not hung.timeout_counts


@pytest.mark.parametrize("task, rewards", [("step 1", (0.0,)), ("step 2", (0.25, 0.0))])
def test_with_zero_reward_it_counts_without_a_reward_for_the_turn_that_hung(hangs, task, rewards):
    hung, well = hangs([task, "step 9"], ZERO)
    assert (hung.stop, hung.failed) == ("timeout", False)
    assert hung.turn_rewards == rewards == tuple(rewards_of(hung)) and hung.reward == sum(rewards)
    assert hung.info["score"] == 0 and to_episode(hung, {}).success == 0
    assert "0.5 s" in hung.info["failure"]
    pair = [dataclasses.replace(each, group=0) for each in (hung, well)]
    assert learnable(pair).all()


def test_a_hang_in_finish_costs_the_score_and_no_reward(hangs):
    (hung,) = hangs(["finish 1"], ZERO)
    assert (hung.turn_rewards, hung.info["score"]) == ((0.25, 0.25), 0) and not hung.failed


def test_a_reset_that_hangs_is_no_action_s_fault(hangs):
    (hung,) = hangs(["reset 1"], ZERO)
    assert (hung.stop, hung.failed) == ("timeout", True)


def test_both_kinds_are_counted(hangs):
    for env, counted, failed in ((Env(), 0, 1), (ZERO, 1, 0)):
        metrics = rollout_metrics(Collected(hangs(["step 1", "step 9"], env), 1.0, 0.0, 1, 1))
        names = ("rollout/timeouts", "rollout/timeouts_counted", "rollout/failed")
        assert [metrics[name] for name in names] == [1, counted, failed]
        Hangs.released.clear()


def test_a_run_resumes_from_a_version_without_the_field():
    saved = to_dict(Config())
    del saved["env"]["timeout_as"], saved["env"]["max_reward"]
    check_same_run(Config(), saved)
    with pytest.raises(ValueError, match="config.env"):
        check_same_run(from_dict({"env": {"timeout_as": "zero_reward"}}), saved)
