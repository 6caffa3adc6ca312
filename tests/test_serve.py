"""The command as its user runs it: a policy behind an address, until a signal."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import openai_cases
import optax
import pytest
from loaded_python import LoadedPython
from places import CONFIGS
from process_cases import environment
from prometheus_client.parser import text_string_to_metric_families
from rollout_cases import NumberTokenizer

from seeupo_jax import serve
from seeupo_jax.agents.answer_form import PLAIN_TEXT, AnswerForm, resolve_form
from seeupo_jax.agents.calls import Access
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.cli.command_line import read_config
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.tool_formats.formats import choose_format
from seeupo_jax.evaluate import main as evaluate
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy_io import build
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.serve import KEY_VARIABLE, main
from seeupo_jax.types import TrainState

QUICKSTART, BASE = f"--config={CONFIGS / 'quickstart.py'}", "package:order_desk"
SMALL = ("--config.rollout.tasks=1", "--config.rollout.group_size=2")
KEY = "the-users.key"
LENGTH = 128  # tokens of a conversation in that configuration
ASKED = [{"role": "user", "content": "Hello. My order is 123456. When will it come?"}]


@pytest.fixture(scope="module")
def served():
    """A greedy server in a process of its own, and the lines that it printed when it was ready."""
    own = environment() | {KEY_VARIABLE: KEY}
    line = [QUICKSTART, f"--model={BASE}", "--port=0", "--temperature=0", *SMALL]
    command = [sys.executable, "-m", "seeupo_jax.serve", *line]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = LoadedPython(command, env=own, **streams)
    try:
        yield process, [process.stdout.readline() for _ in range(3)]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def client(served):
    _, lines = served
    url = re.search(r"http://\S+", lines[0])[0]
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


def test_it_says_when_it_is_ready_where_what_and_within_which_limits(served):
    _, (what, limits, key) = served
    assert re.fullmatch(
        r"Serving package:order_desk as 'order_desk' at http://127\.0\.0\.1:\d+/v1\n", what
    )
    assert limits == (
        "context: 128 tokens; answers: at most 16; concurrent calls: 2, others wait; greedy;"
        " tool calls: hermes; thoughts: content\n"
    )
    assert key == f"Key: as in {KEY_VARIABLE}\n"


def test_a_policy_has_the_name_of_its_folder_however_it_is_given(tmp_path, monkeypatch):
    (tmp_path / "mine" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    names = [serve._name(Path(given)) for given in (".", "./", "inside/..", "../mine", BASE)]
    assert names == ["mine"] * 4 + ["order_desk"]


def test_a_key_that_was_made_is_printed(capsys, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    access, engine = Access("http://127.0.0.1:1/v1", "made.key"), SimpleNamespace(concurrency=2)
    serve._announce(Config(), "a policy", access, engine, PLAIN_TEXT)
    printed = capsys.readouterr().out
    assert printed.endswith(f"Key: made.key (made for this server; {KEY_VARIABLE} sets one)\n")


def test_the_answer_is_the_policys_likeliest(client):
    done = client.chat.completions.create(
        model="order_desk", messages=ASKED, temperature=0, logprobs=True
    )
    model, tokenizer = from_pretrained(BASE, dtype="float32")
    logits_LV = openai_cases.logits_of(*split_model(model), LENGTH)
    context, sampled, logp = list(tokenizer.begin(ASKED, ()).tokens), [], []
    while len(sampled) < 16 and not set(sampled) & set(tokenizer.end_ids):
        logits_V = np.asarray(logits_LV([*context, *sampled])[-1], np.float64)
        sampled.append(int(np.argmax(logits_V)))
        logp.append(logits_V.max() - np.log(np.exp(logits_V).sum()))
    assert done.choices[0].message.content == tokenizer.text(sampled)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(context), len(sampled))
    got = [token.logprob for token in done.choices[0].logprobs.content]
    assert len(got) == len(sampled) and min(logp) < -0.01
    np.testing.assert_allclose(got, logp, atol=1e-4)


def test_the_model_is_listed_and_a_wrong_key_refused(client):
    assert [model.id for model in client.models.list()] == ["order_desk"]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(
            model="order_desk", messages=ASKED
        )


def test_a_request_has_the_sampling_and_the_form_that_it_asks_for(client):
    """The server's own is greedy; all programs of both are compiled before the first request."""

    def ask(**options):
        asked = {"model": "order_desk", "messages": ASKED} | options
        return [
            choice.message.content for choice in client.chat.completions.create(**asked).choices
        ]

    drawn = ask(temperature=3.0, n=4, seed=1)
    assert len(set(drawn)) == 4 and drawn == ask(temperature=3.0, n=4, seed=1)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert ask(response_format=named) == ['{"a": 1}']
    assert ask(reasoning_effort="high") == ask()  # a wish that it cannot grant


