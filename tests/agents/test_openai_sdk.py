"""OpenAI's own client talks to the endpoint as to any server: chat completions."""

import asyncio
import dataclasses
import json
import math
import re

import httpx
import openai
import pytest
from agent_cases import CALLS, FOUND, RULES, TOOL, opened

from seeupo_jax.agents.calls import HistoryMessage
from seeupo_jax.envs.tool_calls import render_hermes

TOOLS = [{"type": "function", "function": TOOL | {"strict": True}}]


@pytest.fixture
def access(episode):
    return episode[1]


@pytest.fixture
def client(access):
    with openai.OpenAI(
        base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=20
    ) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


def ask(client, text, **options):
    return client.chat.completions.create(model="any", messages=user(text), **options)


def test_a_question_is_answered_with_its_usage(client, session):
    reply = ask(client, "Hello.")
    (choice,) = reply.choices
    assert (reply.model, reply.object) == ("ours", "chat.completion")
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello.")
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert (choice.logprobs, choice.index) == (None, 0)
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 2, 12)
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert session.calls[0].messages == (HistoryMessage("user", "Hello."),)


def test_tool_calls_go_out_and_come_back_as_history(client, session):
    first = ask(client, CALLS, tools=TOOLS)
    (choice,) = first.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    calls = choice.message.tool_calls
    assert [(call.id, call.function.name) for call in calls] == [
        ("call_1_0", "find"),
        ("call_1_1", "find"),
    ]
    assert [json.loads(call.function.arguments) for call in calls] == [{"name": "é"}, {}]
    assert session.calls[0].tools == (TOOL,)
    history = [
        {"role": "developer", "content": "Be short."},
        *user(CALLS),
        choice.message,  # as people do: the object itself, with its fields that are null
        {"role": "tool", "tool_call_id": calls[0].id, "content": [{"type": "text", "text": "7"}]},
        {"role": "tool", "tool_call_id": calls[1].id, "content": "8"},
    ]
    client.chat.completions.create(model="ours", messages=history, tools=TOOLS)
    assert session.calls[1].messages == (
        HistoryMessage("system", "Be short."),
        HistoryMessage("user", CALLS),
        HistoryMessage("assistant", "I look.", FOUND),
        HistoryMessage("tool", "7"),
        HistoryMessage("tool", "8"),
    )


def test_results_that_come_in_another_order_are_read_in_that_of_the_calls(client, session):
    message = ask(client, CALLS, tools=TOOLS).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": content}
        for call, content in zip(message.tool_calls, "78", strict=True)
    ]
    history = [*user(CALLS), message, *reversed(results)]
    client.chat.completions.create(model="ours", messages=history, tools=TOOLS)
    assert [m.content for m in session.calls[1].messages[2:]] == ["7", "8"]
    for wrong in (results[:1], [*results, results[0]], [results[0], results[0]]):
        with pytest.raises(openai.BadRequestError, match="one result for each call") as caught:
            history = [*user(CALLS), message, *wrong]
            client.chat.completions.create(model="ours", messages=history, tools=TOOLS)
        assert caught.value.param.startswith("messages[")


def test_the_parts_of_a_text_are_joined_by_newlines(client, session):
    ask(client, [{"type": "text", "text": text} for text in ("a", "b")])
    assert session.calls[0].messages == (HistoryMessage("user", "a\nb"),)


def test_ids_of_calls_do_not_come_again_after_a_restart_where_they_are_unique(endpoint):
    lives = []
    for _ in range(2):
        with (
            opened(endpoint, key="k", unique_ids=True) as (_, access),
            openai.OpenAI(base_url=access.base_url, api_key="k") as client,
        ):
            calls = ask(client, CALLS, tools=TOOLS).choices[0].message.tool_calls
            lives.append([call.id for call in calls])
    assert [[each[-4:] for each in ids] for ids in lives] == [["_1_0", "_1_1"]] * 2
    assert not {each[:-4] for each in lives[0]} & {each[:-4] for each in lives[1]}
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", each) for ids in lives for each in ids)


def test_a_message_of_calls_alone_has_no_content_and_a_malformed_call_is_content(client):
    message = ask(client, render_hermes("find"), tools=TOOLS).choices[0].message
    assert (message.content, len(message.tool_calls)) == (None, 1)
    broken = render_hermes("find")[:-1]
    message = ask(client, broken, tools=TOOLS).choices[0].message
    assert (message.content, message.tool_calls) == (broken, None)


