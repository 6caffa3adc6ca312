"""Typed methods are tools: their schemas, how calls are checked and dispatched, and what counts."""

import asyncio
import math
from typing import Literal

import pytest

from seeupo_jax.envs import ToolEnvironment, TransientError, tool
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, render_hermes
from seeupo_jax.envs.tool_environment import tool_schema
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.validation import check_reset, check_step


def root(x: float) -> float:
    """The square root of a number.

    Args:
        x: A number that is at least 0.
    """
    return math.sqrt(x)


class Till(ToolEnvironment):
    """Sums up what is added; done at 10."""

    functions = (root,)
    tool_timeout_s = 0.2

    def task_ids(self, split):
        return [f"{split}/0"]

    def begin(self, task_id, seed):
        self.sum, self.refused = 0, 1
        return [{"role": "user", "content": "Make it 10."}]

    def score(self):
        return min(self.sum, 10) / 10

    @tool
    def add(self, count: int, unit: Literal["one", "two"] = "one", note: str | None = None) -> dict:
        """Adds to the sum.

        Args:
            count: How many.
            unit: Of what.
            note: A remark.
        """
        if count < 0:
            raise ToolCallError("count must be at least 0")
        self.sum += count * (1 if unit == "one" else 2)
        self.done = self.sum >= 10
        return {"sum": self.sum}

    @tool
    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    @tool
    def busy(self) -> str:
        """Works at the second try."""
        self.refused -= 1
        if self.refused >= 0:
            raise TransientError("busy")
        return "free"

    def hidden(self):
        """No tool."""


@pytest.fixture
def till():
    env = Till()
    check_reset(env.reset("train/0", 0))
    return env


def contents(env, text):
    return [message["content"] for message in check_step(env.step(text)).observation]


def test_schemas_come_from_signatures_and_docstrings():
    _, tools = check_reset(Till().reset("train/0", 0))
    assert [each["name"] for each in tools] == ["add", "wait", "busy", "root"]
    assert tools[0] == {
        "name": "add",
        "description": "Adds to the sum.",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "description": "How many."},
                "unit": {"type": "string", "enum": ["one", "two"], "description": "Of what."},
                "note": {"type": "string", "nullable": True, "description": "A remark."},
            },
            "required": ["count"],
        },
    }
    assert tools[2]["parameters"] == {"type": "object", "properties": {}}


def test_calls_are_answered_in_order_and_earn_the_change_of_the_score(till):
    text = render_hermes("add", count=3) + render_hermes("root", x=16)
    first = check_step(till.step(f"I add. {text}"))
    assert first.observation == (
        {"role": "tool", "content": '{"sum": 3}', "name": "add"},
        {"role": "tool", "content": "4.0", "name": "root"},
    )
    assert first.reward == pytest.approx(0.3) and not first.done
    last = check_step(till.step(render_hermes("add", count=4, unit="two", note=None) * 2))
    assert last.done and first.reward + last.reward == pytest.approx(till.score()) == 1.0
    assert len(last.observation) == 1, "nothing is called after the end"
    assert last.info == {"tool_calls": 3, "tool_errors": 0, "executed": [True, True]}


@pytest.mark.parametrize(
    "call, reason",
    [
        (ToolCall("sell", {}), "there is no tool 'sell'; the tools are add, wait, busy, root"),
        (ToolCall("hidden", {}), "there is no tool 'hidden'; the tools are add, wait, busy, root"),
        (ToolCall("add", {}), "add: 'count' is a required property; its arguments: count, unit"),
        (ToolCall("add", {"count": 1, "tax": 2}), "add: Additional properties are not allowed"),
        (ToolCall("add", {"count": "1"}), "add['count']: '1' is not of type 'integer'"),
        (ToolCall("add", {"count": 1.0}), "add['count']: 1.0 is not of type 'integer'"),
        (ToolCall("add", {"count": True}), "add['count']: True is not of type 'integer'"),
        (ToolCall("add", {"count": None}), "add['count']: None is not of type 'integer'"),
        (ToolCall("add", {"count": 1, "unit": "six"}), "add['unit']: 'six' is not one of ['one'"),
        (ToolCall("add", {"count": 1, "note": 5}), "add['note']: 5 is not"),
        (ToolCall("add", {"count": -1}), "count must be at least 0"),
        (ToolCall("busy", {"x": "y" * 999}), "busy: Additional properties are not allowed"),
        (ToolCall("wait", {"seconds": 30}), "wait took longer than 0.2 s"),
    ],
)
def test_a_wrong_call_is_a_message_that_the_policy_reads(till, call, reason):
    result = check_step(till.step(render_hermes(call.name, **call.arguments)))
    (message,) = result.observation
    assert message["role"] == "tool" and message["content"].startswith(f"Error: {reason}")
    assert len(message["content"]) < 400 and till.sum == 0 and result.reward == 0.0
    assert result.info == {"tool_calls": 1, "tool_errors": 1, "executed": [False]}


def test_a_message_without_a_call_or_with_a_broken_one_is_answered(till):
    (spoken,) = check_step(till.step("Ten!")).observation
    assert spoken["role"] == "user" and "the tools are add, wait, busy, root." in spoken["content"]
    (broken,) = check_step(till.step("<tool_call>{")).observation
    assert broken["role"] == "tool" and broken["content"].startswith("Error: every <tool_call>")
    assert till.step(render_hermes("wait", seconds=0)).info["executed"] == [False, False, True]


def test_a_class_may_take_messages_without_calls(till):
    class Spoken(Till):
        def answer(self, text):
            self.sum, self.done = 10, True
            return "Right."

    env = Spoken()
    env.reset("train/0", 0)
    result = env.step("Ten!")
    assert result.done and result.reward == 1.0 and result.info["executed"] == [True]


def test_a_failure_of_a_tool_is_one_of_the_environment():
    class Broken(Till):
        @tool
        def explode(self) -> str:
            """Explodes."""
            raise KeyError("tea")

    env = Broken()
    env.reset("train/0", 0)
    with pytest.raises(KeyError, match="tea"):
        env.step(render_hermes("explode"))


def test_a_step_that_is_repeated_executes_no_call_twice(till):
    text = render_hermes("add", count=2) + render_hermes("busy")
    with pytest.raises(TransientError):
        till.step(text)
    assert contents(till, text) == ['{"sum": 2}', "free"]
    assert contents(till, render_hermes("add", count=1)) == ['{"sum": 3}']


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_are_read_in_the_tool_format(name):
    env = Till()
    env.tool_format = name
    env.reset("train/0", 0)
    text = TOOL_FORMATS[name].render("", [ToolCall("add", {"count": 2, "unit": "two"})])
    assert contents(env, text) == ['{"sum": 4}']


def test_a_tool_without_types_descriptions_or_a_docstring_is_refused():
    def untyped(x):
        """A tool.

        Args:
            x: A value.
        """

    def undescribed(x: int):
        """A tool."""

    def silent():
        pass

    for function in (untyped, undescribed, silent):
        with pytest.raises(ValueError, match=f"{function.__name__}: got .*; allowed: a type hint"):
            tool_schema(function)

    class Empty(Till):
        functions = ()
        add = wait = busy = None

    with pytest.raises(ValueError, match="Empty: got no tool; allowed: methods with @tool"):
        Empty().reset("train/0", 0)
