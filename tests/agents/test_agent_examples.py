"""The examples of docs/agents.md, by the real packages, against the endpoint.

What is asked of the policy is answered by a script, so that it is known what each should come to.
"""

import asyncio
import importlib
import itertools
import json
import os
import random
import re
import subprocess
from pathlib import Path

import openai
import pytest
from places import ROOT

from docs.examples.agents.desk import open_desk
from docs.examples.agents.order_desk_cases import case_of
from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import AgentTask, Completion, HistoryMessage
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.endpoint import Endpoint
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.demonstrator import play
from seeupo_jax.envs.order_desk.desk import Desk, DeskEpisode
from seeupo_jax.envs.tool_calls import parse_hermes, render_hermes
from seeupo_jax.envs.tool_formats.formats import choose_format

EXAMPLES = ROOT / "docs" / "examples" / "agents"
AGENTS = ROOT / "third_party" / "agents"
HERMES = choose_format("hermes")
PRICES = {"tea": 275, "salt": 420, "jam": 185}  # of train/1


class ScriptedSession:
    """Says what `reply` makes of a call, and keeps calls and answers."""

    def __init__(self, reply):
        self.reply, self.calls, self.answers, self.params = reply, [], [], []

    def ignored(self, param):
        self.params.append(param)

    async def complete(self, call, on_text=None):
        text = self.reply(call)
        content, tool_calls = HERMES.parse(text) if call.tools else (text, ())
        self.calls.append(call)
        self.answers.append(HistoryMessage("assistant", content, tool_calls))
        for letter in text if on_text else "":
            on_text(letter)
        finish = "tool_calls" if tool_calls else "stop"
        logp = (-0.5,) * len(text)
        pieces = tuple(sign.encode() for sign in text)
        return Completion(text, content, tool_calls, finish, pieces, logp, prompt_tokens=1)

    def continued(self):
        """Of each call but the first, whether its history is that of the call before, and on."""
        return [
            call.messages[: len(before.messages) + 1] == (*before.messages, answer)
            for before, answer, call in zip(self.calls, self.answers, self.calls[1:], strict=False)
        ]


def shop(call):
    """Asks for one price after the other, and names the cheapest item."""
    history = "\n".join(message.content for message in call.messages if message.role != "system")
    offers = dict(re.findall(r"(\w+) for (\d+)", history))
    names = {tool["name"] for tool in call.tools}
    if "price" in names:
        items = re.search(r"cheapest: (.*)\?", history)[1].split(", ")
        cents = re.findall(r"^\d+$", history, re.MULTILINE)
        if len(cents) < len(items):
            return render_hermes("price", item=items[len(cents)])
        offers = dict(zip(items, cents, strict=True))
    answer = min(offers, key=lambda item: int(offers[item]))
    return render_hermes("final_answer", answer=answer) if "final_answer" in names else answer


def a_list_first(call):
    """As `shop`, after a call with a list where the schema has a string."""
    return shop(call) if call.messages[1:] else render_hermes("price", item=["tea"])


@pytest.fixture(scope="module")
def endpoint():
    served = Endpoint(sampling=SamplingRules(1.0), model="policy", form=AnswerForm(HERMES))
    served.start()
    yield served
    served.close()


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "anthropic_messages"])
def test_an_agent_that_is_a_function_continues_its_history_and_is_paid(endpoint, name):
    agent = importlib.import_module(f"docs.examples.agents.{name}").agent
    session = ScriptedSession(a_list_first)
    access = endpoint.open_key(session)
    task = AgentTask("train/1", "train", {"prices": PRICES}, 0, 0, 6)

    async def run():
        async with openai.AsyncOpenAI(
            base_url=access.base_url, api_key=access.api_key, max_retries=0
        ) as client:
            return await agent(task, client)

    assert asyncio.run(run()) == 1.0
    assert session.continued() == [True, True, True, True] and session.params == []
    assert session.calls[1].messages[-1].content == "no such item"


