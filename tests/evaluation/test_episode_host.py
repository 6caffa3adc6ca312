"""What plays a run's episodes has the configuration's limits."""

import functools
import queue
import resource
import shlex
import sys
import threading
from types import SimpleNamespace

import httpx
import pytest
from places import TINY

from seeupo_jax import envs
from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.agents.answer_form import PLAIN_TEXT
from seeupo_jax.agents.calls import Access, AgentResult, AgentTask
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.configuration.loading import from_dict, load_config
from seeupo_jax.envs.serve import EnvServer
from seeupo_jax.envs.serve import main as serve_main
from seeupo_jax.envs.transport.http_protocol import ensure_token, read_token
from seeupo_jax.evaluate import main as evaluate_main
from seeupo_jax.evaluation.episode_host import (
    _sampling_rules,
    build_host,
    build_runner,
    check_host,
    check_open_files,
    make_endpoint,
)
from seeupo_jax.train import main as train_main
from seeupo_jax.training.checks import check_config

TASK, ACCESS = AgentTask("t", "train", None, 0, 0, 1), Access("http://127.0.0.1:9/v1", "key")


def test_clients_are_told_the_sampling_of_the_configuration():
    rollout = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    config = from_dict({"rollout": rollout, "agent": {"ignore_sampling": True}})
    assert _sampling_rules(config) == SamplingRules(0.7, 0.9, 5, ignore=True)
    assert _sampling_rules(config, 0.5) == SamplingRules(0.5, 0.9, 5, ignore=True)


def test_a_request_beyond_the_configured_size_is_refused():
    endpoint = make_endpoint(from_dict({"agent": {"request_kib": 1}}), "m", PLAIN_TEXT)
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
        build_host(config, engine, None, None, print)
    check_open_files(from_dict({}), 10**6)  # an environment in this process opens none


def end_of(config):
    """What an agent of this configuration comes to."""
    runner, ended = build_runner(config, find_tasks(config)), queue.SimpleQueue()
    try:
        runner.start(TASK, ACCESS, ended.put)
        return ended.get(timeout=20)
    finally:
        runner.close()


PLAIN = ["model.path=package:order_desk", "warm_start.stages=()"]
# The task of one split begins wrongly, by the class's name; a marker says that it was closed.
WRONG = """
import pathlib
from run_environment import Echo
from seeupo_jax.envs.base import TransientError

FOLDER = pathlib.Path(__file__).parent
BEGUN = ({"role": "user", "content": "?"},), ()

class Text(Echo):
    split = "train"
    def task_ids(self, split):
        return [f"{split}{number}" for number in range(2)]
    def reset(self, task_id, seed):
        with open(FOLDER / "resets", "a") as file:
            file.write(task_id + " ")
        super().reset("t1", seed)
        return self.begin() if task_id.startswith(self.split) else BEGUN
    def begin(self):
        return "hello"
    def close(self):
        (FOLDER / "closed").touch()

class Raising(Text):
    def begin(self):
        return {}["desk"]

class Tested(Raising):
    split = "test"

class Busy(Text):
    def begin(self):
        if not hasattr(Busy, "asked"):
            Busy.asked = True
            raise TransientError("still busy")
        return BEGUN

class Fine(Text):
    split = "no"

class Hanging(Text):
    def begin(self):
        import time
        time.sleep(1000)
"""


@pytest.fixture
def wrong(tmp_path):
    """Overrides for an environment of `WRONG`, and what it did."""
    file = tmp_path / "my_env.py"
    file.write_text(WRONG)

    def choose(kind, **env):
        fields = {"name": f"{file}:{kind}", **env}
        return [*(f"env.{name}={value}" for name, value in fields.items()), *PLAIN]

    return choose, lambda: (tmp_path / "resets").read_text().split()