def test_a_conversation_that_is_too_long_is_refused(client):
    long = [{"role": "user", "content": "order " * LENGTH}]
    with pytest.raises(openai.BadRequestError, match=r"messages: got \d+ tokens; allowed: fewer"):
        client.chat.completions.create(model="order_desk", messages=long)


def test_its_figures_are_read_by_prometheus(client):
    def figures():
        answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(answer.text)
        samples = [sample for family in families for sample in family.samples]
        return {(x.name, *x.labels.values()): x.value for x in samples}

    address = str(client.base_url).removesuffix("/v1/")
    header = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=address, headers=header) as http:
        before = figures()
        asked = {"model": "order_desk", "messages": ASKED}
        done = client.chat.completions.create(**asked)
        for _ in client.chat.completions.create(**asked, stream=True):
            pass
        counted = http.post("/tokenize", json=asked).json()
        added = {name: value - before.get(name, 0) for name, value in figures().items()}
    assert counted["count"] == len(counted["tokens"]) == done.usage.prompt_tokens
    assert counted["max_model_len"] == LENGTH
    assert added[("seeupo_calls_total", "answered")] == 2
    assert added[("seeupo_calls_total", "refused")] == added[("seeupo_open_calls",)] == 0
    assert added[("seeupo_context_tokens_total",)] == 2 * done.usage.prompt_tokens
    assert added[("seeupo_cached_context_tokens_total",)] > 0  # the stream's prompt
    assert added[("seeupo_sampled_tokens_total",)] == 2 * done.usage.completion_tokens
    assert added[("seeupo_first_text_seconds_count",)] == 1
    assert added[("seeupo_answer_seconds_count",)] == 2
    assert httpx.get(f"{address}/metrics").status_code == 401


@pytest.mark.usefixtures("one_device")
def test_evaluate_plays_with_it_by_messages_as_with_the_policy_itself(
    client, tmp_path, monkeypatch
):
    monkeypatch.setenv("THE_KEY", KEY)
    where = (QUICKSTART, f"--workdir={tmp_path}", *SMALL)
    tasks = ("--config.evaluation.tasks=6", "--greedy", "--config.rollout.concurrency=2")
    url = str(client.base_url)
    asked = (f"--server={url}", "--server_key_variable=THE_KEY", "--config.model.path=/no/model")
    evaluate(["", *where, *tasks, *asked])
    own = (f"--config.model.path={BASE}", "--untrained", f"--json={tmp_path}/own.json")
    evaluate(["", *where, *tasks, *own])
    (served,) = json.loads((tmp_path / "own.json").read_text())["others"]
    both = [(tmp_path / "evaluation").glob(f"*{name}.jsonl") for name in ("order_desk", "ion0")]
    played = []
    for (file,) in both:
        lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        played.append({line["task_id"]: (line["messages"], line["score"]) for line in lines})
    assert played[0] == played[1] and len(played[0]) == 6
    assert (served["server"], served["model"]) == (url, "order_desk")


def test_a_signal_ends_it_cleanly(served, client):
    process, _ = served
    client.chat.completions.create(model="order_desk", messages=ASKED)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert re.fullmatch(r"Stopped by SIGTERM; calls: .*\d+ answered.*\.\n", out)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step, wanted", [("latest", 2), ("best", 1), ("1", 1)])
def test_the_checkpoint_that_is_meant_is_served(tmp_path, step, wanted):
    config = from_dict({"model": {"path": BASE}})
    made, params = build.load_policy(config, BASE)
    checkpoints, saved = Checkpoints(tmp_path / "checkpoints", keep=2), {}
    for number, score in ((1, 0.9), (2, 0.5)):
        params = jax.tree.map(lambda leaf: leaf + 0.25, params)
        state = TrainState(params, optax.adam(1e-3).init(params), jnp.int32(0), jnp.int32(0))
        checkpoints.save(number, state, {}, score)
        saved[number] = checksum(made.merged(params))
    checkpoints.close()
    with serve._load(config, serve._Source(tmp_path, step, None)) as source:
        assert source.iteration == wanted and checksum(source.params) == saved[wanted]


