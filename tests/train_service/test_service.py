"""The service by bare HTTP, as no SDK would call it: order, repetition, ends and odd bodies."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from tinker_cases import TOKENS, HttpClient, Server, pass_body, sample_body, step_body

from seeupo_jax.train_service.api import PROTOBUF
from seeupo_jax.train_service.message_schema import ForwardBackwardOutput, SampleResponse


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("service"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def client(server):
    with HttpClient(server) as made:
        yield made


def loss(result):
    """`loss:sum` of a pass."""
    return ForwardBackwardOutput.FromString(result.content).metrics["loss:sum"]


def test_requests_are_done_in_the_order_of_their_numbers_and_each_once(client):
    _, run = client.open_run()
    stepped = client.ask("optim_step", step_body(run, 2))  # before the pass whose gradient it takes
    after = client.ask("forward_backward", pass_body(run, 3))
    before = client.ask("forward_backward", pass_body(run, 1))
    again = client.ask("forward_backward", pass_body(run, 1))
    assert again.json() == before.json()
    assert client.wait(stepped).json()["metrics"]["grad_norm"] > 1
    assert loss(client.wait(after)) < loss(client.wait(before))
    sampler = {"model_id": run, "seq_id": 4, "sampling_session_seq_id": 0}
    name = client.wait(client.ask("save_weights_for_sampler", sampler)).json()[
        "sampling_session_id"
    ]
    body = {"sampling_session_id": name, **sample_body(3, max_tokens=4, seed=0)}
    sampled = client.wait(client.ask("asample", body))
    sequences = SampleResponse.FromString(sampled.content).sequences
    lengths = [(len(each.tokens) // 4, len(each.logprobs) // 4) for each in sequences]
    assert len(lengths) == 3 and all(1 <= a == b <= 4 for a, b in lengths)


def test_a_number_whose_turn_has_been_is_refused(client):
    """Such a request would wait for ever."""
    _, run = client.open_run()
    client.wait(client.ask("forward_backward", pass_body(run, 1)))
    for number in (0, -3):
        for path, body in (("optim_step", step_body), ("forward_backward", pass_body)):
            result = client.wait(client.ask(path, body(run, number))).json()
            assert result["error"] == f"seq_id: got {number}; allowed: 2 or later."
    refused = client.ask("optim_step", step_body(run, "2"))
    assert refused.json()["detail"] == "seq_id: got '2'; allowed: a whole number."
    assert client.wait(client.ask("optim_step", step_body(run, 2))).json()["metrics"]


def test_what_is_refused_in_its_turn_stops_no_later_request(client):
    _, run = client.open_run()
    waits = client.ask("forward_backward", pass_body(run, 4))
    told = [
        client.wait(client.ask(path, {"model_id": run, "seq_id": number})).json()["error"]
        for number, path in enumerate(("save_weights_external", "load_weights", "optim_step"), 1)
    ]
    assert told[0].startswith("save_weights_external: got a request; allowed: save_weights and")
    assert told[1].startswith("path: got 'None'; allowed: tinker://RUN/weights/NAME or")
    assert told[2] == "optim_step: got no adam_params; allowed: AdamW's."
    assert loss(client.wait(waits)) > 1


def test_two_clients_at_the_same_time_get_what_one_alone_gets(client, server):
    def train(own):
        _, run = own.open_run(seed=3)
        answers = []
        for number in range(1, 12, 2):
            answers.append(own.ask("forward_backward", pass_body(run, number)))
            own.ask("optim_step", step_body(run, number + 1))
        weights = {"model_id": run, "seq_id": 13}
        named = own.wait(own.ask("save_weights_for_sampler", weights)).json()
        body = sample_body(4, max_tokens=8, seed=5)
        body["sampling_session_id"] = named["sampling_session_id"]
        sampled = SampleResponse.FromString(own.wait(own.ask("asample", body)).content)
        drawn = [(each.tokens, each.logprobs) for each in sampled.sequences]
        return [loss(own.wait(each)) for each in answers], drawn

    alone, drawn = train(client)
    assert alone == sorted(alone, reverse=True) and alone[-1] < 0.8 * alone[0]
    with HttpClient(server) as other, ThreadPoolExecutor(2) as threads:
        found = [*threads.map(train, (client, other))]
    assert found == [(alone, drawn)] * 2


def test_clients_that_go_away_leave_the_others_alone(client, server):
    _, run = client.open_run()
    client.ask("optim_step", step_body(run, 5))  # and those before it never come
    host, port = server.url.removeprefix("http://").split(":")
    body = pass_body(run, 1)
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\n"
    head += f"Content-Type: {PROTOBUF}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body[:50])
    _, other = client.open_run()
    asked = client.ask("forward_backward", pass_body(other, 1))
    waits = client.ask("optim_step", step_body(other, 3)).json()  # for the number 2
    with pytest.raises(httpx.ReadTimeout):
        client.http.post("retrieve_future", json=waits, timeout=0.3)
    assert loss(client.wait(asked)) > 1
    client.ask("optim_step", step_body(other, 2))
    assert "error" in client.ask("retrieve_future", waits).json()  # no gradient, but an answer


def test_what_waits_for_an_earlier_request_ends_with_its_session(client):
    session, run = client.open_run()
    waits = client.ask("optim_step", step_body(run, 2))
    assert client.ask(f"sessions/{session}/finish", {}).status_code == 204
    result = client.wait(waits).json()
    assert result["category"] == "user"
    assert result["error"] == "session_id: got one that has ended; allowed: one that is open."
    assert client.ask("optim_step", step_body(run, 1)).status_code == 404
    assert client.ask("session_heartbeat", {"session_id": session}).status_code == 410


def test_weights_that_are_held_for_sampling_change_when_they_are_held_again(client):
    """Which they are twice before the next sample: the first of them are no longer anywhere."""
    _, run = client.open_run()
    body = sample_body(max_tokens=1) | {"prompt_logprobs": True}
    body["prompt"] = {"chunks": [{"tokens": TOKENS[:-1].tolist()}]}
    scores = []
    for number in range(1, 12, 3):
        client.ask("forward_backward", pass_body(run, number))
        client.ask("optim_step", step_body(run, number + 1))
        held = {"model_id": run, "seq_id": number + 2, "kind": "inflight"}
        name = client.wait(client.ask("save_weights_for_sampler", held)).json()[
            "sampling_session_id"
        ]
        if number in (1, 10):
            body["sampling_session_id"] = name
            sampled = client.wait(client.ask("asample", body))
            logp = SampleResponse.FromString(sampled.content).prompt_logprobs
            scores.append(np.frombuffer(logp, "<f4")[1:].sum())
    assert scores[1] > scores[0] + 1


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("create_session", b"no json", "the body: got no JSON object; allowed: one."),
        ("create_session", b"[]", "the body: got no JSON object; allowed: one."),
        (
            "forward_backward",
            b"\xff\xff",
            "the body: got 2 bytes that are damaged; allowed: a ",
        ),
        ("create_model", {}, "base_model: got None; allowed: the served one, '"),
        ("optim_step", {"model_id": 3}, "model_id: got '3', which is not known (any more)"),
        ("load_weights", {"session_id": "x", "path": 1}, "path: got '1'; allowed: tinker://RUN/"),
        (
            "asample",
            {"sampling_session_id": []},
            "sampling_session_id: got '[]', which is not known",
        ),
        ("asample", {"model_path": 1}, "path: got '1'; allowed: tinker://RUN/weights/NAME or"),
        ("asample", {"base_model": 1}, "base_model: got 1; allowed: the served one"),
        ("retrieve_future", {}, "request_id: got 'None', which is not known (any more)."),
        ("session_heartbeat", {"session_id": {}}, "session_id: got '{}', which is not known"),
    ],
    ids=str,
)
def test_an_odd_body_is_refused_in_a_sentence(client, path, body, sentence):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    form = {"Content-Type": PROTOBUF if path == "forward_backward" else "application/json"}
    refused = client.http.post(path, content=content, headers=form)
    assert 400 <= refused.status_code < 500
    assert refused.json()["detail"].startswith(sentence)


def test_options_that_are_none_of_adamws_or_of_sampling_are_refused(client):
    _, run = client.open_run()
    client.ask("forward_backward", pass_body(run, 1))
    steps = {
        "beta1: got 1; allowed: a number from 0 to 0.999999.": {"beta1": 1},
        "eps: got 0; allowed: a number from 1e-30 to 1.": {"eps": 0},
        "learning_rate: got '1'; allowed: a number from 0 to 1e+06.": {"learning_rate": "1"},
        "grad_clip_norm: got True; allowed: a number from -1e+30": {"grad_clip_norm": True},
    }
    for number, (sentence, adam) in enumerate(steps.items(), 2):
        result = client.wait(client.ask("optim_step", step_body(run, number, **adam))).json()
        assert result["error"].startswith(f"adam_params.{sentence}")
    other = {**step_body(run, 6, amsgrad=True)}
    error = client.wait(client.ask("optim_step", other)).json()["error"]
    assert error.startswith("adam_params: got 'amsgrad'; allowed: learning_rate, beta1, ")
    dimuon = {"model_id": run, "seq_id": 7, "optimizer_params": {"type": "dimuon"}}
    error = client.wait(client.ask("optim_step", dimuon)).json()["error"]
    assert error == "optimizer_params: got 'dimuon'; allowed: adamw."
    assert client.wait(client.ask("optim_step", step_body(run, 8))).json()["metrics"]
    base = {"base_model": client.model}
    for body, sentence in (
        (sample_body(min_p=0.1), "sampling_params: got 'min_p'; allowed: max_tokens, seed, stop, "),
        (sample_body(temperature=-1), "temperature: got -1; allowed: a number from 0 to 100."),
        (sample_body(stop=[1, "a"]), "stop: got [1, 'a']; allowed: text, a list of texts, or a "),
        (sample_body(0), "num_samples: got 0; allowed: a whole number from 1 to 1024."),
        (sample_body() | {"prompt_alt_tokens_k": 2}, "asample: got 'prompt_alt_tokens_k'; allow"),
        (sample_body() | {"prompt": {}}, "prompt: got no chunks; allowed: chunks of tokens."),
    ):
        refused = client.ask("asample", body | base)
        assert refused.status_code == 400 and refused.json()["detail"].startswith(sentence)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"dora": True}, "lora_config: got 'dora'; allowed: rank, seed, train_attn, train_mlp, "),
        ({"train_mlp": 0.5}, "lora_config.train_mlp: got 0.5; allowed: true and false."),
        ({"rank": 0}, "lora_config.rank: got 0; allowed: a whole number from 1 to 512."),
        ({"rank": "8"}, "lora_config.rank: got '8'; allowed: a whole number from 1 to 512."),
        ({"rank": 8, "seed": "x"}, "lora_config.seed: got 'x'; allowed: a whole number."),
        ({"rank": 8, "train_attn": False, "train_mlp": False}, "lora_config: got neither"),
    ],
)
def test_adapters_that_cannot_be_are_refused(client, lora, sentence):
    session = client.ask("create_session", {}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": client.model}
    refused = client.ask("create_model", body | {"lora_config": {"rank": 4, **lora}})
    assert refused.status_code == 400 and refused.json()["detail"].startswith(sentence)
