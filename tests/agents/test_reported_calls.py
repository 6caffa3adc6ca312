"""Calls as each API reports them: their ids, and those of an answer that was cut later."""

import json

import anthropic
import openai
import pytest
from agent_cases import CALLS, FOUND, PARAMETERS, TOOL, opened

CUT = len(CALLS) // 3 - 4  # tokens of `ToldSession`, to within the second call
FUNCTION = [{"type": "function", "function": TOOL}]
BLOCK = [{"name": "find", "description": "Finds.", "input_schema": PARAMETERS}]
ASKED = [{"role": "user", "content": CALLS}]


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def ask(request, endpoint):
    """Asks by an API for the answer `CALLS`: the end, its text, and the calls by id."""
    stream = request.param
    with opened(endpoint) as (session, access):
        options = {"api_key": access.api_key, "max_retries": 0, "timeout": 20}
        with (
            openai.OpenAI(base_url=access.base_url, **options) as ours,
            anthropic.Anthropic(base_url=access.base_url.removesuffix("/v1"), **options) as theirs,
        ):

            def run(api, limit=500):
                client = theirs if api == "messages" else ours
                return APIS[api](client, limit, stream)

            run.session = session
            yield run


def chat(client, limit, stream):
    asked = {"model": "m", "messages": ASKED, "tools": FUNCTION, "max_tokens": limit}
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        message = choice.message
    else:
        with client.chat.completions.stream(**asked) as events:
            choice = None
            for event in events:
                if event.type == "chunk":
                    choice = event.snapshot.choices[0]
            message = choice.message
    calls = {c.id: (c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls}
    return choice.finish_reason, message.content, calls


def respond(client, limit, stream):
    tools = [{"type": "function", **TOOL}]
    asked = {"model": "m", "input": ASKED, "tools": tools, "max_output_tokens": limit}
    if not stream:
        reply = client.responses.create(**asked)
    else:
        events = list(client.responses.create(stream=True, **asked))
        reply = events[-1].response
        assert events[-1].type == f"response.{reply.status}"
    items = [item for item in reply.output if item.type == "function_call"]
    assert all(item.status == "completed" for item in items)
    calls = {item.call_id: (item.name, json.loads(item.arguments)) for item in items}
    reason = reply.incomplete_details and reply.incomplete_details.reason
    return reason or reply.status, reply.output_text, calls


def messages(client, limit, stream):
    asked = {"model": "m", "max_tokens": limit, "messages": ASKED, "tools": BLOCK}
    if not stream:
        reply = client.messages.create(**asked)
    else:
        with client.messages.stream(**asked) as events:
            reply = events.get_final_message()
    text = "".join(block.text for block in reply.content if block.type == "text")
    uses = [block for block in reply.content if block.type == "tool_use"]
    return reply.stop_reason, text, {use.id: (use.name, use.input) for use in uses}


APIS = {"chat": chat, "responses": respond, "messages": messages}
ENDS = {
    "chat": ("tool_calls", "length"),
    "responses": ("completed", "max_output_tokens"),
    "messages": ("tool_use", "max_tokens"),
}
TOLD = [(call.name, dict(call.arguments)) for call in FOUND]


@pytest.mark.parametrize("api", APIS)
def test_every_call_has_an_id_that_no_other_has_and_that_is_the_same_again(api, ask):
    made = [ask(api) for _ in range(2)]
    for number, (end, text, calls) in enumerate(made, start=1):
        assert (end, text, list(calls.values())) == (ENDS[api][0], "I look.", TOLD)
        assert list(calls) == [f"call_{number}_0", f"call_{number}_1"]
    assert not made[0][2].keys() & made[1][2].keys()


@pytest.mark.parametrize("api", APIS)
def test_a_complete_call_of_an_answer_that_is_cut_later_is_a_call(api, ask):
    end, text, calls = ask(api, CUT)
    assert (end, text, list(calls.values())) == (ENDS[api][1], "I look.", TOLD[:1])
    assert ask.session.calls[-1].max_tokens == CUT
