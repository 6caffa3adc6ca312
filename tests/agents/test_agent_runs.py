"""Agents of both kinds play a collection: through their runner, the endpoint and its sessions."""

import json
import sys

import pytest
from rollout_cases import NumberTokenizer, Saying

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.configuration.reward import Reward
from seeupo_jax.envs.tasks import list_tasks
from seeupo_jax.evaluation.episode_host import build_host, check_host
from seeupo_jax.evaluation.evaluation_run import evaluation_settings
from seeupo_jax.policy_io.resume_check import check_same_run, sampling_hash
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.episode_metrics import most_frequent_failure, rollout_metrics
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker

AGENT = """
import asyncio

def task_ids(split):
    return ["fine", "too many", "too long", "broken", "hangs", "wrong", "asks"]

async def ask(client, messages, **more):
    answer = await client.chat.completions.create(model="m", messages=messages, **more)
    return [*messages, answer.choices[0].message, {"role": "user", "content": "1"}]

async def play(task, client, *, longest):
    messages = [{"role": "user", "content": "2"}]
    if task.task_id == "too long":
        messages[0]["content"] = "2 " * longest
    if task.task_id == "asks":
        messages = await ask(client, messages, temperature=0.5, seed=3)
    for _ in range(9 if task.task_id.startswith("too") else 2):
        messages = await ask(client, messages)
    if task.task_id == "hangs":
        await asyncio.sleep(99)
    if task.task_id == "broken":
        raise KeyError("broken")
    return None if task.task_id == "wrong" else 0.75
"""


def played(agent, *, rewards=(), temperature=None, **env):
    """The trajectories of its tasks, by task, and the metrics of all of them."""
    rollout = {"max_turns": 3, "max_action_tokens": 4, "max_context": 40}
    config = from_dict({"agent": agent, "rollout": rollout, "env": env})
    check_host(config)
    engine, said = Saying(), []
    tasks, scorer = find_tasks(config), make_scorer(rewards)
    host = build_host(config, engine, tasks, NumberTokenizer(), said.append)
    assert len(said) == 1 and said[0].startswith("agents call the policy at http://127.0.0.1:")
    worker = RolloutWorker(
        engine, host, NumberTokenizer(), config.env, config.rollout, rewards=scorer
    )
    requests = group_requests(list_tasks(tasks, "train"), 1, 1)
    try:
        options = CollectionOptions(seed=3, temperature=temperature)
        collected = collect(worker, None, requests, options)
    finally:
        host.close()
        scorer.close()
    failed = any(t.failed for t in collected.trajectories)
    assert ("agents failed, " in str(most_frequent_failure(collected))) == failed
    return {t.task_id: t for t in collected.trajectories}, rollout_metrics(collected)


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(AGENT)
    agent = {"name": f"{file}:play", "options": {"longest": 50}, "timeout_s": 1.0}
    return played(agent | {"ignore_sampling": True}, timeout_as="zero_reward")


def test_each_ends_as_it_should(function):
    found, _ = function
    ends = {name: (t.stop, t.failed, t.reward, t.turns) for name, t in found.items()}
    assert ends == {
        "fine": ("done", False, 0.75, 2),
        "too many": ("max_turns", False, 0.0, 3),
        "too long": ("max_tokens", False, 0.0, 0),
        "broken": ("env_error", True, 0.0, 2),
        "hangs": ("timeout", False, 0.0, 2),
        "wrong": ("env_error", True, 0.0, 2),
        "asks": ("done", False, 0.75, 3),
    }
    assert found["broken"].info["failure"] == "KeyError: 'broken'"
    assert found["wrong"].info["failure"].startswith("the agent's result: reward: got None;")
    assert "was without an open call for 1 s" in found["hangs"].info["failure"]
    assert found["fine"].turn_rewards == (0.0, 0.75)
    (segment,) = found["fine"].segments
    # A number a token: the user's 2, the action, the user's 1, the action.
    assert segment.tokens_L.tolist() == [20, 2, 3, 22, 5, 3, 20, 1, 3, 22, 5, 3]
    assert segment.turn_L.tolist() == [-1] * 4 + [0, 0] + [-1] * 4 + [1, 1]


def test_a_message_that_was_refused_an_answer_is_shown(function):
    """As of an environment, whose last observation is too."""
    found, _ = function
    roles = [message["role"] for message in found["too many"].messages]
    assert roles == ["user", "assistant"] * 3 + ["user"]
    assert [message["content"] for message in found["too long"].messages] == ["2 " * 50]


def test_causes_calls_and_what_was_ignored_are_counted(function):
    _, metrics = function
    names = ("agent", "ignored", "refused", "lineages")
    own = {name: x for name, x in metrics.items() if name.split("/")[1].split("_")[0] in names}
    assert own == {
        "rollout/agent_failed/exception": 1,
        "rollout/agent_failed/result": 1,
        "rollout/agent_failed/timeout": 1,
        "rollout/ignored_sampling": 2,
        "rollout/refused_calls": 2,
        "rollout/lineages_mean": pytest.approx(4 / 5),  # of those that count
    }
    assert metrics["rollout/timeouts"] == metrics["rollout/timeouts_counted"] == 1


