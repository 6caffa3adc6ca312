"""What clients of 2026 send in histories and lists of tools beyond messages and functions."""

import anthropic
import httpx
import openai
import pytest
from agent_cases import CALLS, PARAMETERS, RULES, opened

from seeupo_jax.agents.calls import HistoryMessage
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.envs.tool_calls import ToolCall, render_hermes

FIND = {"type": "function", "name": "find", "parameters": PARAMETERS}
USER = {"role": "user", "content": "go"}


@pytest.fixture
def client(episode):
    _, access = episode
    with openai.OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as made:
        yield made


def told(session):
    """The messages of the last call."""
    return session.calls[-1].messages


def test_references_to_items_of_earlier_responses_are_those_items(client, session):
    """So does the second step of Vercel's `ai` with its default provider (6.0)."""
    asked = {"role": "user", "content": CALLS}
    first = client.responses.create(model="m", input=[asked], tools=[FIND])
    message, one, two = first.output
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": text}
        for call, text in ((one, "7"), (two, "8"))
    ]
    history = [{"type": "item_reference", "id": item.id} for item in (message, one, two)]
    client.responses.create(model="m", input=[asked, *history, *outputs, USER], tools=[FIND])
    calls = (ToolCall("find", {"name": "é"}), ToolCall("find", {}))
    assert told(session) == (
        HistoryMessage("user", CALLS),
        HistoryMessage("assistant", "I look.", calls),
        HistoryMessage("tool", "7"),
        HistoryMessage("tool", "8"),
        HistoryMessage("user", "go"),
    )


def test_an_item_that_was_not_stored_is_named(client, session):
    first = client.responses.create(model="m", input="x", store=False)
    reference = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(openai.BadRequestError, match="allowed: an item of one of") as caught:
        client.responses.create(model="m", input=[USER, reference, USER])
    assert caught.value.param == "input[1].id"


def test_tools_of_a_namespace_and_custom_ones_are_functions_to_the_policy(client, session):
    """Codex lists the tools of every MCP server so, and its patches are a custom tool's."""
    tools = [
        {"type": "namespace", "name": "mcp__desk", "description": "Of a server.", "tools": [FIND]},
        {"type": "custom", "name": "patch", "description": "A patch.", "format": {"type": "text"}},
        {"type": "web_search"},
        FIND,
    ]
    said = render_hermes("mcp__desk__find", name="a") + render_hermes("patch", input="+ x\n")
    with client.responses.stream(
        model="m", input=said + render_hermes("find"), tools=tools
    ) as stream:
        events = list(stream)
        done = stream.get_final_response()
    shown = [tool["name"] for tool in session.calls[0].tools]
    assert shown == ["mcp__desk__find", "patch", "find"]
    assert session.calls[0].tools[1]["parameters"]["required"] == ["input"]
    assert session.params == ["tools[2] of type web_search"]
    told_back = [each.model_dump(exclude_none=True) for each in done.tools]
    assert told_back == [
        tools[0] | {"tools": [FIND | {"strict": False}]},
        {"type": "custom", "name": "patch", "description": "A patch."},
        FIND | {"strict": False},
    ]
    desk, patch, plain = done.output
    assert (desk.type, desk.name, desk.namespace) == ("function_call", "find", "mcp__desk")
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "+ x\n")
    assert (plain.name, getattr(plain, "namespace", None)) == ("find", None)
    pieces = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(pieces) == "+ x\n"
    outputs = [
        {"type": "function_call_output", "call_id": desk.call_id, "output": "1"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "2"},
        {"type": "function_call_output", "call_id": plain.call_id, "output": "3"},
    ]
    sent = [item.model_dump(exclude_none=True) for item in done.output]
    client.responses.create(model="m", input=[USER, *sent, *outputs, USER], tools=tools)
    assert told(session)[1].calls == (
        ToolCall("mcp__desk__find", {"name": "a"}),
        ToolCall("patch", {"input": "+ x\n"}),
        ToolCall("find", {}),
    )
    assert [message.content for message in told(session)[2:5]] == ["1", "2", "3"]


def test_two_tools_of_one_name_are_refused(client):
    tools = [{"type": "namespace", "name": "a__", "tools": [FIND]}, FIND | {"name": "a__find"}]
    with pytest.raises(openai.BadRequestError, match="two named 'a__find'"):
        client.responses.create(model="m", input="x", tools=tools)


@pytest.mark.parametrize(
    "sent, read",
    [
        ("", {}),
        ('{"a": ', {"invalid_json": '{"a": '}),
        ("[1]", {"invalid_json": "[1]"}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_that_are_no_json_are_kept_as_their_text(episode, sent, read):
    session, access = episode
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": sent}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "no JSON"},
    ]
    body = {"model": "m", "messages": messages}
    header = {"authorization": f"Bearer {access.api_key}"}
    answer = httpx.post(f"{access.base_url}/chat/completions", json=body, headers=header)
    assert answer.status_code == 200
    assert told(session)[1].calls == (ToolCall("find", read),)


def test_what_claude_code_sends_beside_messages_is_read_or_left_out(endpoint):
    rules = SamplingRules(1.0, serves=True)
    with (
        opened(endpoint, sampling=rules) as (session, access),
        anthropic.Anthropic(
            base_url=access.base_url.removesuffix("/v1"), api_key=access.api_key, max_retries=0
        ) as client,
    ):
        hidden = {"type": "redacted_thinking", "data": "x"}
        done = client.messages.create(
            model="m",
            max_tokens=9,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[USER, {"role": "assistant", "content": [hidden]}, USER],
            thinking={"type": "adaptive"},
            tools=[
                {"name": "find", "input_schema": PARAMETERS, "type": "custom"},
                {"name": "web_search", "type": "web_search_20250305", "max_uses": 3},
            ],
            extra_body={
                "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
                "output_config": {"effort": "high"},
            },
        )
    assert done.content[0].text == "go"
    assert [tool["name"] for tool in session.calls[0].tools] == ["find"]
    wanted = ["output_config.effort", "thinking", "tools[1] of type web_search_20250305"]
    assert sorted(session.params) == wanted


def test_a_run_refuses_the_wishes_that_a_server_leaves_undone():
    with pytest.raises(Exception, match="reasoning_effort: got 'high'; allowed: 'none'"):
        RULES.read({"reasoning_effort": "high"})
    server = SamplingRules(1.0, serves=True)
    assert server.read({"reasoning_effort": "high"})[1] == ["reasoning_effort"]
    with pytest.raises(Exception, match="background: got True"):
        server.read({"background": True})