def run_command(access, folder, interpreter, name, data):
    """What a command agent leaves as its result."""
    (folder / "task.json").write_text(
        json.dumps({"task_id": "train/1", "split": "train", "data": data})
    )
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": "policy",
        "SEEUPO_TASK": str(folder / "task.json"),
        "SEEUPO_RESULT": str(folder / "result.json"),
    }
    command = [interpreter, EXAMPLES / f"{name}.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "result.json").read_text()), done


def interpreter_of(folder):
    python = AGENTS / folder / ".venv" / "bin" / "python"
    if not python.exists():
        pytest.skip("the frameworks are not set up: sh third_party/agents/setup.sh")
    return python


# smolagents writes its history anew: what it called, and what came of it, as texts of its own.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, folder, continued",
    [
        ("openai_stream", ".", []),
        ("smolagents_prices", ".", [False, False, False]),
        ("openai_agents_prices", ".", [True, True, True]),
        ("verifiers_prices", "verifiers", []),
    ],
)
def test_a_command_knows_the_variables_of_its_sdk_and_is_paid(
    endpoint, tmp_path, name, folder, continued
):
    session = ScriptedSession(shop)
    python = interpreter_of(folder)
    reward, done = run_command(
        endpoint.open_key(session), tmp_path, python, name, {"prices": PRICES}
    )
    assert reward == 1.0 and session.continued() == continued and session.params == []
    if name == "openai_stream":
        assert done.stdout == "jam"


def oracle(task, skill=1.0):
    """A session's reply that is the demonstrator's next response."""
    said = list(play(task, skill, random.Random(0)))
    return lambda call: said[sum(message.role == "assistant" for message in call.messages)]


@pytest.mark.exhaustive
def test_the_agent_of_langgraph_solves_a_case_as_the_oracle_does(endpoint, tmp_path):
    task = world.make_task("train", 3)
    session = ScriptedSession(oracle(task))
    access = endpoint.open_key(session)
    reward, _ = run_command(access, tmp_path, interpreter_of("."), "langgraph_desk", case_of(task))
    assert reward == 1.0 and session.continued() == [True] * (len(session.calls) - 1)
    assert [tool["name"] for tool in session.calls[0].tools][-1] == "reply"
    assert session.answers[-1].calls[0].name == "reply"


def judged_by_both(task, texts):
    """The score of the example's desk, which is the environment's."""
    case = DeskEpisode(Desk(task))
    tools, solved = open_desk(json.loads(json.dumps(case_of(task))))
    by_name = {tool.__name__: tool for tool in tools}
    for text in texts:
        (call,) = parse_hermes(text)
        result = case.step(text)
        said = by_name[call.name](**call.arguments)
        for message in result.observation:
            assert said == message["content"]
        if result.done:
            break
    assert solved() == case.score()
    return solved()


def test_the_desk_of_the_example_judges_as_the_environment_does():
    scores = []
    for index in range(200):
        task = world.make_task("train", index)
        scores.append(judged_by_both(task, play(task, 0.4, random.Random(index))))
    assert 0.2 < sum(scores) / len(scores) < 0.6


def test_both_desks_want_the_order_looked_up_before_it_is_changed():
    tasks = (world.make_task("train", index) for index in itertools.count())
    task = next(t for t in tasks if world.resolve(t.request, t.target) == "cancelled")
    of = {"order_id": task.target.order_id}
    calls = {name: render_hermes(f"{name}_order", **of) for name in ("get", "cancel", "return")}
    calls["reply"] = render_hermes("reply", outcome="cancelled")
    for order, score in {
        "get cancel reply": 1,
        "cancel get reply": 0,
        "cancel reply": 0,
        "get cancel return reply": 1,  # what is cancelled cannot be returned
    }.items():
        assert judged_by_both(task, [calls[name] for name in order.split()]) == score


def test_the_page_quotes_the_examples_as_they_are_tested():
    page = (ROOT / "docs" / "agents.md").read_text()
    quoted = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    listed = re.findall(r"^\|.*examples/agents/(\w+\.py)\)", page, re.MULTILINE)
    assert len(set(listed)) == 8
    for name in (*listed, "compaction.py"):
        code = (EXAMPLES / name).read_text()
        assert code in quoted and len(code.splitlines()) < 40, name


def test_the_tasks_of_the_examples_are_those_of_the_test():
    lines = [json.loads(line) for line in (EXAMPLES / "prices.jsonl").read_text().splitlines()]
    assert {line["task_id"]: line["prices"] for line in lines}["train/1"] == PRICES


def test_the_cases_are_written_as_tasks(tmp_path):
    module = importlib.import_module("docs.examples.agents.order_desk_cases")
    module.write(tmp_path / "cases.jsonl", train=3, test=2)
    lines = [json.loads(line) for line in Path(tmp_path / "cases.jsonl").read_text().splitlines()]
    assert [line["task_id"] for line in lines] == [
        *(f"train/{i}" for i in range(3)),
        "test/0",
        "test/1",
    ]
    assert lines[3]["message"] == world.make_task("test", 0).message