def test_tools_are_not_shown_where_none_may_be_chosen(client, session):
    message = ask(client, CALLS, tools=TOOLS, tool_choice="none").choices[0].message
    assert (message.content, session.calls[0].tools) == (CALLS, ())


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_tokens_ends_the_message(client, limit):
    (choice,) = ask(client, "abcdefgh", **{limit: 2}).choices
    assert (choice.message.content, choice.finish_reason) == ("abcdef", "length")


def test_both_limits_of_tokens_may_be_given_where_they_are_one(client):
    both = {"max_tokens": 2, "max_completion_tokens": 2}
    assert ask(client, "abcdefgh", **both).choices[0].message.content == "abcdef"
    with pytest.raises(openai.BadRequestError, match="another value than max_comp") as caught:
        ask(client, "abcdefgh", **(both | {"max_completion_tokens": 3}))
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("repetition_penalty", [1, 1.0, 1.1])
def test_a_repetition_penalty_other_than_none_is_refused(client, repetition_penalty):
    extra = {"repetition_penalty": repetition_penalty}
    if repetition_penalty == 1:
        assert ask(client, "x", extra_body=extra).choices
        return
    with pytest.raises(openai.BadRequestError, match="repetition_penalty: got 1.1; allowed: 1"):
        ask(client, "x", extra_body=extra)


@pytest.mark.parametrize("stop", ["ef", ["xy", "ef"]])
def test_a_stop_string_ends_the_message_before_it(client, stop):
    (choice,) = ask(client, "abcdefgh", stop=stop).choices
    assert (choice.message.content, choice.finish_reason) == ("abcd", "stop")


def test_logprobs_are_those_of_every_sampled_token(client):
    (choice,) = ask(client, "abcdé", logprobs=True).choices
    tokens = [(t.token, t.logprob, t.bytes, t.top_logprobs) for t in choice.logprobs.content]
    assert tokens == [("abc", 0.0, [97, 98, 99], []), ("dé", -0.5, [100, 195, 169], [])]


def test_a_logprob_that_is_unknown_is_what_openai_writes_then(client, session, monkeypatch):
    say = session._say

    def unknown(*reported):
        return dataclasses.replace(say(*reported), logp=(-0.5, math.nan))

    monkeypatch.setattr(session, "_say", unknown)
    (choice,) = ask(client, "abcdé", logprobs=True).choices
    assert [token.logprob for token in choice.logprobs.content] == [-0.5, -9999.0]


def test_text_streams_as_it_is_sampled_and_tool_calls_at_the_end(client):
    chunks = list(
        ask(
            client,
            CALLS,
            tools=TOOLS,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
    )
    *chunks, last = chunks
    assert (last.choices, last.usage.completion_tokens) == ([], -(-len(CALLS) // 3))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    texts = [delta.content for delta in deltas if delta.content]
    assert ("".join(texts), len(texts)) == ("I look.", 3)
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id, call.function.name) for call in calls] == [
        (0, "call_1_0", "find"),
        (1, "call_1_1", "find"),
    ]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]
    assert len(chunks[-1].choices[0].logprobs.content) == last.usage.completion_tokens
    assert {chunk.usage for chunk in chunks} == {None}
    assert all("usage" in chunk.model_fields_set for chunk in chunks)  # null, as the API has it


