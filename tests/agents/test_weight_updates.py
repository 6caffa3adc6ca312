"""A server that is given other weights while it answers, by SGLang's and vLLM's requests."""

import concurrent.futures
import contextlib
import functools
import threading
import time

import httpx
import jax
import numpy as np
import openai_cases
import pytest
from flax import nnx
from rollout_cases import stir

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.endpoint import Endpoint
from seeupo_jax.agents.serving import ServingSession
from seeupo_jax.agents.weight_updates import WeightUpdates
from seeupo_jax.configuration import schema
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

ACTION, CONTEXT = 192, 256
FORM = AnswerForm(TOOL_FORMATS["hermes"])
PROMPT = [5, 6, 7, 8]


@functools.cache
def tokenizer():
    return read_tokenizer("package:order_desk")


@functools.cache
def network():
    """A network, and the parameters of two policies that hardly ever end an answer."""
    sizes = openai_cases.SIZES | {"vocab_size": tokenizer().vocab_size}
    arch = Architecture(**sizes, mlp_width=24, rope=Rope(theta=100.0))
    made, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    first = stir(params)
    second = jax.tree.map(lambda x: -x if x.ndim == 1 else x, first)
    return made, first, second


@functools.cache
def logits_LV(number):
    made, *params = network()
    return openai_cases.logits_of(made, params[number], CONTEXT)


class Server:
    """A server of the first policy; folders `first` and `second` below its root are the two."""

    def __init__(self, root, base_url, key):
        self.root, self.url = root, base_url.removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=self.url, headers=self.headers, timeout=60)

    @property
    def open_calls(self):
        return int(
            float(self._http.get("/metrics").text.split("seeupo_open_calls ")[-1].split()[0])
        )

    def close(self):
        self._http.close()

    def post(self, path, body=None, code=200):
        answer = self._http.post(path, json=body)
        assert answer.status_code == code, answer.text
        return answer.json()

    def get(self, path):
        return self._http.get(path).json()

    def generate(self, tokens=ACTION, **params):
        body = {"input_ids": PROMPT, "return_logprob": True}
        params = {"max_new_tokens": tokens, "temperature": 1.0} | params
        return self.post("/generate", body | {"sampling_params": params})


@pytest.fixture
def server(tmp_path):
    made, first, second = network()
    rollout = schema.Rollout(
        tasks=1, group_size=4, max_action_tokens=ACTION, max_context=CONTEXT, page_size=16
    )
    engine = SlotEngine(
        made,
        Sampling(1.0, None, None, ACTION, tokenizer().end_ids),
        plan_cache(made.arch, rollout),
        steps=1,
        few=True,
        per_turn=True,
    )
    engine.begin(first, seed=1, version=0)
    limits = {"max_action_tokens": ACTION, "max_context": CONTEXT}
    serving = ServingSession(engine, tokenizer(), FORM, **limits)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()

    def load(folder):
        if folder.name not in ("first", "second"):
            raise ValueError(f"{folder}: got no policy; allowed: first or second.")
        return second if folder.name == "second" else first

    updates = WeightUpdates(serving, tmp_path, load, on_swap="keep", model_path="first")
    rules = SamplingRules(1.0, serves=True, constrains=True)
    endpoint = Endpoint(
        sampling=rules,
        model="m",
        form=FORM,
        metrics=serving.metrics.text,
        controls=updates.controls,
    )
    thread = threading.Thread(target=serving.run)
    with contextlib.ExitStack() as stack:
        thread.start()
        stack.callback(thread.join, 30)
        stack.callback(serving.stop)
        endpoint.start()
        stack.callback(endpoint.close)
        access = endpoint.open_key(serving)
        made = Server(tmp_path, access.base_url, access.api_key)
        stack.callback(made.close)
        yield made


@pytest.fixture
def aside():
    """Runs requests in other threads."""
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        yield threads.submit


def wait_until_busy(server, aside):
    """A request that is answered while others are asked; returns once it has some tokens."""
    waiting = aside(server.generate)
    while not server.open_calls:
        assert not waiting.done()
    time.sleep(0.02)
    return waiting


def spans(answer):
    return [tuple(span.values()) for span in answer["meta_info"]["weight_versions"]]


def check_logp(answer, number, first=0, last=None):
    """Log-probabilities are those of one of the two policies."""
    tokens = answer["output_ids"]
    logp_LV = logits_LV(number)([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    logp_LV = logp_LV - np.logaddexp.reduce(logp_LV, axis=-1, keepdims=True)
    wanted = logp_LV[np.arange(len(tokens)), tokens][first:last]
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == tokens
    np.testing.assert_allclose([entry[0] for entry in entries][first:last], wanted, atol=1e-4)


def test_an_answer_names_the_weights_that_sampled_it(server):
    before = server.generate(8)
    assert spans(before) == [("default", 0, len(before["output_ids"]))]
    check_logp(before, 0)
    update = {"model_path": "second", "weight_version": "12"}
    assert server.post("/update_weights_from_disk", update)["success"] is True
    after = server.generate(8)
    assert after["meta_info"]["weight_version"] == "12"
    check_logp(after, 1)
    assert server.get("/model_info")["weight_version"] == "12"
    assert server.get("/weight_info") == {"weight_version": "12"}


def test_vllms_requests_pause_reload_name_and_resume(server):
    assert server.get("/is_paused") == {"is_paused": False}
    assert server.post("/pause?mode=wait") == {"status": "paused"}
    assert server.get("/is_paused") == {"is_paused": True}
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(server.root / "second")}}
    server.post("/collective_rpc", reload)
    server.post("/reset_prefix_cache")
    server.post("/update_weight_version", {"new_version": "3"})
    assert server.post("/resume") == {"status": "resumed"}
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 6, "logprobs": 0}
    answer = server.post("/v1/completions", body | {"return_token_ids": True})
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert answer["metadata"]["weight_version"] == "3"
    entries = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
    about = {"output_token_logprobs": [list(entry) for entry in entries]}
    check_logp({"output_ids": choice["token_ids"], "meta_info": about}, 1)


