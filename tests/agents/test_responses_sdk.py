"""OpenAI's own client talks to the endpoint as to any server: responses."""

import asyncio

import openai
import pytest
from agent_cases import CALLS, FOUND, RULES, TOOL, opened

from seeupo_jax.agents.calls import CallRefused, HistoryMessage
from seeupo_jax.agents.dialects import responses
from seeupo_jax.agents.dialects.exchange import Caller

TOOLS = [{"type": "function", "strict": True, **TOOL}]


@pytest.fixture
def client(episode):
    access = episode[1]
    with openai.OpenAI(
        base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=20
    ) as client:
        yield client


def ask(client, given, **options):
    return client.responses.create(model="any", input=given, **options)


def test_a_text_is_answered_with_its_usage(client, session):
    reply = ask(client, "Hello.", instructions="Be short.")
    assert (reply.output_text, reply.status, reply.model) == ("Hello.", "completed", "ours")
    assert (reply.temperature, reply.top_p) == (RULES.temperature, RULES.top_p)
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (20, 2, 22)
    assert usage.input_tokens_details.cached_tokens == 4
    assert session.calls[0].messages == (
        HistoryMessage("system", "Be short."),
        HistoryMessage("user", "Hello."),
    )


def test_calls_are_items_and_come_back_as_one_message_with_their_text(client, session):
    first = ask(client, CALLS, tools=TOOLS)
    message, *calls = first.output
    assert message.content[0].text == "I look."
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        ("call_1_0", "find", '{"name": "é"}'),
        ("call_1_1", "find", "{}"),
    ]
    assert session.calls[0].tools == (TOOL,)
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        {"role": "user", "content": CALLS},
        *first.output,
        {"type": "function_call_output", "call_id": "call_1_0", "output": "7"},
        {"type": "function_call_output", "call_id": "call_1_1", "output": "8"},
        {"role": "assistant", "content": "A."},
        {"role": "assistant", "content": "B."},
        {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "9"},
        {"role": "user", "content": "x"},
    ]
    ask(client, given, tools=TOOLS)
    assert session.calls[1].messages == (
        HistoryMessage("system", "Be short."),
        HistoryMessage("user", CALLS),
        HistoryMessage("assistant", "I look.", FOUND),
        HistoryMessage("tool", "7"),
        HistoryMessage("tool", "8"),
        HistoryMessage("assistant", "A."),
        HistoryMessage("assistant", "B.", FOUND[1:]),
        HistoryMessage("tool", "9"),
        HistoryMessage("user", "x"),
    )