LINE = WRONG.splitlines().index('        return {}["desk"]') + 1
KEY = f"KeyError: 'desk' (reset, my_env.py:{LINE}); allowed: a reset that returns messages, tools."
BEGINS = {
    "Text": "'train0' does not begin: reset(): got 'hello' (str); allowed: a pair: messages and"
    " tools.",
    "Raising": f"'train0' does not begin, also after 2 retries: {KEY}",
    "Tested": f"'test0' does not begin, also after 2 retries: {KEY}",
    "Hanging": "'train0' does not begin, also after 2 retries: no answer in",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("kind", BEGINS)
def test_an_environment_whose_reset_fails_is_one_sentence_beforehand(wrong, kind, isolation):
    choose, resets = wrong
    limit_s = 60 if kind != "Hanging" else 5 if isolation == "process" else 0.5
    more = {"isolation": isolation, "timeout_s": limit_s, "retry_wait_s": 0.01}
    with pytest.raises(ValueError) as error:
        check_config(load_config(TINY, choose(kind, **more)))
    assert BEGINS[kind] in str(error.value) and len(str(error.value).splitlines()) == 1
    tries = 1 if kind == "Text" else 3  # what is returned is no accident
    assert resets() == {"Tested": ["train0"]}.get(kind, []) + [BEGINS[kind].split("'")[1]] * tries


def test_each_split_that_is_played_is_begun_once_and_closed(wrong, tmp_path):
    choose, resets = wrong
    check_config(load_config(TINY, choose("Fine")))
    assert resets() == ["train0", "test0"] and (tmp_path / "closed").exists()
    check_config(load_config(TINY, choose("Busy", retry_wait_s=0.01)))
    assert resets()[2:] == ["train0", "train0", "test0"]  # the first was busy
    check_config(load_config(TINY, [*choose("Tested"), "evaluation.tasks=0"]))
    assert resets()[5:] == ["train0"]


def test_a_server_of_such_an_environment_is_refused_with_the_same_sentence(wrong, tmp_path):
    choose, _ = wrong
    token = ensure_token(str(tmp_path / "token"))
    made = functools.partial(envs.make, choose("Raising")[0].partition("=")[2])
    server = EnvServer(made, token=read_token(str(token)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    options = {"url": server.url, "token_file": str(token)}
    try:
        with pytest.raises(ValueError) as error:
            fields = ["env.name=remote", f"env.options={options}", "env.retry_wait_s=0.01"]
            check_config(load_config(TINY, [*fields, *PLAIN]))
    finally:
        server.stop()
        thread.join()
    assert f"'train0' does not begin, also after 2 retries: RemoteError: {KEY}" in str(error.value)
    assert server.sessions == 0


@pytest.mark.parametrize("command", [train_main, evaluate_main])
def test_commands_and_explain_refuse_such_an_environment_with_exit_code_2(
    wrong, tmp_path, capsys, command
):
    choose, _ = wrong
    kind = "Text" if command is train_main else "Tested"
    fields = [f"--config.{text}" for text in choose(kind, retries=0)]
    for explain in ([], ["--explain"]):
        with pytest.raises(SystemExit) as ended:
            command(["run", f"--config={TINY}", f"--workdir={tmp_path / 'run'}", *fields, *explain])
        assert ended.value.code == 2 and not (tmp_path / "run").exists()
        said = capsys.readouterr().err
        assert BEGINS[kind].replace(", also after 2 retries", "") in said


MISSPELT = """
from run_environment import Echo

class Singular(Echo):
    def label(self, task_id):
        return {}
    def finalise(self):
        pass

class Right(Echo):
    def labels(self, task_id):
        return {}
    def label(self, task_id):
        return {}

async def agent(task, client):
    return 1.0

def task_id(split):
    return ["a"]
"""


def test_a_method_that_is_likely_meant_to_be_an_optional_one_is_warned_of(tmp_path, caplog):
    file = tmp_path / "misspelt.py"
    file.write_text(MISSPELT)
    for name in ("Singular", "Right"):
        check_host(from_dict({"env": {"name": f"{file}:{name}"}}))
    check_host(from_dict({"agent": {"name": f"{file}:agent"}}))
    said = "which the trainer does not call; is"
    assert [record.getMessage() for record in caplog.records] == [
        f"config.env.name: {file}:Singular has label(), {said} labels() meant?",
        f"config.agent.name: {file}:agent has task_id(), {said} task_ids() meant?",
    ]


UNMADE = """
class Unmade:
    def __init__(self, path="nowhere"):
        self._read(path)
    def _read(self, path):
        raise LookupError(f"no {path}")

def factory():
    return Unmade("world")
"""


@pytest.mark.parametrize("kind, method", [("Unmade", "__init__"), ("factory", "factory")])
@pytest.mark.parametrize("way", ["thread", "process", "mixture"])
def test_what_cannot_be_made_says_where_in_the_users_code(tmp_path, kind, method, way):
    name = f"{tmp_path / 'my_env.py'}:{kind}"
    (tmp_path / "my_env.py").write_text(UNMADE)
    env = [f"env.name={name}", f"env.isolation={'process' if way == 'process' else 'thread'}"]
    if way == "mixture":
        env = ["env.name=mixture", f"env.options={{'environments': [{{'name': {name!r}}}]}}"]
    with pytest.raises(ValueError) as error:
        check_config(load_config(TINY, [*env, *PLAIN]))
    text = "no world" if kind == "factory" else "no nowhere"
    made = f"env.name: {name!r} cannot be made: LookupError: {text} ({method}, my_env.py:6)"
    assert made in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_server_that_cannot_make_its_environment_says_where(tmp_path, capsys):
    (tmp_path / "my_env.py").write_text(UNMADE)
    with pytest.raises(SystemExit) as ended:
        serve_main([f"--env={tmp_path / 'my_env.py'}:Unmade", f"--token-file={tmp_path / 'token'}"])
    assert ended.value.code == 2
    assert "LookupError: no nowhere (__init__, my_env.py:6)." in capsys.readouterr().err
