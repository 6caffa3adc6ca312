"""The reward function that matches calls with those that the environment names in `info`."""

from dataclasses import replace

import pytest
import reward_cases
from reward_collections import collected

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.tool_calls import render_hermes
from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.rewards.matched_calls import MatchedCalls
from seeupo_jax.rewards.reward_functions import load_functions

FUNCTION = "seeupo_jax.rewards.matched_calls:MatchedCalls"
REFERENCE = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]


def episode(*texts, info, **fields):
    messages = [{"role": "user", "content": "?"}]
    for text in texts:
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "ok"}]
    made = FinishedEpisode("t", "train", tuple(messages), (), "done", len(texts), 0, {}, 0, info)
    return replace(made, **fields)


def test_each_turn_gets_the_mean_of_its_calls():
    f, wrong, g = render_hermes("f", a=1), render_hermes("f", a=2), render_hermes("g")
    info = {"reference_calls": REFERENCE}
    played = episode(f, f"{g}\n{wrong}", "<tool_call>", "Done.", info=info)
    assert MatchedCalls()(played) == [1, 0.5, 0, 0]
    python = episode("[g(), f(a=1)]", "[f(a=1)", "no", info={"gold": REFERENCE})
    assert MatchedCalls(format="python", field="gold")(python) == [1, 0, 0]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = ({"name": "f", "description": "", "parameters": parameters},)
    xml = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    typed = episode(xml, info=info, tools=tools)
    assert MatchedCalls(format="qwen3_coder")(typed) == [1]
    assert MatchedCalls(matching="soft")(episode(f, info=info)) == pytest.approx([0.5], abs=1e-9)


def test_messages_that_an_agent_only_repeats_are_no_turns():
    played = episode(render_hermes("g"), info={"reference_calls": REFERENCE})
    repeated = {"role": "assistant", "content": render_hermes("f", a=1), "history": "1"}
    assert MatchedCalls()(replace(played, messages=(repeated, *played.messages))) == [1]


@pytest.mark.parametrize("info", [{}, {"reference_calls": "f"}, {"reference_calls": [{"name": 1}]}])
def test_an_environment_without_reference_calls_is_reported(info):
    with pytest.raises(ValueError, match=r"info\['reference_calls'\]: got .*; allowed: a list of"):
        MatchedCalls()(episode("a", info=info))


def test_wrong_options_are_refused_before_anything_runs():
    for options, text in (
        ({"matching": "best"}, "matching: got 'best'; allowed: hard, soft"),
        ({"format": "xml"}, "format: got 'xml'; allowed: hermes, python"),
    ):
        rewards = from_dict({"rewards": [{"function": FUNCTION, "options": options}]}).rewards
        with pytest.raises(ValueError, match=text):
            load_functions(rewards)


class Referring(reward_cases.Paying):
    def step(self, text):
        result = super().step(text)
        info = {"reference_calls": [{"name": "f", "arguments": {}}]}
        return StepResult(result.observation, result.reward, result.done, info)


def test_a_run_takes_it_as_a_reward_for_each_turn():
    rewards = [{"function": FUNCTION, "name": "matching", "weight": 0.5}]
    (trajectory,) = collected(rewards, make=Referring, tasks=["good"]).trajectories
    assert trajectory.rewards == {"env": 0.5, "matching": 0.0}
    assert trajectory.turn_rewards == (0.25, 0.25)


class ReferringAfterExamples(Referring, reward_cases.Showing):
    pass


def test_messages_of_an_assistant_that_the_environment_shows_are_no_turns():
    rewards = [{"function": FUNCTION, "name": "matching"}]
    found = collected(rewards, make=ReferringAfterExamples, tasks=["good"])
    (trajectory,) = found.trajectories
    assert trajectory.stop == "done" and trajectory.turns == 2
    assert trajectory.named_turn_rewards["matching"] == (0.0, 0.0)
    assert trajectory.messages.count(ReferringAfterExamples.example) == 3  # without a mark