def test_ids_of_tokens_are_named_in_log_probabilities_and_in_chat_completions(server):
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "logprobs": 0}
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = server.post("/v1/completions", body | more)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body)
    asked = list(tokenizer().begin(messages, ()).tokens)
    assert answer["prompt_token_ids"] == asked
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]


def test_an_update_waits_for_the_answers_under_way_and_holds_later_ones(server, aside):
    waiting = wait_until_busy(server, aside)
    update = aside(server.post, "/update_weights_from_disk", {"model_path": "second"})
    time.sleep(0.1)
    held = aside(server.generate, 4)
    first, last = waiting.result(), held.result()
    assert update.result()["success"] is True
    assert first["meta_info"]["weight_version"] == "default"
    assert last["meta_info"]["weight_version"] == "second"
    assert len(first["output_ids"]) == ACTION
    check_logp(first, 0)


def test_calls_that_stand_still_go_on_with_the_new_weights(server, aside):
    waiting = wait_until_busy(server, aside)
    server.post("/pause_generation", {"mode": "in_place"})
    held = aside(server.generate, 4)
    time.sleep(0.3)
    assert not waiting.done() and not held.done()
    server.post("/update_weights_from_disk", {"model_path": "second", "weight_version": "2"})
    server.post("/continue_generation", {})
    answer = waiting.result()
    (old, start, swapped), (new, begun, end) = spans(answer)
    assert (old, new, start, end) == ("default", "2", 0, ACTION)
    assert begun == swapped and 0 < swapped < ACTION
    check_logp(answer, 0, last=swapped)
    assert held.result()["meta_info"]["weight_version"] == "2"


@pytest.mark.parametrize(
    "pause", [("/pause?mode=abort", None), ("/pause_generation", {"mode": "abort"})]
)
def test_an_abort_ends_calls_with_the_tokens_that_they_have(server, aside, pause):
    waiting = wait_until_busy(server, aside)
    server.post(*pause)
    answer = waiting.result(10)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < ACTION
    check_logp(answer, 0)
    held = aside(server.generate, 4)
    time.sleep(0.3)
    assert not held.done()
    server.post("/resume")
    assert held.result()["meta_info"]["finish_reason"]["type"] in ("length", "stop")


def test_an_aborting_update_is_not_held_up(server, aside):
    waiting = wait_until_busy(server, aside)
    update = {"model_path": "second", "abort_all_requests": True, "keep_pause": True}
    server.post("/update_weights_from_disk", update)
    assert waiting.result(10)["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.get("/is_paused") == {"is_paused": True}


def test_a_folder_that_cannot_be_read_leaves_the_weights_and_the_calls(server, aside):
    waiting = wait_until_busy(server, aside)
    (server.root / "damaged").mkdir()
    refused = server.post("/update_weights_from_disk", {"model_path": "damaged"}, code=400)
    assert refused["success"] is False
    assert refused["message"].endswith("Version 'default' is served on.")
    answer = waiting.result()
    assert len(answer["output_ids"]) == ACTION
    check_logp(answer, 0)


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "", "\0"])
def test_folders_outside_are_refused(server, path):
    refused = server.post("/update_weights_from_disk", {"model_path": path}, code=403)
    assert "allowed: a folder below" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/pause?mode=freeze", None, "allowed: abort, wait, keep"),
        (
            "/pause_generation",
            {"mode": "retract"},
            "got 'retract' with config.rollout.on_swap=keep",
        ),
        ("/collective_rpc", {"method": "sleep"}, "got 'sleep'; allowed: reload_weights"),
        ("/update_weights_from_disk", {}, "model_path: is missing"),
        ("/update_weights_from_disk", {"model_path": "first", "load_format": "pt"}, "safetensors"),
    ],
)
def test_what_there_is_none_of_is_refused_by_its_field(server, path, body, sentence):
    assert sentence in server.post(path, body, code=400)["error"]["message"]


def test_tensors_over_connections_are_refused_by_name(server):
    refused = server.post("/update_weights", {"update_info": {}}, code=404)
    assert "/update_weights_from_disk" in refused["error"]["message"]


def test_the_key_is_needed(server):
    assert httpx.post(f"{server.url}/pause").status_code == 401


def test_a_waiting_client_that_leaves_is_forgotten(server, aside):
    server.post("/pause?mode=keep")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.5) as other:
        other.post(f"{server.url}/generate", json=body, headers=server.headers)
    time.sleep(1.5)
    server.post("/resume")
    assert server.generate(4)["meta_info"]["weight_version"] == "default"
