"""What `bench serving` measures with: clients that stream, fresh prompts, and generate."""

import argparse
import asyncio
import json
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import jax
import pytest
from agent_cases import ToldSession
from serving import running

from seeupo_jax import bench
from seeupo_jax.agents.answer_form import PLAIN_TEXT
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.endpoint import Endpoint
from seeupo_jax.benchmarks.settings import architecture, write_model
from seeupo_jax.instruments.bench.serving import generate_server, served_requests
from seeupo_jax.instruments.bench.serving.served_requests import ServedEndpoint, _Prompts, ask
from seeupo_jax.policy.files.weights import read_tokenizer

TOKENIZER = read_tokenizer("package:order_desk")


def test_clients_ask_every_prompt_once_and_count_what_was_sampled():
    endpoint, session = Endpoint(sampling=SamplingRules(1.0), model="x", form=PLAIN_TEXT), None
    endpoint.start()
    try:
        session = ToldSession()
        access = endpoint.open_key(session)
        prompts = ["one", "two and", "three and more"]
        done = ask(ServedEndpoint(access.base_url, access.api_key, "x"), 2, prompts, max_tokens=3)
        with pytest.raises(ValueError, match="a request failed with 401"):
            ask(ServedEndpoint(access.base_url, "wrong", "x"), 1, prompts, max_tokens=3)
    finally:
        endpoint.close()
    asked = sorted(call.messages[-1].content for call in session.calls)
    assert asked == sorted(prompts) and {call.max_tokens for call in session.calls} == {3}
    shortest, *others = sorted(done["requests"], key=lambda one: one["tokens"])
    assert [shortest["tokens"], *(one["tokens"] for one in others)] == [1, 3, 3]
    assert all(0 < one["first_s"] < done["seconds"] for one in others)
    assert shortest["first_s"] is None  # "one" in a piece is the prompt sent back, not an answer


class _Uncounted(BaseHTTPRequestHandler):
    """Streams one text, and no usage."""

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n')

    def log_message(self, *_):
        pass


def test_a_server_to_measure_against_is_asked_for_its_model(monkeypatch):
    endpoint = Endpoint(sampling=SamplingRules(1.0), model="x", form=PLAIN_TEXT)
    endpoint.start()
    try:
        monkeypatch.setenv("SEEUPO_API_KEY", endpoint.open_key(ToldSession()).api_key)
        reached = served_requests._reached(f"{endpoint.base_url}/", None)
        assert (reached.base_url, reached.model) == (endpoint.base_url, "x")
        assert served_requests._reached(endpoint.base_url, "y").model == "y"
        with pytest.raises(ValueError, match=r"^--against: got .*/models \(.*404.*; allowed: "):
            served_requests._reached(endpoint.base_url.removesuffix("/v1"), None)
    finally:
        endpoint.close()
    with pytest.raises(ValueError, match="^--against: got http.*allowed: the address of a server"):
        served_requests._reached(endpoint.base_url, None)


def test_a_server_that_counts_no_tokens_is_named():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Uncounted) as server, running(server):
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with pytest.raises(ValueError, match="has no usage; allowed: a server that counts"):
            ask(ServedEndpoint(url, "key", "x"), 1, ["one"], max_tokens=3)


def test_no_prompt_comes_twice_and_none_is_longer_than_was_planned():
    prompts = _Prompts(argparse.Namespace(seed=0, words=8, answer=4), TOKENIZER)
    taken = prompts.take(200)
    assert len(set(taken)) == 200
    lengths = [len(TOKENIZER.begin([{"role": "user", "content": p}], ()).tokens) for p in taken]
    assert max(lengths) + 4 <= prompts.longest


class _Answered:
    """A pool whose clients have answers already, by server."""

    def __init__(self, **answers):
        self._answers = {name: iter(each) for name, each in answers.items()}

    def submit(self, ask, server, *_):
        done = Future()
        done.set_result(next(self._answers[server]))
        return done


def test_the_rates_of_a_line_are_of_one_time_and_texts_that_never_came_are_a_dash(capsys):
    def answers(*seconds, first_s=0.1):
        each = {"first_s": first_s, "tokens": 32}
        return [{"seconds": s, "requests": [each] * 4} for s in seconds]

    def measured(**answered):
        given = argparse.Namespace(requests=4, repeats=3, answer=32, sample=False)
        prompts = argparse.Namespace(take=lambda count: ["x"] * count)
        servers = {name: name for name in answered}
        return served_requests._measure(servers, _Answered(**answered), 1, prompts, given)

    found = measured(a=answers(1.0, 2.0, 17.0), b=answers(1.0, 1.0, 1.0, first_s=None))
    slow, silent = found["contenders"].values()
    assert (slow["requests_per_second"], slow["tokens_per_second"]) == (4 / 2, 4 * 32 / 2)
    assert slow["tokens_per_request"] == 32 and slow["first_text_s"] == 0.1
    assert silent["first_text_s"] is found["first_text_ratio"] is None
    both = measured(a=answers(*[1.0] * 3), b=answers(*[1.0] * 3, first_s=0.4))
    assert both["first_text_ratio"] == pytest.approx(4.0)  # times sooner
    about = {"against": "b", "model": "x", "dtype": "float32", "prompt_words": 1}
    about |= {
        "answer_tokens": 32,
        "temperature": 0.0,
        "machine": {"device": "CPU"},
        "clients": {"1": found},
    }
    served_requests._print(about)
    printed = capsys.readouterr().out
    assert "-x sooner" in printed and "first text after - ms (at most -)" in printed


def test_a_server_that_neither_answers_nor_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(served_requests, "_START_S", 0.3)
    monkeypatch.setattr(served_requests, "_END_S", 0.1)
    serve = (
        "import signal, socket; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "s = socket.create_server(('127.0.0.1', {port})); signal.pause()"
    )
    with pytest.raises(ValueError, match="timeit: does not answer"):
        with served_requests._running(["timeit", "-n1", "-r1", serve]):
            pass


def test_generate_streams_every_token_and_counts_them(tmp_path):
    arch = architecture("nano", "float32")
    write_model(arch, tmp_path, TOKENIZER, seed=0)
    app = generate_server.build(str(tmp_path), "float32")
    body = {"messages": [{"role": "user", "content": "order"}], "max_tokens": 12}

    async def answered(**sampling):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/v1") as http:
            return (await http.post("/chat/completions", json=body | sampling)).text

    assert asyncio.run(answered(temperature=0.0)) == asyncio.run(answered(temperature=0.0))
    *events, done = [
        line.removeprefix("data: ") for line in asyncio.run(answered()).split("\n\n")[:-1]
    ]
    *texts, usage = map(json.loads, events)
    assert done == "[DONE]" and 1 <= usage["usage"]["completion_tokens"] <= 12
    pieces = [event["choices"][0]["delta"]["content"] for event in texts]
    assert 1 <= len(pieces) <= usage["usage"]["completion_tokens"] and all(pieces)


@pytest.mark.parametrize("flag", ["--clients=0", "--clients=1,x", "--answer=0"])
def test_a_wrong_setting_is_one_sentence(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["bench", "serving", flag])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flag.partition('=')[0]}: got ") and error.count("\n") == 1


def test_a_tpu_which_is_one_processs_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(SystemExit) as ended:
        bench.main(["bench", "serving"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: bench serving: got a TPU; allowed: ") and error.count("\n") == 1