def test_a_parameter_that_would_change_the_sampling_is_refused(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(AGENT.replace('["fine",', '["asks"] + 0 * ["fine",'))
    agent = {"name": f"{file}:play", "options": {"longest": 1}}
    found, _ = played(agent)
    assert "temperature: got 0.5; allowed: 1.0" in found["asks"].info["failure"]
    found, _ = played(agent, temperature=0.5)  # of an evaluation
    assert "seed: got 3; allowed: no value" in found["asks"].info["failure"]


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(open(os.environ["SEEUPO_TASK"]))
if task["data"]["number"] == 5:
    import no_such_package
def ask(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    head["Content-Type"] = "application/json"
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": str(task["data"]["number"])}]
messages += [ask(messages), {"role": "user", "content": "1"}]
ask(messages)
if task["data"]["number"] == 7:
    os.kill(os.getpid(), 11)
sys.exit(task["data"]["number"])
"""


def by_length(episode):
    return len(episode.messages)


def test_a_command_plays_the_tasks_of_a_file(tmp_path):
    tasks, program = tmp_path / "tasks.jsonl", tmp_path / "agent.py"
    lines = [{"task_id": f"t{number}", "number": number} for number in (0, 1, 5, 7)]
    tasks.write_text("\n".join(map(json.dumps, lines)))
    program.write_text(PROGRAM)
    agent = {"command": f"{sys.executable} -IS {program}", "tasks": str(tasks)}
    rewards = [Reward(f"{__name__}:by_length", weight=0.5)]
    found, metrics = played(agent, rewards=rewards)
    assert [t.reward for t in found.values()] == [1 + 2, 0 + 2, 0, 0]
    assert [t.turns for t in found.values()] == [2, 2, 0, 2]
    assert found["t5"].failed and "ModuleNotFoundError: No mod" in found["t5"].info["failure"]
    assert metrics["rollout/agent_failed/exit"] == 1 and not found["t1"].failed
    assert [t.info["score"] for t in found.values()][:2] == [1.0, 0.0]
    assert found["t7"].failed and "signal 11 (SIGSEGV)" in found["t7"].info["failure"]
    assert metrics["rollout/agent_failed/crash"] == 1
    assert metrics["rollout/reward/by_length"] == 4.0
    assert found["t0"].messages[0] == {"role": "user", "content": "0"}


def test_an_endpoint_that_cannot_listen_is_said_in_a_sentence():
    config = from_dict({"agent": {"command": "sh", "host": "192.0.2.1"}})
    with pytest.raises(ValueError, match="endpoint: 192.0.2.1:0 cannot be listened on"):
        build_host(config, Saying(), find_tasks(config), NumberTokenizer(), print)


def test_a_run_resumes_and_an_evaluation_goes_on_with_the_same_agent_wherever_it_listens():
    plain, first, second = ({}, {"command": "sh a"}, {"command": "sh b"})
    saved = to_dict(from_dict({"agent": first}))
    check_same_run(from_dict({"agent": first | {"port": 80, "memory_mib": 9}}), saved)
    older = to_dict(from_dict({}))
    del older["agent"]  # of a version that had none
    check_same_run(from_dict({}), older)
    for agent, other in ((second, saved), (plain, saved), (first, older)):
        with pytest.raises(ValueError, match="^config.agent.command: got .*Choose a new workdir"):
            check_same_run(from_dict({"agent": agent}), other)
    a, b, c = (sampling_hash(from_dict({"agent": agent})) for agent in (plain, first, second))
    assert len({a, b, c}) == 3 and sampling_hash(from_dict({"agent": {"port": 5}})) == a
    reported = [evaluation_settings(from_dict({"agent": x}), "test", 1, {}) for x in (plain, first)]
    assert "config.agent" not in reported[0] and reported[1]["config.agent"]["command"] == "sh a"
    assert not {"host", "port", "output_kib"} & reported[1]["config.agent"].keys()


def test_a_run_resumes_with_the_same_task_folders_whichever_runtime_isolates_them():
    plain = {"agent": {"command": "sh a"}}
    first = plain | {"tasks": "harbor:a"}
    saved = to_dict(from_dict(first))
    check_same_run(from_dict(first | {"sandbox": {"runtime": "podman", "processes": 9}}), saved)
    older = to_dict(from_dict(plain))
    del older["tasks"], older["sandbox"], older["agent"]["harness"]  # of a version that had none
    check_same_run(from_dict(plain), older)
    refused = {
        "config.tasks: got": first | {"tasks": "harbor:b"},
        "config.sandbox.memory_mib: got 9": first | {"sandbox": {"memory_mib": 9}},
        "config.sandbox.solution: got True": first | {"sandbox": {"solution": True}},
        "config.agent.harness: got 'codex'": first
        | {"agent": {"command": "sh a", "harness": "codex"}},
    }
    for sentence, other in refused.items():
        with pytest.raises(ValueError, match=f"{sentence}.*Choose a new workdir"):
            check_same_run(from_dict(other), saved)
    with pytest.raises(ValueError, match="config.tasks: got .*Choose a new workdir"):
        check_same_run(from_dict(first), older)
    made = {sampling_hash(from_dict(each)) for each in (plain, first, *refused.values())}
    assert len(made) == 2 + len(refused)