def test_results_that_come_in_another_order_are_read_in_that_of_the_calls(client, session):
    first = ask(client, CALLS, tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": output}
        for call, output in zip(first.output[1:], "78", strict=True)
    ]
    asked, back = {"role": "user", "content": CALLS}, [*reversed(results)]
    ask(client, [asked, *first.output, *back], tools=TOOLS)
    second = ask(client, back, tools=TOOLS, previous_response_id=first.id)
    for call in session.calls[1:]:
        assert [m.content for m in call.messages[2:]] == ["7", "8"]
    ask(client, "Go on.", previous_response_id=second.id)
    for wrong, message in (
        ("Go on.", "input: got 'call_1_0' without a result"),
        (results[:1], "input: got 'call_1_1' without a result"),
        ([*results, results[0]], r"input\[2\].call_id: got 'call_1_0' a second time"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, wrong, tools=TOOLS, previous_response_id=first.id)


def test_tools_are_not_shown_where_none_may_be_chosen(client, session):
    for choice, shown in (("none", ()), ("auto", (TOOL,))):
        reply = ask(client, CALLS, tools=TOOLS, tool_choice=choice)
        assert session.calls[-1].tools == shown
        assert (reply.output_text == CALLS) == (choice == "none")
        assert reply.tool_choice == choice


def test_the_parts_of_a_text_are_joined_by_newlines(client, session):
    parts = [{"type": "input_text", "text": text} for text in ("a", "b")]
    ask(client, [{"role": "user", "content": parts}])
    assert session.calls[0].messages == (HistoryMessage("user", "a\nb"),)


def test_a_response_continues_the_previous_one_without_its_instructions(client, session):
    first = ask(client, "a", instructions="Be short.")
    second = ask(client, "b", previous_response_id=first.id, instructions="Be long.")
    third = ask(client, "c", previous_response_id=second.id)
    said = [("user", "a"), ("assistant", "a"), ("user", "b"), ("assistant", "b"), ("user", "c")]
    assert session.calls[1].messages[0] == HistoryMessage("system", "Be long.")
    assert session.calls[2].messages == tuple(HistoryMessage(*pair) for pair in said)
    assert third.previous_response_id == second.id
    # One copy of each message in memory, whoever sent it.
    assert session.calls[2].messages[0] is session.calls[1].messages[1]


def test_a_previous_response_must_be_remembered_and_of_the_same_key(endpoint, client, monkeypatch):
    unknown = r"previous_response_id: got '.*'; allowed: one of this key's last"
    for previous in ("resp_1", ask(client, "a", store=False).id):
        with pytest.raises(openai.BadRequestError, match=unknown) as caught:
            ask(client, "b", previous_response_id=previous)
        assert caught.value.param == "previous_response_id"
    mine = ask(client, "mine").id
    with opened(endpoint) as (_, access):
        with openai.OpenAI(base_url=access.base_url, api_key=access.api_key) as other:
            with pytest.raises(openai.BadRequestError, match=unknown):
                ask(other, "b", previous_response_id=mine)
    monkeypatch.setattr(responses, "REMEMBERED", 2)
    ask(client, "x")
    assert ask(client, "b", previous_response_id=mine).output_text == "b"
    ask(client, "y")
    with pytest.raises(openai.BadRequestError, match=unknown):
        ask(client, "b", previous_response_id=mine)


class Changing(dict):
    """Conversations of which another request's answer drops one between two looks."""

    def __contains__(self, key):
        return True

    def values(self):
        raise RuntimeError("dictionary changed size during iteration")


def test_a_large_request_is_read_while_others_are_answered():
    last = (HistoryMessage("user", "a"),)
    tree = {"model": "m", "input": "a", "previous_response_id": None}
    caller = Caller("m", 1, RULES, Changing(), last)
    assert responses.DIALECT.read(tree, caller).call.messages[0] is last[0]
    with pytest.raises(CallRefused, match="got 'resp_1'; allowed: one of this key's last"):
        responses.DIALECT.read(tree | {"previous_response_id": "resp_1"}, caller)


def test_a_limit_of_tokens_leaves_the_response_incomplete(client):
    reply = ask(client, "abcdefgh", max_output_tokens=2)
    assert (reply.output_text, reply.status) == ("abcdef", "incomplete")
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_logprobs_stand_in_the_text_on_demand(client):
    reply = ask(client, "abcd", include=["message.output_text.logprobs"])
    tokens = [(t.token, t.logprob) for t in reply.output[0].content[0].logprobs]
    assert tokens == [("abc", 0.0), ("d", -0.5)]


@pytest.mark.parametrize("given", [CALLS, "Hello.", CALLS.partition("\n")[2], ""])
def test_the_clients_own_accumulation_of_a_stream_is_the_reply(client, given):
    with client.responses.stream(model="ours", input=given, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    whole = ask(client, given, tools=TOOLS)
    assert final.output_text == whole.output_text
    parts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(parts) == whole.output_text
    calls = [item for item in whole.output if item.type == "function_call"]
    streamed = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in streamed] == [
        (call.name, call.arguments) for call in calls
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    assert [event.output_index for event in events if event.type.endswith("item.added")] == list(
        range(len(done))
    )


def test_a_stream_that_is_cut_ends_as_incomplete(client):
    *_, last = ask(client, "abcdefgh", max_output_tokens=1, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.output_text == "abc"


def test_an_error_after_the_stream_has_begun_is_an_event(client):
    *_, text, last = ask(client, "refuse late", stream=True)
    assert (text.type, text.delta) == ("response.output_text.delta", "ab")
    assert (last.type, last.code) == ("error", "max_turns")
    with pytest.raises(openai.BadRequestError, match="3 turns are used up"):
        ask(client, "refuse", stream=True)


def test_the_asynchronous_client_streams(episode):
    _, access = episode

    async def talk():
        async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            stream = await ask(client, "streamed", stream=True)
            return [event.type async for event in stream], await ask(client, "whole")

    types, reply = asyncio.run(talk())
    assert (types[-1], reply.output_text) == ("response.completed", "whole")


NO_EFFECT = {
    "reasoning": {"summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "truncation": "disabled",
    "tool_choice": "auto",
    "store": False,
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "x",
    "temperature": 0.8,
}


def test_what_the_run_does_anyway_and_what_has_no_effect_is_accepted(client, session):
    assert ask(client, "x", **NO_EFFECT).output_text == "x"
    assert session.params == []


OTHERS = {
    "temperature": {"temperature": 0.1},
    "tool_choice": {"tool_choice": {"type": "function", "name": "find"}},
    "text.format": {"text": {"format": {"type": "json_object"}}},
    "reasoning.effort": {"reasoning": {"effort": "high"}},
    "truncation": {"truncation": "auto"},
    "background": {"background": True},
    "conversation": {"conversation": "c"},
}
WRONG = {
    "input": [],
    "input[0].role": [{"role": "tool", "content": "x"}],
    "input[0].type": [{"type": "web_search_call", "id": "x"}],
    "input[0].id": [{"type": "item_reference", "id": "x"}],
    "input[0].content[0].type": [
        {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
    ],
    "input[0].call_id": [{"type": "function_call_output", "output": "x"}],
    "input[0].arguments": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 5}],
}


@pytest.mark.parametrize("param", [*OTHERS, *WRONG])
def test_what_is_refused_names_its_field(client, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, WRONG.get(param, "x"), **OTHERS.get(param, {}))
    assert caught.value.param == param
