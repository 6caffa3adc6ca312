"""Anthropic's own client talks to the endpoint as to any server."""

import asyncio
import dataclasses

import anthropic
import pytest
from agent_cases import CALLS, FOUND, PARAMETERS, RULES, TOOL, opened

from seeupo_jax.agents.calls import Access, HistoryMessage

TOOLS = [{"name": "find", "description": "Finds.", "input_schema": PARAMETERS}]


def address(access):
    return {"base_url": access.base_url.removesuffix("/v1"), "api_key": access.api_key}


@pytest.fixture
def client(episode):
    with anthropic.Anthropic(**address(episode[1]), max_retries=0, timeout=20) as client:
        yield client


def options(text, more):
    messages = [{"role": "user", "content": text}]
    return {"model": "any", "max_tokens": 100, "messages": messages} | more


def ask(client, text, **more):
    return client.messages.create(**options(text, more))


def test_a_question_is_answered_with_its_usage(client, session):
    cached = {"type": "ephemeral"}
    system = [{"type": "text", "text": "Be short.", "cache_control": cached}]
    reply = ask(client, "Hello.", system=system, metadata={"user_id": "me"})
    (block,) = reply.content
    assert (block.text, reply.stop_reason, reply.stop_sequence) == ("Hello.", "end_turn", None)
    usage = reply.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (16, 4, 2)
    assert (reply.model, reply.role, session.calls[0].max_tokens) == ("ours", "assistant", 100)
    assert session.calls[0].messages == (
        HistoryMessage("system", "Be short."),
        HistoryMessage("user", "Hello."),
    )


def test_tool_calls_go_out_and_come_back_as_history(client, session):
    first = ask(client, CALLS, tools=TOOLS, tool_choice={"type": "auto"})
    text, *uses = first.content
    assert (text.text, first.stop_reason) == ("I look.", "tool_use")
    assert [(use.id, use.name, use.input) for use in uses] == [
        ("call_1_0", "find", {"name": "é"}),
        ("call_1_1", "find", {}),
    ]
    assert session.calls[0].tools == (TOOL,)
    results = [
        {"type": "text", "text": "Here:"},
        {"type": "tool_result", "tool_use_id": "call_1_0", "content": "7"},
        {
            "type": "tool_result",
            "tool_use_id": "call_1_1",
            "content": [{"type": "text", "text": "8"}],
            "is_error": True,
        },
        {"type": "text", "text": "Go on."},
    ]
    messages = [
        {"role": "user", "content": CALLS},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    ask(client, "", messages=messages, tools=TOOLS)
    assert session.calls[1].messages == (
        HistoryMessage("user", CALLS),
        HistoryMessage("assistant", "I look.", FOUND),
        HistoryMessage("user", "Here:"),
        HistoryMessage("tool", "7"),
        HistoryMessage("tool", "8"),
        HistoryMessage("user", "Go on."),
    )


def test_results_that_come_in_another_order_are_read_in_that_of_the_calls(client, session):
    first = ask(client, CALLS, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": content}
        for use, content in zip(first.content[1:], "78", strict=True)
    ]

    def go_on(*content):
        said = [{"role": "assistant", "content": first.content}]
        asked = [{"role": "user", "content": CALLS}, *said, {"role": "user", "content": content}]
        return ask(client, "", messages=asked, tools=TOOLS)

    go_on(*reversed(results), {"type": "text", "text": "Go on."})
    assert [m.content for m in session.calls[1].messages[2:]] == ["7", "8", "Go on."]
    with pytest.raises(anthropic.BadRequestError, match="got 'call_1_1' without a result"):
        go_on(results[0])
    with pytest.raises(anthropic.BadRequestError, match="got 'call_1_0' a second time"):
        go_on(results[0], *results)


@pytest.mark.parametrize("ignore", [False, True])
def test_the_clients_tool_runner_sends_whole_conversations(endpoint, ignore):
    """It asks for a thread, of which it would send only what is new, and goes without."""

    @anthropic.beta_tool
    def find(name: str = "") -> str:
        """Finds."""
        return f"found {name}"

    with opened(endpoint, sampling=dataclasses.replace(RULES, ignore=ignore)) as (session, access):
        with anthropic.Anthropic(**address(access), max_retries=0, timeout=20) as client:
            runner = client.beta.messages.tool_runner(tools=[find], **options(CALLS, {}))
            assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]
    assert session.calls[1].messages == (
        HistoryMessage("user", CALLS),
        HistoryMessage("assistant", "I look.", FOUND),
        HistoryMessage("tool", "found é"),
        HistoryMessage("tool", "found "),
    )


def test_tools_are_not_shown_where_none_may_be_chosen(client, session):
    reply = ask(client, CALLS, tools=TOOLS, tool_choice={"type": "none"})
    assert (reply.content[0].text, session.calls[0].tools) == (CALLS, ())