def test_the_clients_own_accumulation_of_a_stream_is_the_reply(client):
    with client.chat.completions.stream(model="ours", messages=user(CALLS), tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "I look."
    assert [call.function.arguments for call in message.tool_calls] == ['{"name": "é"}', "{}"]
    with client.chat.completions.stream(model="ours", messages=user("")) as stream:
        assert stream.get_final_completion().choices[0].message.content in (None, "")


def test_the_asynchronous_client_talks_to_the_app_in_its_own_process(endpoint, access, session):
    async def talk():
        transport = httpx.ASGITransport(endpoint.app)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(
                base_url=access.base_url, api_key=access.api_key, http_client=http
            ) as client,
        ):
            replies = await asyncio.gather(*(ask(client, f"{i}") for i in range(20)))
            stream = await ask(client, "streamed", stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [reply.choices[0].message.content for reply in replies], "".join(texts)

    assert asyncio.run(talk()) == ([f"{i}" for i in range(20)], "streamed")


def test_the_models_are_the_one_that_is_served(client):
    assert [model.id for model in client.models.list()] == ["ours"]
    assert client.models.retrieve("ours").id == "ours"
    with pytest.raises(openai.NotFoundError, match="got 'other'; allowed: 'ours'"):
        client.models.retrieve("other")


def test_a_refusal_of_the_session_is_a_bad_request_with_its_code(client):
    with pytest.raises(openai.BadRequestError, match="3 turns are used up") as caught:
        ask(client, "refuse")
    assert (caught.value.code, caught.value.type) == ("max_turns", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="3 turns are used up"):
        ask(client, "refuse", stream=True)


def test_an_error_after_the_stream_has_begun_is_an_event(client):
    texts = []
    with pytest.raises(openai.APIError, match="3 turns are used up"):
        for chunk in ask(client, "refuse late", stream=True):
            texts.append(chunk.choices[0].delta.content)
    assert texts == ["", "ab"]


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_inside_is_told_to_the_client_and_its_cause_to_the_log(client, caplog, late):
    with pytest.raises(openai.APIError, match="the call failed inside the server"):
        list(ask(client, "break late" if late else "break", stream=late))
    (record,) = caplog.records
    assert "the engine is broken" in caplog.text
    assert record.levelname == "ERROR"


RUNS_OWN = {"temperature": 0.8, "top_p": 0.9, "n": 1, "presence_penalty": 0, "logit_bias": {}}
NO_EFFECT = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": False,
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}
OTHERS = {
    "temperature": 0,
    "top_p": 1,
    "seed": 0,
    "n": 2,
    "logit_bias": {"5": 1},
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "top_logprobs": 3,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "reasoning_effort": "high",
}


def test_what_the_run_does_anyway_and_what_has_no_effect_is_accepted(client, session):
    assert ask(client, "x", **RUNS_OWN, **NO_EFFECT).choices[0].message.content == "x"
    assert session.params == []


@pytest.mark.parametrize("name", OTHERS)
def test_another_sampling_is_refused(client, name):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x", **{name: OTHERS[name]})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_value")


def test_an_unknown_field_is_refused_by_its_name(client):
    messages = [{"role": "user", "content": "x", "mood": "good"}]
    with pytest.raises(openai.BadRequestError, match="unknown field; .* of serve, ig") as caught:
        client.chat.completions.create(model="m", messages=messages)
    assert caught.value.param == "messages[0].mood"


def test_another_sampling_and_unknown_fields_may_be_ignored_and_are_counted(endpoint):
    rules = dataclasses.replace(RULES, ignore=True)
    with (
        opened(endpoint, sampling=rules) as (session, access),
        openai.OpenAI(base_url=access.base_url, api_key=access.api_key) as client,
    ):
        messages = [{"role": "user", "content": "x", "mood": "good", "name": "me"}]
        extra = {"mirostat": 2, "nothing": None}
        client.chat.completions.create(model="m", messages=messages, extra_body=extra, **OTHERS)
    assert sorted(session.params) == sorted([*OTHERS, "mirostat", "messages[0].mood"])
    assert session.calls[0].messages == (HistoryMessage("user", "x"),)


@pytest.mark.parametrize("where", ["functions", "messages[0].audio"])
def test_a_field_with_content_is_never_ignored(endpoint, where):
    message = {"role": "user", "content": "x"}
    tools = {"functions": [{"name": "find"}]} if where == "functions" else {}
    message |= {} if tools else {"audio": {"id": "a"}}
    with (
        opened(endpoint, sampling=dataclasses.replace(RULES, ignore=True)) as (session, access),
        openai.OpenAI(base_url=access.base_url, api_key=access.api_key) as client,
        pytest.raises(openai.BadRequestError, match="whose content is not read here") as caught,
    ):
        client.chat.completions.create(model="m", messages=[message], extra_body=tools)
    assert (caught.value.param, session.calls) == (where, [])


WRONG = {
    "messages": [],
    "messages[0].role": [{"role": "robot", "content": "x"}],
    "messages[0].content": [{"role": "user", "content": 5}],
    "messages[1].content": [{"role": "user", "content": "x"}, {"role": "tool"}],
    "messages[0].content[0].type": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
    ],
    "messages[0].tool_calls[0].function.arguments": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}
    ],
    "messages[0].tool_calls": [
        {
            "role": "user",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": ""}}],
        }
    ],
}


@pytest.mark.parametrize("param", WRONG)
def test_a_mistake_names_its_field(client, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=WRONG[param])
    assert caught.value.param == param
    assert str(caught.value.body["message"]).startswith(param)
