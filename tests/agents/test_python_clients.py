"""Python clients, each where it is installed, on a server without options."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from agent_cases import ToldSession
from places import ROOT

from seeupo_jax.agents.calls import context_exceeded
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.envs.tool_calls import render_hermes

WANTED = {"city": "Rome"}
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class ActingSession(ToldSession):
    """Calls the first tool if it must, gives JSON if a schema is asked for; `full` has no room."""

    async def complete(self, call, on_text=None):
        self.calls.append(call)
        if call.messages[-1].content == "full":
            raise context_exceeded("60030 tokens", "fewer", 49_152, "messages")
        said = "All done."
        if call.constraint is not None and call.constraint.calls == "must":
            said = render_hermes(call.tools[0]["name"], **WANTED)
        elif call.constraint is not None and call.constraint.schema:
            said = json.dumps(WANTED)
        return self._say(call, said, on_text or (lambda text: None))


@pytest.fixture
def ask(endpoint):
    """Runs a client against a server: what it got, and the session."""
    session = ActingSession()
    rules = SamplingRules(1.0, serves=True, constrains=True)
    access = endpoint.open_key(session, sampling=rules, unique_ids=True)

    def run(client, variant):
        if importlib.util.find_spec(client) is None:
            pytest.skip(f"{client} is not installed")
        place = (access.base_url.removesuffix("/v1"), access.api_key)
        script = ROOT / "tests" / "support" / "client_process.py"
        command = [sys.executable, str(script), client, variant, *place]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | OFFLINE)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1]), session

    yield run
    endpoint.close_key(access.api_key)


@pytest.mark.parametrize(
    "model", ["openai/m", "openai/responses/m", "hosted_vllm/m", "anthropic/claude-sonnet-4-5"]
)
def test_litellm_takes_two_steps_and_recognises_a_full_context(model, ask):
    got, session = ask("litellm", model)
    assert got == [WANTED, "All done.", WANTED, *["ContextWindowExceededError"] * 2]
    roles = [message.role for message in session.calls[1].messages]
    assert roles == ["user", "assistant", "tool"]
    asked = [(call.sampling.temperature, call.sampling.top_p) for call in session.calls[:2]]
    assert asked == [(0.2, 0.5)] * 2


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_gets_its_record(mode, ask):
    assert ask("instructor", mode)[0] == WANTED


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_langchain_gets_its_forced_calls_and_its_record(api, ask):
    assert ask("langchain", api)[0] == [WANTED] * 3


def test_the_tool_of_an_agent_of_smolagents_is_called(ask):
    got, session = ask("smolagents", "tools")
    assert got == ["Rome"]
    assert session.calls[0].constraint.calls == "must"


@pytest.mark.parametrize(
    "variant",
    [
        "chat/ToolOutput",
        "chat/NativeOutput",
        "responses/ToolOutput",
        "responses/NativeOutput",
        "anthropic/ToolOutput",
    ],
)
def test_pydantic_ai_gets_its_records(variant, ask):
    got, session = ask("pydantic_ai", variant)
    assert got == [WANTED] * 2
    assert session.calls[0].sampling.temperature == 0.2