def test_limits_and_stop_sequences_end_the_message_and_are_named(client):
    reply = ask(client, "abcdefgh", max_tokens=2)
    assert (reply.content[0].text, reply.stop_reason) == ("abcdef", "max_tokens")
    reply = ask(client, "abcdefgh", stop_sequences=["xy", "ef"])
    assert (reply.content[0].text, reply.stop_reason) == ("abcd", "stop_sequence")
    assert reply.stop_sequence == "ef"
    assert ask(client, "abcdefgh", stop_sequences=["xy"]).stop_reason == "end_turn"
    reply = ask(client, CALLS + "xy", stop_sequences=["xy"], tools=TOOLS)
    assert (reply.stop_reason, reply.stop_sequence) == ("tool_use", None)  # it waits for results


@pytest.mark.parametrize("text", [CALLS, "Hello.", CALLS.partition("\n")[2], ""])
def test_the_clients_own_accumulation_of_a_stream_is_the_reply(client, text):
    with client.messages.stream(**options(text, {"tools": TOOLS})) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    whole = ask(client, text, tools=TOOLS)

    def shown(message):
        return [{**block.to_dict(), "id": None} for block in message.content]

    assert shown(final) == shown(whole)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert "".join(texts) == "".join(b.text for b in whole.content if b.type == "text")


def test_an_error_after_the_stream_has_begun_is_an_event(client):
    with pytest.raises(anthropic.APIStatusError, match="3 turns are used up"):
        with client.messages.stream(**options("refuse late", {})) as stream:
            assert list(stream.text_stream) == ["ab"]
    with pytest.raises(anthropic.BadRequestError, match="3 turns are used up"):
        with client.messages.stream(**options("refuse", {})) as stream:
            list(stream.text_stream)


def test_the_asynchronous_client_asks_and_streams(episode):
    async def talk():
        async with anthropic.AsyncAnthropic(**address(episode[1])) as client:
            replies = await asyncio.gather(*(ask(client, f"{i}") for i in range(9)))
            async with client.messages.stream(**options("streamed", {})) as stream:
                final = await stream.get_final_message()
        return [reply.content[0].text for reply in replies], final.content[0].text

    assert asyncio.run(talk()) == ([f"{i}" for i in range(9)], "streamed")


def test_the_models_are_the_one_that_is_served(client):
    assert [(model.id, model.type) for model in client.models.list()] == [("ours", "model")]
    assert client.models.retrieve("ours").display_name == "ours"
    with pytest.raises(anthropic.NotFoundError, match="got 'other'; allowed: 'ours'") as caught:
        client.models.retrieve("other")
    assert caught.value.body["type"] == "error"  # Anthropic's form at a path that OpenAI has too


def test_errors_have_anthropics_form(endpoint, client):
    with anthropic.Anthropic(**address(Access(endpoint.base_url, "no key"))) as stranger:
        own = "the key: got no known key; .* SEEUPO_API_KEY, as"
        with pytest.raises(anthropic.AuthenticationError, match=own):
            ask(stranger, "x")
    with pytest.raises(anthropic.NotFoundError, match="got POST /v1/messages/batches"):
        client.messages.batches.create(requests=[])
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, "x", max_tokens=0)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


OTHERS = {
    "temperature": {"temperature": 0.1},
    "top_k": {"top_k": 5},
    "tool_choice": {"tool_choice": {"type": "any"}},
    "tool_choice.name": {"tool_choice": {"type": "none", "name": "x"}},
    "tool_choice.nonsense": {"tool_choice": {"type": "auto", "nonsense": 1}},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "output_config.effort": {"output_config": {"effort": "high"}},
    "container": {"container": "c"},
}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
WRONG = {
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    "messages[0].role": [{"role": "robot", "content": "x"}],
    "messages[0].content[0].type": [{"role": "user", "content": [IMAGE]}],
    "messages[0].content[0].content[0].type": [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}],
        }
    ],
    "messages[0].content[1].type": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        }
    ],
    "messages[0].content[0].input": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]},
        {"role": "user", "content": "x"},
    ],
}


def test_calls_side_by_side_are_let_be_as_in_openais_dialects(endpoint):
    """As `parallel_tool_calls`, which is accepted there, it has no effect."""
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    with (
        opened(endpoint) as (session, access),
        anthropic.Anthropic(**address(access)) as client,
    ):
        reply = ask(client, CALLS, tools=TOOLS, tool_choice=choice)
    assert [block.type for block in reply.content] == ["text", "tool_use", "tool_use"]
    assert session.params == []


@pytest.mark.parametrize("param", [*OTHERS, *WRONG])
def test_what_is_refused_names_its_field(client, param):
    more = {"messages": WRONG[param]} if param in WRONG else {"extra_body": OTHERS[param]}
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, "x", **more)
    assert caught.value.body["error"]["param"] == param


def test_what_is_ignored_is_counted(endpoint):
    rules = dataclasses.replace(RULES, ignore=True)
    with opened(endpoint, sampling=rules) as (session, access):
        with anthropic.Anthropic(**address(access)) as client:
            for extra in OTHERS.values():
                ask(client, "x", extra_body=extra)
    assert session.params == list(OTHERS)
