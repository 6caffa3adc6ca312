"""tau2-bench by its own package: the agent and the user simulator call the endpoint as two roles.

What both say is written by a script, so that it is known what a task should come to.
"""

import json
import os
import subprocess

import pytest
from places import ROOT

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import Completion
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.endpoint import Endpoint
from seeupo_jax.envs.tool_calls import render_hermes
from seeupo_jax.envs.tool_formats.formats import choose_format

TAU2 = ROOT / "third_party" / "tau2"
HERMES = choose_format("hermes")
CREATE = render_hermes("create_task", user_id="user_1", title="Important Meeting")


class Script:
    """Each role says its lines, one a call; `ignored_fields` are what requests had beside ours."""

    def __init__(self, **lines):
        self.lines = {role: iter(said) for role, said in lines.items()}
        self.calls, self.ignored_fields = [], set()

    def ignored(self, param):
        self.ignored_fields.add(param)

    async def complete(self, call, on_text=None):
        self.calls.append(call)
        text = next(self.lines[call.role or "policy"])
        content, tool_calls = HERMES.parse(text) if call.tools else (text, ())
        finish = "tool_calls" if tool_calls else "stop"
        return Completion(text, content, tool_calls, finish, (b"x",), (-0.5,), prompt_tokens=1)


@pytest.fixture(scope="module")
def endpoint():
    if not (TAU2 / ".venv").exists():
        pytest.skip("tau2-bench is not set up: sh third_party/tau2/setup.sh")
    form = AnswerForm(HERMES)
    rules = SamplingRules(1.0, ignore=True)
    served = Endpoint(sampling=rules, model="policy", form=form, roles=("user",))
    served.start()
    yield served
    served.close()


def play(endpoint, folder, script):
    """The result of the mock domain's task of creating another one."""
    access = endpoint.open_key(script)
    task, result = folder / "task.json", folder / "result.json"
    task.write_text(json.dumps({"data": {"domain": "mock", "name": "create_task_1"}}))
    own = {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": "policy",
        "SEEUPO_TASK": str(task),
        "SEEUPO_RESULT": str(result),
        "NO_PROXY": "127.0.0.1",
    }
    python = TAU2 / ".venv" / "bin" / "python"
    done = subprocess.run(
        [python, TAU2 / "play.py"], env=os.environ | own, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


def test_the_evaluator_rewards_an_agent_that_did_what_the_simulated_user_asked_for(
    endpoint, tmp_path
):
    script = Script(
        user=["Please create the task 'Important Meeting' for user_1.", "###STOP###"],
        policy=[CREATE, "It is created."],
    )
    assert play(endpoint, tmp_path, script) == {"reward": 1.0, "info": {"ended": "user_stop"}}
    assert [call.role for call in script.calls] == ["user", "", "", "user"]
    # tau2 repeats the name of a call outside of its function; no field changes the sampling.
    assert all(name.endswith("tool_calls[0].name") for name in script.ignored_fields)
    ask, act, *_ = script.calls
    assert "You are playing the role of a customer" in ask.messages[0].content
    assert "Mock Domain Policy" in act.messages[0].content
    assert "create_task" in {tool["name"] for tool in act.tools} and not ask.tools


def test_an_agent_that_did_nothing_or_said_nothing_has_no_reward(endpoint, tmp_path):
    script = Script(user=["Create a task.", "###STOP###"], policy=["No."])
    assert play(endpoint, tmp_path, script)["reward"] == 0.0
    script = Script(user=["Create a task."], policy=[""] * 4)
    ended = play(endpoint, tmp_path, script)["info"]["ended"]
    assert "must have either content or tool calls" in ended
