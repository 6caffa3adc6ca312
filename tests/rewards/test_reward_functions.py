"""What is wrong with `config.rewards` is one sentence before anything is compiled."""

import asyncio
import dataclasses
import inspect
import re
import types

import pytest
from places import ROOT
from reward_cases import Closed, Counting

from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.configuration.reward import Reward
from seeupo_jax.configuration.schema import Config
from seeupo_jax.policy_io.resume_check import check_same_run, sampling_hash
from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.rewards.judge import Judge
from seeupo_jax.rewards.reward_functions import load_functions, weighted_sum
from seeupo_jax.training.checks import check_config

CASES = "reward_cases:"


@pytest.mark.parametrize(
    "rewards, sentence",
    [
        ([{}], r"rewards\[0\]: got no function and no name; allowed: at least one"),
        ([{"function": "brevity"}], r"rewards\[0\].function: got 'brevity'; allowed: module:func"),
        ([{"function": CASES + "one", "weight": float("inf")}], r"weight: got inf .* finite"),
        ([{"name": "a b"}], r"rewards\[0\].name: got 'a b'; allowed: 1 to 64 letters"),
        ([{"name": "x", "options": {"a": 1}}], r"options: got options without a function"),
        ([{"function": CASES + "one", "name": "env"}], "got 'env' for a function; allowed: anot"),
        ([{"function": CASES + "one"}, {"name": "one"}], r"rewards\[1\].name: got 'one', which an"),
        ([{"function": "m:f", "wieght": 2}], "no such field; did you mean weight?"),
        ([{"function": "m:f", "timeout_s": 0}], "timeout_s: got 0.0; allowed: a number > 0"),
    ],
)
def test_a_configuration_that_is_wrong_is_a_sentence(rewards, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        from_dict({"rewards": rewards})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "reward, sentence",
    [
        ({"function": "no_such:f"}, r"rewards\[0\].function: got 'no_such:f', but there is no mod"),
        ({"function": CASES + "nine"}, "has no function or class 'nine'; it has"),
        ({"function": CASES + "two"}, r"reward_cases:two\(episode, more\) cannot be called \(miss"),
        ({"function": CASES + "one", "options": {"x": 1}}, "unexpected keyword argument 'x'"),
        ({"function": CASES + "Counting"}, r"missing a required .*argument: 'seconds'"),
        (
            {"function": CASES + "Counting", "options": {"secnods": 1}},
            "argument: 'seconds', got an unexpected one: 'secnods'",
        ),
        ({"function": CASES + "Counting", "options": {"seconds": -1}}, "seconds: got -1; allowed"),
        ({"function": CASES + "NotCalled"}, r"got a class without __call__\(episode\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_found_before_anything_is_compiled(reward, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        check_config(from_dict({"rewards": [reward], "model": {"path": "package:quickstart"}}))
    assert "\n" not in str(error.value)


def test_a_class_is_made_once_with_its_options():
    rewards = [{"function": CASES + "Counting", "options": {"seconds": 0}, "timeout_s": 9}]
    (function,) = load_functions(from_dict({"rewards": rewards}).rewards)
    assert isinstance(function.call.func, Counting) and function.call(None) == 1.0
    assert (function.name, function.timeout_s, function.concurrency) == ("Counting", 9.0, 8)


def test_what_the_checks_before_a_run_make_is_closed():
    before = Closed.made, Closed.count
    with pytest.raises(ValueError, match="config.model.path: got none"):
        check_config(from_dict({"rewards": [{"function": CASES + "Closed"}]}))
    assert (Closed.made, Closed.count) == (before[0] + 1, before[1] + 1)


def test_a_field_close_that_cannot_be_called_closes_nothing():
    (function,) = load_functions(from_dict({"rewards": [{"function": CASES + "Near"}]}).rewards)
    assert function.call(None) == 0.1 and function.close() is None


def test_a_weight_that_is_not_given_is_1_and_minus_0_stays():
    assert weighted_sum({"env": 2.0, "a": 3.0, "b": 5.0}, {"a": 0.5, "env": -1.0}) == 4.5
    assert str(weighted_sum({"env": -0.0}, {})) == "-0.0"


def test_a_resumed_run_has_the_same_rewards_but_may_call_them_otherwise():
    rewards = [{"function": CASES + "one", "weight": 0.5}]
    config, saved = from_dict({"rewards": rewards}), to_dict(from_dict({"rewards": rewards}))
    check_same_run(config, saved)
    quick = from_dict({"rewards": [rewards[0] | {"timeout_s": 5, "concurrency": 2}]})
    check_same_run(quick, saved)
    assert sampling_hash(quick) == sampling_hash(config) != sampling_hash(Config())
    for other in ([], [rewards[0] | {"weight": 0.25}]):
        with pytest.raises(ValueError, match="config.rewards: got .* Choose a new workdir"):
            check_same_run(from_dict({"rewards": other}), saved)
    before = to_dict(Config())
    del before["rewards"]  # a checkpoint of a version without them
    check_same_run(Config(), before)
    with pytest.raises(ValueError, match="config.rewards"):
        check_same_run(config, before)


PAGE = (ROOT / "docs" / "rewards.md").read_text()
ENTRIES = re.findall(r"```python\n(config\.rewards = .*?)```", PAGE, re.DOTALL)


def test_the_page_shows_the_file_and_its_functions_pay_what_it_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    text = (ROOT / "docs" / "examples" / "own_rewards.py").read_text()
    assert f"```python\n{text}```" in PAGE and len(text.splitlines()) <= 20
    from docs.examples.own_rewards import brevity, early

    said = ({"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d e"})
    episode = FinishedEpisode("t", "train", said, (), "done", 4, 0.0, {}, 1.0, {})
    assert brevity(episode, words=8) == 0.75 and asyncio.run(early(episode)) == 0.25


@pytest.mark.parametrize("block", ENTRIES)
def test_what_the_page_configures_passes_every_check(block, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(ROOT)
    config = types.SimpleNamespace()
    exec(block, {"config": config})
    for function in load_functions(from_dict({"rewards": config.rewards}).rewards):
        function.close()


def test_the_page_has_an_example_of_each_kind():
    assert len(ENTRIES) == 3
    fields = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## How rewards")[0], re.MULTILINE)
    assert sorted(fields) == sorted(field.name for field in dataclasses.fields(Reward))
    options = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## A judge")[2], re.MULTILINE)
    assert sorted(options) == sorted(inspect.signature(Judge).parameters)
