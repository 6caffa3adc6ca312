"""A server that is given other weights while it answers, by SGLang's and vLLM's requests."""

import concurrent.futures
import time

import httpx
import pytest
from update_cases import ACTION, PROMPT, check_logp, tokenizer, updated_server


@pytest.fixture
def server(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with updated_server(tmp_path) as made:
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
    assert (old, new, start, end) == ("default", "2", 0, len(answer["output_ids"]))
    assert begun == swapped and 0 < swapped < end
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
