"""Conversations whose tokens are whole messages: what a server of chat completions is sent."""

import json
import math

import pytest

from seeupo_jax.agents.chat_messages import NO_RESULT, ChatMessages
from seeupo_jax.agents.server_dialects import CHAT, complete, owners_dialect
from seeupo_jax.envs.tool_calls import parse_hermes
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.rollout.engine.sampling import Sampling

SAMPLING = Sampling(temperature=0.7, top_k=None, top_p=None, max_tokens=9, end_ids=())
NUMBERS = {"x": {"type": "integer"}, "y": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": NUMBERS}
TOOL = {"name": "add", "description": "", "parameters": SCHEMA}
FIRST = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1 and 2?"})


def call(arguments, given="c1", name="add"):
    return {"id": given, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(content, *calls, reason="stop", **more):
    message = {"role": "assistant", "content": content}
    message |= {"tool_calls": list(calls)} if calls else {}
    return {"choices": [{"message": message, "finish_reason": reason}], **more}


class Talk:
    """One conversation with a server that answers what a test says."""

    def __init__(self, name="hermes"):
        self.messages = ChatMessages(TOOL_FORMATS[name])
        self.conversation = self.messages.begin(FIRST, (TOOL,))

    def sent(self, sampling=SAMPLING, seed=5):
        return self.messages.dialect.body("m", self.conversation.tokens, sampling, seed)

    def answer(self, given, *observation):
        """Takes a reply, and what the environment says to it; returns the environment's text."""
        read = complete(self.messages.dialect.read(given), SAMPLING)
        assert math.isnan(*read.logp)
        self.read, self.conversation = read, self.conversation.extend(read.tokens, observation)
        return self.messages.text(read.tokens)


def test_the_first_request_has_the_messages_the_tools_and_the_runs_sampling():
    assert Talk().sent() == {
        "model": "m",
        "messages": list(FIRST),
        "tools": [{"type": "function", "function": TOOL}],
        "temperature": 0.7,
        "max_tokens": 9,
        "seed": 5,
    }


def test_greedy_is_temperature_0_and_what_is_not_set_is_not_sent():
    sent = Talk().sent(SAMPLING._replace(top_k=1, top_p=0.9), seed=None)
    assert (sent["temperature"], sent["top_p"]) == (0.0, 0.9)
    assert "seed" not in sent and "top_k" not in sent


def test_the_limit_has_the_name_that_the_server_wants():
    talk = Talk()
    talk.messages.limit_field = "max_completion_tokens"
    assert talk.sent()["max_completion_tokens"] == 9 and "max_tokens" not in talk.sent()


@pytest.mark.parametrize("name", ["hermes", "llama", "qwen3_coder"])
def test_a_call_is_written_in_the_environments_format_and_answered_under_its_id(name):
    talk = Talk(name)
    given = call('{"x": 1, "y": 2}')
    text = talk.answer(reply("So:", given), {"role": "tool", "content": "3"})
    content, (read,) = TOOL_FORMATS[name].parse(text, (TOOL,))
    assert (read.name, dict(read.arguments)) == ("add", {"x": 1, "y": 2})
    assert talk.sent()["messages"] == [
        *FIRST,
        {"role": "assistant", "content": "So:", "tool_calls": [given]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


def test_every_call_gets_one_result_in_the_order_of_the_calls():
    talk = Talk()
    calls = [call('{"x": 1}', "a"), call("", "b"), call("{}", "")]
    observation = (
        {"role": "user", "content": "next"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second"},
    )
    text = talk.answer(reply(None, *calls, reason="tool_calls"), *observation)
    assert [dict(each.arguments) for each in parse_hermes(text)] == [{"x": 1}, {}, {}]
    asked, *answers = talk.sent()["messages"][2:]
    assert asked["content"] is None
    assert [each["id"] for each in asked["tool_calls"]] == ["a", "b", "call_2"]
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in answers] == [
        ("tool", "a", "first"),
        ("tool", "b", "second"),
        ("tool", "call_2", NO_RESULT),
        ("user", None, "next"),
    ]


def test_a_result_without_a_call_is_the_users():
    talk = Talk()
    assert talk.answer(reply("Three."), {"role": "tool", "content": "no call"}) == "Three."
    assert talk.sent()["messages"][2:] == [
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "no call"},
    ]


@pytest.mark.parametrize("arguments", ['{"x": ', "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_no_call_but_the_text_that_was_written(arguments):
    talk = Talk()
    text = talk.answer(reply("So:", call(arguments)), {"role": "tool", "content": "error"})
    assert text == f"So:\nadd{arguments}"
    assert talk.sent()["messages"][2:] == [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "error"},
    ]


def test_tokens_are_counted_and_so_are_answers_that_were_cut():
    talk = Talk()
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
    talk.answer(reply("Thr", reason="length", usage=usage))
    assert talk.read.usage == {"prompt_tokens": 7, "decoded_tokens": 9, "cut_answers": 1}
    talk.answer(reply("Three."))
    assert talk.read.usage == {"cut_answers": 0}


def test_an_answer_that_a_filter_removed_is_none():
    with pytest.raises(ValueError, match="not a whole action"):
        Talk().answer(reply(None, reason="content_filter"))


def test_a_conversation_continues_its_own_tokens_and_no_other():
    talk = Talk()
    before, other = talk.conversation.tokens, talk.messages.begin(FIRST, ()).tokens
    talk.answer(reply("Three."), {"role": "user", "content": "Sure?"})
    assert talk.conversation.tokens[: len(before)] == before
    assert not set(before) & set(other)
    json.dumps(talk.sent())


@pytest.mark.parametrize(
    "owner, dialect",
    [("vllm", "vllm"), ("sglang", "sglang"), ("openai", CHAT), ("chat", CHAT), (None, CHAT)],
)
def test_only_servers_that_name_themselves_are_sent_tokens(owner, dialect):
    assert owners_dialect({"owned_by": owner} if owner else {}) == dialect
