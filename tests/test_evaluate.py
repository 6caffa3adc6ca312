"""The command as its user runs it: with the policy of the run, or with that of a server."""

import collections
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai_cases as cases
import pytest
from absl import flags
from absl.testing import flagsaver

from seeupo_jax import envs, evaluate
from seeupo_jax.cli import parse_flags
from seeupo_jax.config import Chat
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.network import split
from seeupo_jax.policy.weights import read_tokenizer
from seeupo_jax.rollout.openai_server import OpenAIServer

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.py"
LENGTH = 128  # tokens a conversation may reach
GREEDY = (
    "--config.rollout.tasks=2",
    "--config.rollout.group_size=4",
    "--config.rollout.top_k=1",
    "--config.evaluation.tasks=8",
    "--config.rollout.max_turns=4",  # some cases need more
    "--k=2",
)
SHORT = ("--config.evaluation.tasks=1", "--k=1")
AVG, PASS = "eval/avg@2", "eval/pass@2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder as a run leaves it."""
    place = tmp_path_factory.mktemp("evaluate") / "policy"
    model, tokenizer = from_pretrained("package:order_desk", dtype="float32")
    save_pretrained(model, place, tokenizer)
    return place


@pytest.fixture(scope="module")
def logits(folder):
    """What a server that holds this folder computes."""
    model, _ = from_pretrained(str(folder), dtype="float32")
    return cases.logits_of(*split(model), LENGTH)


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def serve(logits):
    """Makes a server of the folder's policy; further settings are the server's."""
    return lambda **settings: cases.PolicyServer(
        **({"logits": logits, "max_model_len": LENGTH} | settings)
    )


def arguments(folder, *more):
    workdir = folder.parent / "run"
    paths = [f"--config={CONFIG}", f"--workdir={workdir}", f"--config.model.path={folder}"]
    return [*paths, f"--json={workdir / 'out.json'}", *GREEDY, *more]


def play(folder, *more):
    """The JSON of an evaluation in this process."""
    out = folder.parent / "run" / "out.json"
    out.unlink(missing_ok=True)
    with flagsaver.flagsaver():
        flags.FLAGS(parse_flags(["evaluate", *arguments(folder, *more)]))
        evaluate.main([])
    return json.loads(out.read_text())


