"""What plays a run's episodes has the configuration's limits."""

import queue
import resource
import shlex
import sys
from types import SimpleNamespace

import httpx
import pytest

from seeupo_jax.agents.calls import Access, AgentResult, AgentTask
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.runtime.episode_host import (
    _sampling_rules,
    build_host,
    build_runner,
    check_host,
    check_open_files,
    make_endpoint,
)

TASK, ACCESS = AgentTask("t", "train", None, 0, 0, 1), Access("http://127.0.0.1:9/v1", "key")


def test_clients_are_told_the_sampling_of_the_configuration():
    rollout = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    config = from_dict({"rollout": rollout, "agent": {"ignore_sampling": True}})
    assert _sampling_rules(config) == SamplingRules(0.7, 0.9, 5, ignore=True)
    assert _sampling_rules(config, 0.5) == SamplingRules(0.5, 0.9, 5, ignore=True)


def test_a_request_beyond_the_configured_size_is_refused():
    endpoint = make_endpoint(from_dict({"agent": {"request_kib": 1}}), "m")
    endpoint.start()
    try:
        access = endpoint.open_key(None)
        url, head = f"{access.base_url}/chat/completions", {"x-api-key": access.api_key}
        assert httpx.post(url, content=b" " * 1024, headers=head).status_code == 400
        assert httpx.post(url, content=b" " * 1025, headers=head).status_code == 413
    finally:
        endpoint.close()


@pytest.mark.parametrize("name", ["remote", "openenv"])
@pytest.mark.parametrize("within", [False, True], ids=["alone", "in a mixture"])
def test_a_client_that_gives_a_call_up_before_its_time_limit_is_refused(name, within):
    def check(**options):
        env = {"name": name, "options": {"url": "ws://127.0.0.1:9"} | options}
        if within:
            env = {"name": "mixture", "options": {"environments": [env]}}
        check_host(from_dict({"env": env | {"timeout_s": 300}}))

    check()
    check(timeout_s=None)
    check(timeout_s=301)
    for seconds in (60, 300):
        with pytest.raises(ValueError) as error:
            check(timeout_s=seconds)
        assert str(error.value) == (
            f"config.env.options.timeout_s: got {seconds} for env {name}, with which a call that"
            " hangs would count as env_error; allowed: none, or more than 300"
            " (config.env.timeout_s)."
        )


def test_a_client_of_a_server_needs_no_process_of_its_own():
    env = {"name": "remote", "options": {"url": "http://127.0.0.1:9"}}
    for whole in (env, {"name": "mixture", "options": {"environments": [env]}}):
        with pytest.raises(ValueError, match="^config.env.isolation: got process .* thread.$"):
            check_host(from_dict({"env": whole | {"isolation": "process"}}))


@pytest.mark.parametrize(
    "program, says",
    [
        ("head -c 2000 /dev/zero", "it printed more than 1 KiB (config.agent.output_kib)"),
        (
            f"{sys.executable} -ISc {shlex.quote('x = bytearray(2**30)')}",
            "no more memory than 256 MiB (config.agent.memory_mib)",
        ),
        ("echo 5 > $SEEUPO_RESULT", "of magnitude at most 4 (config.env.max_reward)"),
    ],
)
def test_a_command_has_the_configured_limits(program, says):
    limits = {"output_kib": 1, "memory_mib": 256}
    command = f"sh -c {shlex.quote(program)}"
    config = from_dict({"agent": {"command": command, **limits}, "env": {"max_reward": 4.0}})
    assert says in end_of(config).reason


def test_a_function_has_the_configured_limit(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("async def play(task, client):\n    return 5.0\n")
    agent = {"name": f"{file}:play"}
    assert end_of(from_dict({"agent": agent})) == AgentResult(5.0, 1.0)
    failure = end_of(from_dict({"agent": agent, "env": {"max_reward": 4.0}}))
    assert "of magnitude at most 4 (config.env.max_reward)" in failure.reason


# Descriptors of one conversation in the trainer's process, counted by hand.
OPEN_FILES = {
    "a function's connection has both ends here": ({"agent": {"name": "m:f"}}, False, 2),
    "a command's has one": ({"agent": {"command": "true"}}, False, 1),
    "an isolated environment has two pipes": ({"env": {"isolation": "process"}}, False, 2),
    "a server of the policy is asked by one": ({}, True, 1),
    "and a function by two more": ({"agent": {"name": "m:f"}}, True, 3),
}


@pytest.mark.parametrize("settings, served, each", OPEN_FILES.values(), ids=OPEN_FILES)
def test_more_conversations_than_open_files_are_refused(settings, served, each, monkeypatch):
    config, limits = from_dict(settings), [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    check_open_files(config, 3000 // each, served=served)
    assert limits[-1] == (4096, 4096)
    engine = object.__new__(OpenAIServer) if served else SimpleNamespace()
    engine.concurrency = 4096 // each
    with pytest.raises(ValueError, match="^config.rollout.concurrency: got .* 4096 .*`ulimit -n`"):
        build_host(config, engine, None, print)
    check_open_files(from_dict({}), 10**6)  # an environment in this process opens none


def end_of(config):
    """What an agent of this configuration comes to."""
    runner, ended = build_runner(config), queue.SimpleQueue()
    try:
        runner.start(TASK, ACCESS, ended.put)
        return ended.get(timeout=20)
    finally:
        runner.close()
