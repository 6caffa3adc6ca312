"""What requests say of the form of an answer, in the three APIs, by their own clients."""

import dataclasses
import json

import anthropic
import openai
import pytest
from agent_cases import CALLS, PARAMETERS, RULES, TOOL, opened

from seeupo_jax.rollout.engine.protocol import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REFUSED = {"type": "array", "uniqueItems": True}
OTHER = TOOL | {"name": "wait"}
CHAT = [{"type": "function", "function": tool} for tool in (TOOL, OTHER)]
RESPONSES = [{"type": "function", **tool} for tool in (TOOL, OTHER)]
MESSAGES = [
    {"name": name, "description": "Finds.", "input_schema": PARAMETERS} for name in ("find", "wait")
]
NAMED = {"name": "find"}
OBJECT = json.dumps({"type": "object"})


def schema_format(schema=SCHEMA, **fields):
    return {"type": "json_schema", "schema": schema, **fields}


def chat(client, **options):
    messages = [{"role": "user", "content": "x"}]
    return client.chat.completions.create(model="m", messages=messages, **options)


def respond(client, **options):
    return client.responses.create(model="m", input="x", **options)


def message(client, **options):
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    return client.messages.create(**asked, **options)


@pytest.fixture
def episode(endpoint):
    rules = dataclasses.replace(RULES, constrains=True)
    with opened(endpoint, sampling=rules) as (session, access):
        yield session, access


@pytest.fixture
def session(episode):
    return episode[0]


@pytest.fixture
def clients(episode):
    _, access = episode
    options = {"api_key": access.api_key, "max_retries": 0, "timeout": 20}
    with (
        openai.OpenAI(base_url=access.base_url, **options) as ours,
        anthropic.Anthropic(base_url=access.base_url.removesuffix("/v1"), **options) as theirs,
    ):
        yield {chat: ours, respond: ours, message: theirs}


def forced(*names, single=False):
    return Constraint("must", names, single, field="tool_choice")


def some_of(*tools, mode):
    return {"mode": mode, "tools": list(tools)}


CHOICES = [
    (chat, "auto", None),
    (chat, "required", forced()),
    (chat, {"type": "function", "function": NAMED}, forced("find")),
    (
        chat,
        {
            "type": "allowed_tools",
            "allowed_tools": some_of({"type": "function", "function": NAMED}, mode="required"),
        },
        forced("find"),
    ),
    (
        chat,
        {
            "type": "allowed_tools",
            "allowed_tools": some_of({"type": "function", "function": NAMED}, mode="auto"),
        },
        Constraint("may", ("find",), field="tool_choice"),
    ),
    (respond, "auto", None),
    (respond, "required", forced()),
    (respond, {"type": "function", **NAMED}, forced("find")),
    (
        respond,
        {"type": "allowed_tools", **some_of({"type": "function", **NAMED}, mode="required")},
        forced("find"),
    ),
    (message, {"type": "auto"}, None),
    (message, {"type": "any"}, forced()),
    (message, {"type": "tool", **NAMED}, forced("find")),
    (message, {"type": "any", "disable_parallel_tool_use": True}, forced(single=True)),
]
TOOLS = {chat: CHAT, respond: RESPONSES, message: MESSAGES}


@pytest.mark.parametrize("ask, choice, wanted", CHOICES)
def test_a_tool_choice_forces_calls(clients, session, ask, choice, wanted):
    ask(clients[ask], tools=TOOLS[ask], tool_choice=choice)
    assert session.calls[-1].constraint == wanted
    assert len(session.calls[-1].tools) == 2


FORMATS = [
    (chat, {"response_format": {"type": "text"}}, None),
    (chat, {"response_format": {"type": "json_object"}}, ("response_format", OBJECT)),
    (
        chat,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        ("response_format.json_schema.schema", json.dumps(SCHEMA)),
    ),
    (respond, {"text": {"format": {"type": "json_object"}}}, ("text.format", OBJECT)),
    (
        respond,
        {"text": {"format": schema_format(name="n")}},
        ("text.format.schema", json.dumps(SCHEMA)),
    ),
    (
        message,
        {"output_config": {"format": schema_format()}},
        ("output_config.format.schema", json.dumps(SCHEMA)),
    ),
    (
        message,
        {"extra_body": {"output_format": schema_format()}},
        ("output_format.schema", json.dumps(SCHEMA)),
    ),
]