def test_weights_that_the_run_does_not_have_are_not_served(tmp_path):
    config = from_dict({"model": {"path": BASE}})
    with pytest.raises(ValueError, match="^--weights: got 'ema'; allowed: trained, since"):
        with serve._load(config, serve._Source(tmp_path, "latest", "ema")):
            pass


def test_flags_replace_what_the_configuration_says():
    def choose(*flags, config="quickstart"):
        given = serve._flags().read([f"--config={CONFIGS / config}.py", *flags])
        return serve._choose(read_config(given), given)[0]

    config = choose(f"--model={BASE}", "--temperature=0.5", "--ignore_sampling")
    assert (config.rollout.temperature, config.agent.ignore_sampling) == (0.5, True)
    assert choose().rollout.temperature == 1.0 and not choose().agent.ignore_sampling
    config = choose("--model=mine", config="order_desk_warm_start")
    assert config.model.path == "mine" and config.warm_start.stages == ()


class Begun(SlotEngine):
    """Compiles nothing, and keeps what it began with."""

    def __init__(self):
        self.began = None

    def compile(self, params, between):
        pass

    def begin(self, params, **numbers):
        self.began = numbers


def test_a_server_begins_with_the_configured_seed_and_form_of_tool_calls():
    config = from_dict({"seed": 7, "agent": {"tool_format": "llama", "thoughts": "field"}})
    policy = SimpleNamespace(engine=Begun(), params=None, tokenizer=NumberTokenizer())
    form = resolve_form(config.agent, policy.tokenizer)
    assert form == AnswerForm(choose_format("llama"), thoughts_apart=True)
    serving = serve._begin(config, policy, form, SimpleNamespace(asked=False))
    assert policy.engine.began == {"seed": 7, "version": 0}
    assert serving._form is form


def test_an_address_that_other_machines_reach_is_warned_of(caplog):
    config = from_dict({"model": {"path": BASE}})
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        serve._check(config, serve._Source(None, None, None), host, 0)
    (warning,) = caplog.messages
    assert warning.startswith("warning: --host=0.0.0.0: whoever reaches this machine and has the")


def refusal(capsys, *arguments):
    """The sentence with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


REFUSED = {
    "--temperature: got '-1'; allowed: 0, which takes the likeliest": ["--temperature=-1"],
    "--temperature: got '0.001'; allowed: 0, which": ["--temperature=0.001"],
    "--weight_updates: got 'missing'; allowed: a folder that is there": [
        "--weight_updates=missing"
    ],
    "--step: got 'best'; allowed: with --workdir": ["--step=best"],
    "--weights: got 'ema'; allowed: with --workdir": ["--weights=ema"],
    "--model: got 'x' with --workdir; allowed: one of the two": ["--model=x", "--workdir=runs"],
    "--workdir: got .*, which is not there; allowed: the folder of a run, or --model=FOLDER to": [
        "--workdir=no_such"
    ],
    "--port: got 8000 at 203.0.113.7, which cannot be had": ["--host=203.0.113.7"],
    "model path: got 'no_such'; allowed: a folder .*, package:NAME, or OWNER/NAME": [
        "--model=no_such",
        "--port=0",
    ],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_mistake_is_one_sentence_before_anything_is_loaded(capsys, sentence):
    error = refusal(capsys, QUICKSTART, *REFUSED[sentence])
    assert re.match(f"error: {sentence}", error)
    assert error.count("\n") == 1


def test_a_configuration_without_a_model_needs_one(capsys):
    error = refusal(capsys, f"--config={CONFIGS / 'order_desk_warm_start.py'}")
    assert error.startswith("error: --workdir: got none; allowed: the folder of a run, or --model")


@pytest.mark.parametrize("key", [" ", "a b", "ends\n"])
def test_a_port_that_is_taken_and_a_key_that_cannot_be_sent_are_refused(capsys, monkeypatch, key):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port: got {port} at 127.0.0.1" in refusal(capsys, QUICKSTART, f"--port={port}")
    monkeypatch.setitem(os.environ, KEY_VARIABLE, key)
    error = refusal(capsys, QUICKSTART, "--port=0")
    assert error.startswith(f"error: {KEY_VARIABLE}: got a key that is empty or has a space")
