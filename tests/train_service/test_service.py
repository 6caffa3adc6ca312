"""The service by bare HTTP, as no SDK would call it: order, repetition, ends and odd bodies."""

import json

import httpx
import numpy as np
import pytest
from tinker_cases import KEY, Server

from seeupo_jax.train_service.api import PROTOBUF
from seeupo_jax.train_service.message_schema import (
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
)

TOKENS = np.arange(5, 17)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Posts a body to an address of the service."""
    server = Server(tmp_path_factory.mktemp("service"))
    headers = {"X-API-Key": KEY}
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers=headers, timeout=120) as http:

        def ask(path, body):
            if isinstance(body, bytes):
                return http.post(path, content=body, headers={"Content-Type": PROTOBUF})
            return http.post(path, json=body)

        ask.model = http.get("get_server_capabilities").json()["supported_models"][0]["model_name"]
        ask.http = http
        yield ask
    server.kill()


def wait(ask, answer):
    """The result of a request, once it is there."""
    asked = {"request_id": answer.json()["request_id"]}
    while (result := ask("retrieve_future", asked)).status_code == 408:
        pass
    return result


def open_run(ask, **lora):
    """A session and its only run."""
    session = ask("create_session", {"tags": []}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": ask.model}
    made = ask("create_model", body | {"lora_config": {"rank": 4, "seed": 1, **lora}})
    assert wait(ask, made).json()["model_id"] == made.json()["model_id"]
    return session, made.json()["model_id"]


def data(run, number):
    """A pass over one sequence by cross entropy."""
    message = ForwardBackwardRequest(model_id=run, seq_id=number, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = TOKENS[:-1].astype("<i4").tobytes()
    targets, weights = (datum.loss_fn_inputs[name] for name in ("target_tokens", "weights"))
    targets.dense, targets.dtype = TOKENS[1:].astype("<i8").tobytes(), 2
    weights.dense, weights.dtype = np.ones(11, "<f4").tobytes(), 1
    return message.SerializeToString()


def loss(result):
    """`loss:sum` of a pass."""
    return ForwardBackwardOutput.FromString(result.content).metrics["loss:sum"]


def step(run, number, rate=1e-2):
    return {"model_id": run, "seq_id": number, "adam_params": {"learning_rate": rate}}


def test_requests_are_done_in_the_order_of_their_numbers_and_each_once(ask):
    _, run = open_run(ask)
    stepped = ask("optim_step", step(run, 2))  # before the pass whose gradient it takes
    after = ask("forward_backward", data(run, 3))
    before = ask("forward_backward", data(run, 1))
    again = ask("forward_backward", data(run, 1))
    assert again.json() == before.json()
    assert wait(ask, stepped).json()["metrics"]["grad_norm"] > 1
    assert loss(wait(ask, after)) < loss(wait(ask, before))
    sampler = {"model_id": run, "seq_id": 4, "sampling_session_seq_id": 0}
    name = wait(ask, ask("save_weights_for_sampler", sampler)).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:5].tolist()}]}
    body = {"sampling_session_id": name, "num_samples": 3, "prompt": prompt}
    sampled = wait(ask, ask("asample", body | {"sampling_params": {"max_tokens": 4, "seed": 0}}))
    sequences = SampleResponse.FromString(sampled.content).sequences
    lengths = [(len(each.tokens) // 4, len(each.logprobs) // 4) for each in sequences]
    assert len(lengths) == 3 and all(1 <= a == b <= 4 for a, b in lengths)


def test_what_waits_for_an_earlier_request_ends_with_its_session(ask):
    session, run = open_run(ask)
    waits = ask("optim_step", step(run, 2))
    assert ask(f"sessions/{session}/finish", {}).status_code == 204
    result = wait(ask, waits).json()
    assert result["category"] == "user"
    assert result["error"] == "session_id: got one that has ended; allowed: one that is open."
    assert ask("optim_step", step(run, 1)).status_code == 404
    assert ask("session_heartbeat", {"session_id": session}).status_code == 410


def test_weights_that_are_held_for_sampling_change_when_they_are_held_again(ask):
    """Which they are twice before the next sample: the first of them are no longer anywhere."""
    _, run = open_run(ask)
    prompt = {"chunks": [{"tokens": TOKENS[:-1].tolist()}]}
    body = {"num_samples": 1, "prompt": prompt, "prompt_logprobs": True}
    scores = []
    for number in range(1, 12, 3):
        ask("forward_backward", data(run, number))
        ask("optim_step", step(run, number + 1))
        held = {"model_id": run, "seq_id": number + 2, "kind": "inflight"}
        name = wait(ask, ask("save_weights_for_sampler", held)).json()["sampling_session_id"]
        if number in (1, 10):
            body |= {"sampling_session_id": name, "sampling_params": {"max_tokens": 1}}
            sampled = wait(ask, ask("asample", body))
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
def test_an_odd_body_is_refused_in_a_sentence(ask, path, body, sentence):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    form = {"Content-Type": PROTOBUF if path == "forward_backward" else "application/json"}
    refused = ask.http.post(path, content=content, headers=form)
    assert 400 <= refused.status_code < 500
    assert refused.json()["detail"].startswith(sentence)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"rank": 0}, "lora_config.rank: got 0; allowed: a whole number from 1 to 512."),
        ({"rank": "8"}, "lora_config.rank: got '8'; allowed: a whole number from 1 to 512."),
        ({"rank": 8, "seed": "x"}, "lora_config.seed: got 'x'; allowed: a whole number."),
        ({"rank": 8, "train_attn": False, "train_mlp": False}, "lora_config: got neither"),
    ],
)
def test_adapters_that_cannot_be_are_refused(ask, lora, sentence):
    session = ask("create_session", {}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": ask.model}
    refused = ask("create_model", body | {"lora_config": lora})
    assert refused.status_code == 400 and refused.json()["detail"].startswith(sentence)
