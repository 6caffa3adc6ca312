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
    assert CLIENTS == ["ai", "claude_code", "codex", "opencode", "qwen_code"]
