"""What a hostile environment returns costs its own episode, with a sentence, and nothing else."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hostile_cases import SAYS, USER, Hostile
from rollout_cases import play

from seeupo_jax.configuration import loading, schema
from seeupo_jax.envs.base import StepResult
from seeupo_jax.trajectories.states import turn_states
from seeupo_jax.types import learnable

SENTENCES = {
    "none": "reset(): got None; allowed: a pair: messages and tools.",
    "words": "reset() messages: got 'hello' (str); allowed: a tuple or a list of messages",
    "three": "reset(): got (({'role': 'user', 'content': '1 2'},), (), 1) (tuple)",
    "role": "reset() messages: got a role 'robot' (str); allowed: system, user, assistant, tool.",
    "content": "reset() messages: got a content None; allowed: a text that UTF-8 can encode.",
    "half": "reset() messages: got a content '\\ud800' (str); allowed: a text that UTF-8",
    "tool": "reset() tools: got a tool 'look' (str); allowed: a tuple or a list of dicts",
    "toolset": "reset() tools: got no JSON (",
    "nothing": "step(): got None; allowed: a StepResult(observation, reward, done, info).",
    "tuple": "step(): got (",
    "info": "step() info: got None; allowed: a dict.",
    "list": "step() info: got [1] (list); allowed: a dict.",
    "text": "step() observation: got 'hello' (str); allowed: a tuple or a list of messages",
    "number": "step() observation: got 5 (int); allowed: a tuple or a list of messages",
    "strings": "step() observation: got a message 'hello' (str); allowed:",
    "person": "step() observation: got a role 5 (int); allowed: system, user, assistant, tool.",
    "reward": "step() reward: got '0.5' (str); allowed: a finite number",
    "vector": "step() reward: got array([1., 1.]) (ndarray); allowed: a finite number",
    "unpaid": "step() reward: got None; allowed: a finite number",
    "done": "step() done: got 'no' (str); allowed: True or False.",
    "states": "step() info[\"states\"]: got ['a', 'b', 'c'] (list); allowed: a list of 1 texts",
    "executed": 'step() info["executed"]: got [1] (list); allowed: a list of 1 booleans',
    "unnamed": "step() rewards: got [0.5] (list); allowed: a dict of at most 64 numbers by name.",
    "misnamed": "step() rewards: got the name 'a/b' (str); allowed: 1 to 64 letters, digits,",
    "renamed": "step() rewards: got the name 'env' (str); allowed: 1 to 64 letters, digits,",
    "endless": "step() rewards['form']: got inf (float); allowed: a finite number of magnitude",
    "unspeakable": "Unspeakable: a Unspeakable whose text cannot be read",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt: ",
    "two": "score(): got 2.0 (float); allowed: a number from 0 to 1.",
    "nan": "score(): got nan (float); allowed: a number from 0 to 1.",
    "unscored": "score(): got None; allowed: a number from 0 to 1.",
    "lost": "LookupError: gone",
}


def test_every_answer_that_the_protocol_does_not_allow_costs_its_episode_only():
    assert SENTENCES.keys() == Hostile.answers.keys()
    tasks = list(itertools.chain(*((task, "healthy") for task in SENTENCES)))
    failed, healthy = (play(Hostile, tasks)[first::2] for first in (0, 1))
    for trajectory in failed:
        assert trajectory.stop == "env_error", trajectory.task_id
        assert trajectory.info["failure"].startswith(SENTENCES[trajectory.task_id])
    assert {(t.stop, t.reward, t.info["score"]) for t in healthy} == {("done", 0.5, 0.5)}
    assert learnable([*failed, *healthy]).sum() == 0  # groups of one


class Paying(Hostile):
    """Its task's name is a list of what its steps pay; the last of them ends the episode."""

    def reset(self, task_id, seed):
        self._pays = [float(pay) for pay in task_id.split()]
        return USER, ()

    def step(self, text):
        pay = self._pays.pop(0)
        return StepResult(SAYS, pay, not self._pays)

    def score(self):
        return 0.0


def test_a_reward_that_is_not_finite_or_too_large_costs_its_episode():
    bound = "of magnitude at most 1e+06 (config.env.max_reward), alone and in an episode's sum."
    wrong = {
        "nan": "got nan (float)",
        "inf": "got inf (float)",
        "-inf": "got -inf (float)",
        "1e30": "got 1e+30 (float)",
        "1 -1.1e6": "got -1100000.0 (float)",
        "6e5 5e5": "got 500000 after 600000",
    }
    failed = play(Paying, wrong)
    for trajectory, got in zip(failed, wrong.values(), strict=True):
        wanted = f"step() reward: {got}; allowed: a finite number {bound}"
        assert (trajectory.stop, trajectory.info["failure"]) == ("env_error", wanted)
        assert np.isfinite(trajectory.reward)
    kept = play(Paying, ["1e6", "-1e6", "6e5 -5e5"])
    assert [(t.stop, t.reward) for t in kept] == [("done", r) for r in (1e6, -1e6, 1e5)]


class Naming(Paying):
    """Names its states, but for the step that ends it, or for the one that does not."""

    def step(self, text):
        result, states = super().step(text), ["hall", "cellar"]
        named = result.done != self.forgets_last
        return replace(result, info={"states": states[: 1 + result.done]} if named else {})

    def reset(self, task_id, seed):
        self.forgets_last = task_id == "0 1"
        return super().reset(task_id, seed)


def test_states_that_the_last_step_does_not_name_any_more_cost_the_episode():
    missing, late = play(Naming, ["0 1", "0 2"])
    wanted = (
        'step() info["states"]: got None; allowed: a list of 2 texts, one for each step so far.'
    )
    assert (missing.stop, missing.info["failure"]) == ("env_error", wanted)
    assert (late.stop, late.info["states"]) == ("done", ["hall", "cellar"])
    assert turn_states([missing, late]).tolist() == [[-1, -1], [0, 1]]


def test_the_bound_on_rewards_is_the_configurations():
    env = schema.Env(max_reward=2.0)
    assert [t.stop for t in play(Paying, ["2", "-2.5"], env=env)] == ["done", "env_error"]
    with pytest.raises(ValueError, match="config.env.max_reward: got 0.0; allowed: a number > 0"):
        loading.from_dict({"env": {"max_reward": 0}})
