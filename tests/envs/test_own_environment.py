"""The examples of docs/own_environment.md run, here and behind the server, and are those shown."""

import doctest
import json
import re
import types

import chat_cases
import pytest
from places import ROOT
from remote_cases import Process, remote

from seeupo_jax import envs
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.tasks import list_tasks, task_labels
from seeupo_jax.envs.tool_calls import render_hermes
from seeupo_jax.envs.validation import reset_episode
from seeupo_jax.evaluation.episode_host import try_resets

PAGE = (ROOT / "docs" / "own_environment.md").read_text()
NAME = "docs.examples.guess_number:GuessNumber"


@pytest.fixture(autouse=True)
def repository_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def bisect(env, task_id):
    """The guesses of halving, and the score."""
    env.reset(task_id, seed=0)
    low, high, guesses, done = 1, 100, [], False
    while not done:
        guesses.append((low + high) // 2)
        step = env.step(f"I say {guesses[-1]}.")
        done = step.done
        if "higher" in step.observation[0]["content"]:
            low = guesses[-1] + 1
        else:
            high = guesses[-1] - 1
    return guesses, env.score()


@pytest.mark.parametrize(("name", "lines"), [("guess_number", 45), ("price_desk", 50)])
def test_the_page_shows_the_file(name, lines):
    text = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
    assert f"```python\n{text}```" in PAGE
    assert len(text.splitlines()) <= lines


def test_the_price_desk_answers_calls_and_mistakes():
    env = envs.make(
        "docs.examples.price_desk:PriceDesk", tasks=str(ROOT / "docs/examples/price_desk.jsonl")
    )
    assert [len(list_tasks(env, split)) for split in ("train", "test")] == [16, 4]
    messages, tools = reset_episode(env, "train/0", 0, 0)
    assert "tea, oil, bread" in messages[0]["content"] and len(tools) == 2
    answers = {
        "Tea?": "Error: the message has no tool call; the tools are price, buy.",
        render_hermes("price", item="tea"): "215 cents",
        render_hermes("sell", item="tea"): "Error: there is no tool 'sell'",
        render_hermes("price", item="gold"): "Error: 'gold' is not for sale.",
        render_hermes("price", item=["tea"]): "Error: price['item']: ['tea'] is not of type",
        "<tool_call>": "Error: every <tool_call> needs its </tool_call>.",
    }
    for text, answer in answers.items():
        result = env.step(text)
        assert result.observation[0]["content"].startswith(answer) and not result.done
    assert env.step(render_hermes("buy", item="tea")).done and env.score() == 1.0
    env.reset("train/0", 0)
    assert env.step(render_hermes("buy", item="oil")).reward == 0.0 and env.score() == 0.0


def test_a_line_of_tasks_ends_where_json_lines_end(tmp_path):
    task = {"id": "train/0", "split": "train", "prices": {"\u2028 \u2029 \x85": 1}}
    (tmp_path / "tasks").write_text(json.dumps(task, ensure_ascii=False) + "\n", encoding="utf-8")
    env = envs.make("docs.examples.price_desk:PriceDesk", tasks=str(tmp_path / "tasks"))
    assert env.tasks == {"train/0": task}


def test_what_the_page_shows_of_the_parser_and_of_an_episode(monkeypatch, capsys):
    (session,) = re.findall(r"```pycon\n(.*?)```", PAGE, re.DOTALL)
    lines = doctest.DocTestParser().get_doctest(session, {}, "the page", None, None)
    results = doctest.DocTestRunner().run(lines)
    assert results == (0, 4), capsys.readouterr().out
    (block,) = re.findall(r"```python\n(from docs.examples.price_desk.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(block, {})
    assert capsys.readouterr().out.endswith("1.0\n")


def settings_on_the_page():
    """The code blocks that set `config.env`."""
    text = (ROOT / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block for block in blocks if block.startswith("config.env.name")]


def test_every_environment_with_options_is_shown():
    assert len(settings_on_the_page()) == 4


def test_the_wrapper_on_the_page_pays_its_bonus_whoever_ends_the_episode(tmp_path):
    (block,) = re.findall(r"```python\n(import dataclasses.*?)```", PAGE, re.DOTALL)
    (tmp_path / "thrifty.py").write_text(block)
    options = {"name": "order_desk", "level": 2}  # as `config.env.options` gives them
    env = envs.make(f"{tmp_path}/thrifty.py:Thrifty", **options)
    assert env.inner.level == 2
    env = envs.make(f"{tmp_path}/thrifty.py:Thrifty", name="order_desk")
    assert task_labels(env, list_tasks(env, "train")[0]).keys() == {"request"}
    env.reset("train/0", seed=0)
    assert env.step("one two").reward == 0.0 and env.finish("max_turns") == 1 / 3
    env.reset("train/0", seed=0)
    rewards = [env.step("three").reward for _ in range(6)]  # the desk ends at the sixth
    assert rewards == [0.0] * 5 + [1 / 7]


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", settings_on_the_page())
def test_the_options_shown_make_an_environment(block):
    for package in ("gymnasium", "websockets", "textworld_express"):
        pytest.importorskip(package)
    config = types.SimpleNamespace(env=types.SimpleNamespace())
    exec(block, {"config": config})
    env = envs.make(config.env.name, **config.env.options)
    assert env.task_ids("train")[0].removeprefix("order_desk:") == "train/0"
    env.close()


def test_halving_finds_every_number_and_the_same_guess_does_not():
    env = envs.make(NAME)
    found = [bisect(env, task_id) for task_id in env.task_ids("test")]
    assert {score for _, score in found} == {1.0}
    assert max(len(guesses) for guesses, _ in found) <= 7
    env.reset("test/0", seed=0)
    results = [env.step("a hundred and one: 101") for _ in range(7)]
    assert [r.done for r in results] == [False] * 6 + [True] and env.score() == 0.0
    env.reset("test/0", seed=0)
    assert env.step("no idea").observation == ({"role": "user", "content": "Write a number."},)
    with pytest.raises(ValueError, match="guess_number split: got 'dev'; allowed: train, test"):
        env.task_ids("dev")


def test_a_server_plays_it_just_so(tmp_path):
    with Process(tmp_path / "token", env=NAME, flags=['--options={"max_turns": 9}']) as server:
        there, here = remote(server.url, tmp_path / "token"), envs.make(NAME, max_turns=9)
        assert there.task_ids("train") == here.task_ids("train")
        for task_id in here.task_ids("train")[:20]:
            assert bisect(there, task_id) == bisect(here, task_id)
        there.close()


def test_an_environment_that_reads_another_tool_format_than_the_model_writes_is_warned_of(caplog):
    """The model is in llama's format; the class would read none of its calls."""
    tokenizer = chat_cases.make("llama3_2")
    options = {"tasks": str(ROOT / "docs/examples/price_desk.jsonl")}
    name = "docs.examples.price_desk:PriceDesk"
    config = from_dict({"env": {"name": name, "options": options}})
    (tools,) = try_resets(config, ["train/0"], tokenizer)
    assert [each["name"] for each in tools] == ["price", "buy"]
    (sentence,) = [r.message for r in caplog.records if "tool calls" in r.message]
    assert "PriceDesk reads tool calls as hermes" in sentence and "writes llama:" in sentence
