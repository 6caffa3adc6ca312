"""The service as Tinker's SDK reaches it, which is in an environment of its own."""

import json

import pytest
from google.protobuf.descriptor import FieldDescriptor
from places import ROOT, SUPPORT
from tinker_cases import Server, needs_sdk, run_client

from seeupo_jax.train_service.message_schema import ForwardBackwardRequest


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("service") / "saved"


@pytest.fixture(scope="module")
def server(workdir):
    made = Server(workdir)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def saw(server):
    """What the SDK saw in two runs side by side."""
    return client(server, "main")


def client(server, *arguments):
    printed = run_client(server, SUPPORT / "tinker_client.py", *arguments)
    return json.loads(printed.splitlines()[-1])


@needs_sdk
def test_fields_of_messages_have_the_sdks_numbers_and_types(server):
    theirs = client(server, "schema")
    own = ForwardBackwardRequest.DESCRIPTOR.file.message_types_by_name
    assert len(own) == 13
    for name, message in own.items():
        for field in message.fields:
            number, kind = theirs[name][field.name]
            kind = FieldDescriptor.TYPE_INT32 if kind == FieldDescriptor.TYPE_ENUM else kind
            assert (field.number, field.type) == (number, kind), (name, field.name)


@needs_sdk
def test_the_pages_example_runs(server, tmp_path):
    page = (ROOT / "docs" / "training_service.md").read_text(encoding="utf-8")
    program = tmp_path / "example.py"
    program.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    metrics, sequences = run_client(server, program).splitlines()[-2:]
    assert "loss:sum" in metrics and "grad_norm" in metrics
    assert [1 <= len(tokens) <= 8 for tokens in json.loads(sequences)] == [True, True]


@needs_sdk
def test_runs_side_by_side_train_each_its_own_adapters(saw):
    assert (saw["context"], saw["rank"]) == (128, 8)
    assert saw["loss_is_the_sum"] and saw["runs_are_apart"]
    assert saw["losses"] == sorted(saw["losses"], reverse=True)
    assert saw["losses"][-1] < 0.7 * saw["losses"][0]


@needs_sdk
def test_what_is_sampled_has_the_log_probabilities_of_a_pass(saw):
    assert max(saw["gap"], saw["prompt_gap"]) < 2e-5 and saw["first_is_none"]
    assert saw["a_seed_repeats"] == [True, True] and saw["stops"]
    assert saw["ends"] == ["stop", "length", True]


@needs_sdk
def test_losses_are_numpys_and_those_of_the_client_have_the_same_gradient(saw):
    assert saw["rl"] == pytest.approx(saw["expected"], rel=1e-5)
    assert saw["norms"] == pytest.approx(saw["norms"][:1] * 3, rel=1e-4) and saw["norms"][0] > 1


@needs_sdk
def test_saved_weights_continue_with_their_optimizers_state_or_without(saw):
    assert saw["loaded"] and saw["its_moments_too"] and saw["and_only_then"]
    assert saw["taken_back"]


@needs_sdk
def test_saved_weights_are_sampled_from(saw):
    assert saw["saved"] == ["sampler_weights", "for-later"]
    assert saw["saved_samples"] == [True, True]


TOLD = {
    "model": ("NotFoundError", "base_model: got 'another/model'; allowed: the served one, '"),
    "sampled": ("NotFoundError", "base_model: got 'another/model'; allowed: the served one, '"),
    "rank": ("BadRequestError", "lora_config.rank: got 1000; allowed: a whole number from 1 to"),
    "shape": ("RequestFailedError", "data[0].weights: got 3 numbers; allowed: 11, one a token."),
    "token": ("RequestFailedError", "data[0].model_input: got the token 1000000; allowed: 0 to"),
    "negative token": ("RequestFailedError", "data[0].model_input: got the token -1; allowed: 0"),
    "length": ("RequestFailedError", "data[0]: got 299 tokens; allowed: 1 to 128."),
    "input": ("RequestFailedError", "data[0].advantages: got none; allowed for ppo: target_tok"),
    "loss": ("RequestFailedError", "loss_fn: got 'dro'; allowed: cross_entropy, importance_sam"),
    "option": ("RequestFailedError", "loss_fn_config: got 'beta'; allowed for cross_entropy: no"),
    "step": ("RequestFailedError", "optim_step: got no gradient; allowed: after forward_backw"),
    "prompt": ("RequestFailedError", "prompt: got the token 1000000; allowed: the tokenizer's."),
    "weights": ("RequestFailedError", "path: got 'tinker://session-1:train:0/weights/none'; all"),
    "saved name": ("RequestFailedError", "path: got '../outside'; allowed: up to 200 letters,"),
    "none": ("ValueError", "No data provided"),  # by the SDK itself
    "no number": ("RequestFailedError", "data[0].advantages: got a number that is not finite; al"),
    "image": ("RequestFailedError", "data[0].model_input: got an image or sound; allowed: tokens"),
    "external": ("RequestFailedError", "save_weights_external: got a request; allowed: save_wei"),
    "optimizer": ("BadRequestError", "optimizer_config: got 'dimuon'; allowed: adamw."),
    "its step": ("RequestFailedError", "optimizer_params: got 'dimuon'; allowed: adamw."),
    "alternatives": ("BadRequestError", "asample: got 'prompt_alt_tokens_k'; allowed: sampling_"),
    "sessions": ("NotFoundError", "the address: got GET /api/v1/sessions, which this server doe"),
    "ended run": ("NotFoundError", "which is not known (any more); allowed: a run of an open s"),
    "ended sampler": ("NotFoundError", "sampling_session_id: got 'sampler-"),
    "ended session": ("APIStatusError", "which is not known (any more); allowed: an open one."),
}


@needs_sdk
def test_mistakes_are_told_to_their_client_and_the_next_requests_are_done(server):
    told = client(server, "mistakes")
    assert [told.pop(what) for what in ("trains", "samples", "samples of another")] == [11, 2, 2]
    assert {what: kind for what, (kind, _) in told.items()} == {k: v[0] for k, v in TOLD.items()}
    assert not [what for what, (_, sentence) in TOLD.items() if sentence not in told[what][1]]


@needs_sdk
def test_a_server_that_is_started_after_a_kill_continues_from_what_was_saved(server, workdir, saw):
    server.kill()
    another = Server(workdir)
    try:
        resumed = client(another, "resume", saw["path"])
    finally:
        another.kill()
    assert (resumed["drawn"], resumed["logprobs"]) == (saw["drawn"], saw["after"])
