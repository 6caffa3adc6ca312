"""A history is found again whatever its client did to white space and JSON, and only then."""

import dataclasses

import pytest
from rollout_cases import NumberConversation

from seeupo_jax.agents.calls import HistoryMessage
from seeupo_jax.agents.conversation_cache import CachedConversation, ConversationCache
from seeupo_jax.envs.tool_calls import ToolCall

TOOL = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
USER, SYSTEM = HistoryMessage("user", "1 2"), HistoryMessage("system", "be brief")
CALLS = (ToolCall("add", {"a": 1, "b": [2, {"c": None}]}),)
OURS = HistoryMessage("assistant", "5", CALLS)
NEXT = HistoryMessage("tool", "6")


def answered(length):
    return CachedConversation(NumberConversation(None, [0] * (length - 2)), [5, 3], group=0)


@pytest.fixture
def forgotten():
    return []


@pytest.fixture
def remembered(forgotten):
    known = ConversationCache(100, forgotten.append)
    known.add(1, [SYSTEM, USER, OURS], (TOOL,), answered(10))
    return known


REWRITTEN = {
    "as it was": OURS,
    "other white space": dataclasses.replace(OURS, content="\n5 "),
    "other order of arguments": dataclasses.replace(
        OURS, calls=(ToolCall("add", {"b": [2, {"c": None}], "a": 1}),)
    ),
}


@pytest.mark.parametrize("actual", REWRITTEN.values(), ids=REWRITTEN)
def test_a_history_that_says_the_same_continues(remembered, actual):
    found = remembered.find([SYSTEM, USER, actual, NEXT, USER], (TOOL,))
    assert found is not None and found.answered.tokens == 10
    assert found.messages == (NEXT, USER)


OTHER = {
    "other tools": ([SYSTEM, USER, OURS, NEXT], ()),
    "a message less": ([USER, OURS, NEXT], (TOOL,)),
    "another role": ([SYSTEM, dataclasses.replace(USER, role="tool"), OURS, NEXT], (TOOL,)),
    "other words": ([SYSTEM, USER, dataclasses.replace(OURS, content="5 5"), NEXT], (TOOL,)),
    "another argument": (
        [SYSTEM, USER, dataclasses.replace(OURS, calls=(ToolCall("add", {"a": 1}),)), NEXT],
        (TOOL,),
    ),
    "no calls": ([SYSTEM, USER, dataclasses.replace(OURS, calls=()), NEXT], (TOOL,)),
    "not as far": ([SYSTEM, USER], (TOOL,)),
}


@pytest.mark.parametrize("messages, tools", OTHER.values(), ids=OTHER)
def test_a_history_that_says_something_else_is_new(remembered, messages, tools):
    assert remembered.find(messages, tools) is None


def test_the_longest_history_is_continued(remembered):
    further = HistoryMessage("assistant", "7")
    remembered.add(2, [SYSTEM, USER, OURS, NEXT, further], (TOOL,), answered(20))
    found = remembered.find([SYSTEM, USER, OURS, NEXT, further, USER], (TOOL,))
    assert found.answered.tokens == 20 and found.messages == (USER,)
    branch = remembered.find([SYSTEM, USER, OURS, USER], (TOOL,))
    assert branch.answered.tokens == 10 and branch.messages == (USER,)


def test_conversations_not_used_for_longest_are_forgotten(remembered, forgotten):
    remembered.add(2, [USER, OURS], (), answered(50))
    assert remembered.find([SYSTEM, USER, OURS, NEXT], (TOOL,)) is not None  # the latest used
    remembered.add(3, [NEXT, OURS], (), answered(60))
    assert forgotten == [2]
    remembered.add(4, [NEXT, OURS], (), answered(61))  # the same words, sampled once more
    assert forgotten == [2, 3]
    remembered.add(5, [USER, NEXT, OURS], (), answered(1000))  # the latest is never forgotten
    assert forgotten == [2, 3, 1, 4] and len(remembered) == 1


def test_volatile_texts_of_a_system_message_are_not_compared():
    cache = ConversationCache(100, lambda key: None, (r"^billing: .*$",))
    system = [HistoryMessage("system", f"billing: {number}\nbe brief") for number in (1, 2)]
    cache.add(1, [system[0], USER, OURS], (), answered(10))
    assert cache.find([system[1], USER, OURS, NEXT], ()).answered.tokens == 10
    other = HistoryMessage("system", "billing: 1\nbe long")
    assert cache.find([other, USER, OURS, NEXT], ()) is None