@pytest.mark.parametrize("ask, options, wanted", FORMATS)
def test_a_format_is_the_schema_of_the_text_and_calls_stay_possible(
    clients, session, ask, options, wanted
):
    ask(clients[ask], **options)
    ask(clients[ask], tools=TOOLS[ask], **options)
    for calls, call in zip(("none", "may"), session.calls[-2:], strict=True):
        if wanted is None:
            assert call.constraint is None
        else:
            field, schema = wanted
            assert call.constraint == Constraint(calls, schema=schema, field=field)


def test_a_forced_call_comes_before_a_format(clients, session):
    options = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    chat(clients[chat], tools=CHAT, **options)
    assert session.calls[-1].constraint == forced()


@pytest.mark.parametrize(
    "ask, options",
    [
        (chat, {"parallel_tool_calls": False}),
        (respond, {"parallel_tool_calls": False}),
        (message, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
def test_one_call_at_most_is_a_constraint_only_beside_another(clients, session, ask, options):
    ask(clients[ask], tools=TOOLS[ask], **options)
    assert session.calls[-1].constraint.optional and session.calls[-1].constraint.single
    assert session.params == []


WRONG = [
    (chat, "tool_choice", {"tool_choice": "required"}),
    (chat, "tool_choice", {"tool_choice": "sometimes", "tools": CHAT}),
    (
        chat,
        "tool_choice",
        {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": CHAT},
    ),
    (chat, "response_format.type", {"response_format": {"type": "xml"}}),
    (
        chat,
        "response_format.json_schema.schema",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": REFUSED},
            }
        },
    ),
    (respond, "tool_choice", {"tool_choice": {"type": "function", "name": "x"}}),
    (respond, "text.format.schema", {"text": {"format": schema_format(REFUSED, name="n")}}),
    (message, "tool_choice", {"tool_choice": {"type": "any"}}),
    (
        message,
        "output_format",
        {
            "output_config": {"format": schema_format()},
            "extra_body": {"output_format": schema_format({"type": "object"})},
        },
    ),
    (message, "output_config.format.schema", {"output_config": {"format": schema_format(REFUSED)}}),
]


@pytest.mark.parametrize("ask, param, options", WRONG)
def test_what_cannot_be_is_refused_by_its_field(clients, session, ask, param, options):
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
        ask(clients[ask], **options)
    error = caught.value.body
    error = error.get("error", error)
    assert error["param"] == param and "got" in error["message"] or "uniqueItems" in str(error)
    assert not session.calls


def test_a_response_says_what_was_chosen(clients):
    named = {"type": "function", "name": "find"}
    for choice in ("required", named):
        reply = respond(clients[respond], tools=RESPONSES, tool_choice=choice)
        written = reply.tool_choice
        assert (written if isinstance(written, str) else written.model_dump()) == choice
        assert [tool.strict for tool in reply.tools] == [True, True]
    reply = respond(clients[respond], tools=[tool | {"strict": True} for tool in RESPONSES])
    assert (reply.tool_choice, [tool.strict for tool in reply.tools]) == ("auto", [False, False])


def test_a_response_repeats_nothing_that_was_ignored(endpoint):
    rules = dataclasses.replace(RULES, ignore=True)
    asked = {
        "tools": [*RESPONSES, {"type": "web_search", "search_context_size": "low"}],
        "tool_choice": "required",
        "temperature": 0.1,
        "top_p": 0.2,
        "text": {"format": {"type": "json_object"}},
        "extra_body": {"surprise": 1},
    }
    with opened(endpoint, sampling=rules) as (session, access):
        with openai.OpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            reply = respond(client, **asked)
    assert (reply.tool_choice, reply.temperature, reply.top_p) == ("auto", 0.8, 0.9)
    assert [tool.name for tool in reply.tools] == ["find", "wait"]
    assert reply.text is None and "surprise" not in reply.model_dump()
    ignored = {"temperature", "top_p", "tool_choice", "text.format", "surprise"}
    assert ignored < set(session.params)


def test_a_whole_answer_of_calls_is_told_as_before(clients):
    messages = [{"role": "user", "content": CALLS}]
    reply = clients[chat].chat.completions.create(
        model="m", messages=messages, tools=CHAT, tool_choice="required"
    )
    assert len(reply.choices[0].message.tool_calls) == 2