def refusal(folder, capsys, *more):
    """The sentence with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        play(folder, *more)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def own(folder):
    """What our own engine plays."""
    return play(folder)


def test_our_own_engine_plays_what_the_run_starts_from(own):
    assert own["iteration"] == 0
    assert 0 < own[AVG] == own[PASS] < 1  # greedy: every member of a group plays alike


@pytest.mark.parametrize("owner, path", [("vllm", "/v1/completions"), ("sglang", "/generate")])
def test_a_servers_greedy_policy_scores_as_our_engines(folder, serve, own, capsys, owner, path):
    with serve(owned_by=owner) as server:
        metrics = play(folder, f"--server={server.url}")
    about = {"server": server.url, "model": cases.MODEL}
    assert metrics == about | {name: own[name] for name in own if name != "iteration"}
    assert {asked[0] for asked in server.asked} == {path}
    printed = capsys.readouterr()
    assert f"{AVG} {own[AVG]:.3f}" in printed.out and not printed.err


def test_the_command_needs_no_accelerator_and_ends(folder, serve):
    module = [sys.executable, "-m", "seeupo_jax.evaluate"]
    with serve() as server:
        done = subprocess.run(
            [*module, *arguments(folder, *SHORT, f"--server={server.url}")],
            env=os.environ | {"JAX_PLATFORMS": "rocm"},  # that of the server, say: not there
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("eval/avg@1 ")


def bodies(server):
    return [body for _, _, body in server.asked[1:]]  # without the one that tries it


def test_sampling_is_the_configs(folder, serve):
    choices = ("--config.evaluation.temperature=0.5", "--config.rollout.top_k=3")
    with serve() as server:
        play(folder, *SHORT, f"--server={server.url}", *choices)
    _, tokenizer = from_pretrained(str(folder))
    for body in bodies(server):
        assert (body["temperature"], body["top_k"], body["top_p"]) == (0.5, 3, 1.0)
        assert (body["max_tokens"], body["stop_token_ids"]) == (16, list(tokenizer.end_ids))
    assert len({body["seed"] for body in bodies(server)}) == len(server.asked) - 1


def test_the_chat_is_the_configs(folder, serve, logits):
    choices = ("--config.chat.system=True", "--config.chat.tools=none")
    one_turn = ("--config.rollout.max_turns=1", "--config.rollout.max_action_tokens=4")
    tokenizer = read_tokenizer(str(folder), Chat(system=True, tools="none"))
    prompt = list(tokenizer.begin(*envs.make("order_desk").reset("test/0", 0)).tokens)
    more = ("--config.rollout.max_context=1024", "--config.batching.buckets=()")
    with serve(max_model_len=1024) as server:
        short = {"prompt": [1]}  # what it answers does not matter
        server.routes["/v1/completions"] = lambda body: cases.completions(
            body | short, True, logits
        )
        play(folder, *SHORT, *choices, *one_turn, *more, f"--server={server.url}")
    assert [body["prompt"] for body in bodies(server)] == [prompt]


def test_seeds_can_be_left_to_the_server(folder, serve):
    with serve() as server:
        play(folder, *SHORT, f"--server={server.url}", "--server_seeded=False")
    assert not any("seed" in body for body in bodies(server))


def test_the_dialect_can_be_said(folder, serve):
    with serve(owned_by="someone") as server:
        play(folder, *SHORT, f"--server={server.url}", "--server_dialect=sglang")
    assert {path for path, *_ in server.asked} == {"/generate"}


@pytest.mark.parametrize("concurrency, most", [("2", 2), ("none", 8)])
def test_so_many_conversations_are_open_as_the_config_says(folder, serve, concurrency, most):
    together, counts = threading.Lock(), collections.Counter()

    def slow(reply):
        with together:
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
        time.sleep(0.1)
        with together:
            counts["now"] -= 1
        return cases.right(reply)

    with serve() as server:
        server.usual = slow
        one_turn = ("--config.rollout.max_turns=1", f"--config.rollout.concurrency={concurrency}")
        play(folder, "--k=2", *one_turn, f"--server={server.url}")
    assert counts["most"] == most


def test_a_server_of_several_models_is_asked_for_the_one_that_is_named(folder, serve, capsys):
    with serve(others=("other",)) as server:
        told = refusal(folder, capsys, f"--server={server.url}")
        named = (f"--server={server.url}", f"--server_model={cases.MODEL}")
        assert play(folder, *SHORT, *named)["model"] == cases.MODEL
    assert told.startswith("error: model: got ") and told.endswith(
        f"; allowed at {server.url}: {cases.MODEL}, other.\n"
    )


def test_the_api_key_is_the_environments(folder, serve, capsys, monkeypatch):
    with serve(key="secret") as server:
        told = refusal(folder, capsys, f"--server={server.url}")
        assert told.startswith(f"error: {server.url}: /v1/models answered 401: no such key")
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert play(folder, *SHORT, f"--server={server.url}/v1")["model"] == cases.MODEL


def test_what_the_server_cost_is_told(folder, serve, capsys):
    with serve() as server:
        no = cases.status(503, "no")
        server.script.extend([cases.right, no, no, cases.right, no, no, no])
        quick = ("--config.rollout.concurrency=1", "--config.env.retry_wait_s=0.01")
        metrics = play(folder, *SHORT, *quick, "--k=2", f"--server={server.url}")
    assert not math.isnan(metrics[AVG])
    assert capsys.readouterr().err == (
        f"{server.url}: requests repeated: 4; given up: 1, whose episodes do not count.\n"
    )


def test_a_request_is_given_up_when_its_time_is_over(folder, serve, capsys):
    released = threading.Event()
    with serve() as server:
        server.script.extend([cases.right, lambda reply: released.wait(20) and cases.right(reply)])
        play(folder, *SHORT, f"--server={server.url}", "--server_timeout_s=1")
        released.set()
    assert "requests repeated: 1; given up: 0" in capsys.readouterr().err


def test_what_is_open_is_closed_after_an_error_too(folder, serve, capsys, monkeypatch):
    closed = []
    for kind in (OpenAIServer, EnvPool):
        close = lambda self, kind=kind, end=kind.close: (closed.append(kind), end(self))  # noqa: E731
        monkeypatch.setattr(kind, "close", close)
    with serve() as server:
        play(folder, *SHORT, f"--server={server.url}")
        assert closed == [EnvPool, OpenAIServer]
        server.script.extend([cases.right, cases.status(400, "too long")])
        told = refusal(folder, capsys, f"--server={server.url}")
    assert told == f"error: {server.url}: /v1/completions answered 400: too long\n"
    assert closed == [EnvPool, OpenAIServer] * 2


REFUSED = [
    (
        ["--config.rollout.max_context=256", "--config.batching.buckets=()"],
        "max_context: got 256; allowed: at most the 128 that",
    ),
    (["--server_dialect=tgi"], "dialect: got 'tgi'; allowed: auto, vllm, sglang."),
    (
        ["--config.rollout.grammar=tool_calls"],
        "config.rollout.grammar: got 'tool_calls'; allowed with --server: none",
    ),
    (["--split=dev"], "order_desk split: got 'dev'; allowed: train, test."),
]


@pytest.mark.parametrize("more, told", REFUSED)
def test_a_wrong_setting_is_a_sentence(folder, serve, capsys, more, told):
    with serve() as server:
        assert refusal(folder, capsys, f"--server={server.url}", *more).startswith(f"error: {told}")


def test_a_server_that_is_not_there_is_a_sentence(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    told = refusal(folder, capsys, f"--server={url}", "--config.env.retries=0")
    assert told.startswith(f"error: {url}: /v1/models: ")
    assert told.endswith("refused; allowed: a server that answers.\n")


def test_what_is_said_of_a_server_needs_one(folder, capsys):
    told = refusal(folder, capsys, f"--server_model={cases.MODEL}")
    assert told == "error: --server_model: got a value; allowed: none without --server.\n"


def test_a_folder_without_the_served_models_tokenizer_is_told(folder, serve, capsys, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with serve() as server:
        other = f"--config.model.path={tmp_path}"
        told = refusal(folder, capsys, f"--server={server.url}", other)
    assert told == f"error: {tmp_path}: got no tokenizer; allowed: that of the model served.\n"
