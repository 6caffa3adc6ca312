"""Two steps of coding agents and of Vercel's `ai`, as each sent them, are answered by a server.

Recorded from the clients' releases that the files name; long texts and most tools are cut out, and
texts that are not free to redistribute are replaced.
"""

import json
from pathlib import Path

import httpx
import pytest
from agent_cases import ToldSession

from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.envs.tool_calls import ToolCall, render_hermes

RECORDED = Path(__file__).parent / "recorded"
CLIENTS = sorted(path.stem for path in RECORDED.glob("*.json"))
# What a server reports that it leaves out, by client; nothing else may be.
LEFT_OUT = {
    "claude_code": ["output_config.effort", "thinking"],
    "codex": ["tools[2] of type web_search"],
}


class ActingSession(ToldSession):
    """Calls a tool, and ends once it has the result."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    async def complete(self, call, on_text=None):
        self.calls.append(call)
        called = "I look.\n" + render_hermes(self.call.name, **self.call.arguments)
        said = "All done." if call.messages[-1].role == "tool" else called
        return self._say(call, said, on_text or (lambda text: None))


def post(access, path, body):
    """The events of a stream, none of which is an error."""
    header = {"authorization": f"Bearer {access.api_key}"}
    url = access.base_url.removesuffix("/v1") + path
    answer = httpx.post(url, json=body, headers=header)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert not [event for event in events if "error" in (event.get("type"), *event)]
    return events


def with_references(body, events):
    """The same body; references to items name those of the reply to the first request."""
    ids = iter([item["id"] for item in events[-1].get("response", {}).get("output", ())])
    items = [
        item | {"id": next(ids)} if item.get("type") == "item_reference" else item
        for item in body.get("input", ())
    ]
    return body | ({"input": items} if "input" in body else {})


# The same at a run that samples at temperature 1, as `config.agent.harness` has it.
IN_A_RUN = LEFT_OUT | {"ai": ["temperature"]}
RULES = {
    "server": (SamplingRules(1.0, serves=True), LEFT_OUT),
    "run": (SamplingRules(1.0, ignore=True), IN_A_RUN),
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", CLIENTS)
def test_both_steps_are_answered_and_the_second_holds_the_call(name, rules, endpoint):
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    call = ToolCall(**recorded["call"])
    session = ActingSession(call)
    sampling, left_out = RULES[rules]
    access = endpoint.open_key(session, sampling=sampling, unique_ids=True)
    first, second = recorded["requests"]
    events = post(access, recorded["path"], first)
    post(access, recorded["path"], with_references(second, events))
    endpoint.close_key(access.api_key)
    before, after = (each.messages for each in session.calls)
    assert after[: len(before)] == before
    said, result = after[len(before) :]
    assert (said.role, said.content, said.calls) == ("assistant", "I look.", (call,))
    assert result.role == "tool" and "hi" in result.content
    half = len(session.params) // 2
    assert session.params[:half] == session.params[half:]
    assert sorted(session.params[:half]) == sorted(left_out.get(name, []))


def test_these_clients_are_recorded():
    assert CLIENTS == ["ai", "claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code"]


def test_what_codex_sends_in_longer_sessions_is_answered(endpoint):
    """Custom tools, reasoning items, and server-side compaction, which the recorded steps lack."""
    recorded = json.loads((RECORDED / "codex.json").read_text())
    body = recorded["requests"][0]
    patch = {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "call_id": "c",
        "input": "*** Begin",
    }
    body["input"] += [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        patch | {"id": "ctc_1", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done!"},
    ]
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    body["tools"] += [
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar},
        {"type": "image_generation", "output_format": "png"},
    ]
    body["context_management"] = [{"type": "compaction", "compact_threshold": 200_000}]
    session = ActingSession(ToolCall(**recorded["call"]))
    access = endpoint.open_key(session, sampling=SamplingRules(1.0, ignore=True), unique_ids=True)
    assert post(access, recorded["path"], body)
    endpoint.close_key(access.api_key)
    (call,) = session.calls
    assert "apply_patch" in {tool["name"] for tool in call.tools}
    assert sorted(session.params) == [
        "tools[2] of type web_search",
        "tools[4] of type image_generation",
    ]


# A tool's image as each API has it: what comes before it in the request, and the message itself.
IMAGES = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "go"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        "[image_url left out]",
    ),
    "/v1/responses": (
        {
            "input": [
                {"role": "user", "content": "go"},
                {"type": "function_call", "name": "view", "call_id": "a", "arguments": "{}"},
            ]
        },
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_image", "image_url": "data:,"}],
        },
        "[input_image left out]",
    ),
    "/v1/messages": (
        {
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": "go"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "a", "name": "Read", "input": {"type": "image"}}
                    ],
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "image", "source": {"type": "base64", "data": ""}}],
                }
            ],
        },
        "[image left out]",
    ),
}


@pytest.mark.parametrize("path", IMAGES)
def test_an_image_of_a_harness_becomes_a_text_and_is_counted(path, endpoint):
    body, message, text = json.loads(json.dumps(IMAGES[path]))
    field = "input" if "input" in body else "messages"
    body = body | {"model": "m", field: [*body[field], message]}
    for without_media in (True, False):
        session, rules = ToldSession(), SamplingRules(1.0, without_media=without_media)
        access = endpoint.open_key(session, sampling=rules)
        header = {"authorization": f"Bearer {access.api_key}"}
        url = access.base_url.removesuffix("/v1") + path
        answer = httpx.post(url, json=body, headers=header)
        endpoint.close_key(access.api_key)
        assert answer.status_code == (200 if without_media else 400), answer.text
        if without_media:
            assert session.calls[0].messages[-1].content == text
            (param,) = session.params
            assert param.startswith(f"{field}[{len(body[field]) - 1}].")
            if path == "/v1/messages":  # what the policy wrote is not touched
                assert session.calls[0].messages[1].calls[0].arguments == {"type": "image"}
