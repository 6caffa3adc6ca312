"""Trains and samples by Tinker's own SDK; runs in third_party/tinker/.venv, prints what it saw."""

import json
import math
import os
import sys

import httpx
import numpy as np
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2

TOKENS = list(range(5, 17))
# After which the likeliest answer of the bundled policy has an end token: 575 21 56 519 5.
CASE = [2, 653, 838, 21, 56, 863, 795, 838, 67, 620, 838, 892, 885, 53, 796, 703, 5, 3]


def prompt(tokens):
    return types.ModelInput.from_ints(tokens)


def picture():
    return types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=11)])


def datum(tokens, **inputs):
    given = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    targets = {"target_tokens": np.asarray(tokens[1:], np.int64)}
    return types.Datum(model_input=prompt(tokens[:-1]), loss_fn_inputs={**targets, **given})


def sequence(sampler, tokens, **params):
    settings = types.SamplingParams(max_tokens=6, **params)
    return (
        sampler.sample(prompt(tokens), num_samples=2, sampling_params=settings).result().sequences
    )


def logprobs(run, data, loss="cross_entropy", config=None):
    found = run.forward(data, loss, config).result()
    return [each["logprobs"].tolist() for each in found.loss_fn_outputs], found.metrics


def main() -> None:
    service = tinker.ServiceClient()
    (served,) = tinker.RestClient().get_server_capabilities().result().supported_models
    name = served.model_name
    first = service.create_lora_training_client(base_model=name, rank=4, seed=1).result()
    second = service.create_lora_training_client(base_model=name, rank=8, seed=2).result()
    saw = {"context": served.max_context_length, "rank": second.get_info().lora_rank}

    weighted = [datum(TOKENS, weights=[1.0] * 11)]
    before, metrics = logprobs(first, weighted)
    saw["loss_is_the_sum"] = math.isclose(metrics["loss:sum"], -sum(before[0]), rel_tol=1e-5)
    pending = [
        future
        for _ in range(3)
        for future in (
            first.forward_backward(weighted, "cross_entropy"),
            first.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
    ]
    saw["losses"] = [future.result().metrics["loss:sum"] for future in pending[::2]]
    after, _ = logprobs(first, weighted)
    saw["after"] = after[0]
    other, _ = logprobs(second, weighted)
    saw["runs_are_apart"] = np.allclose(before, other, atol=1e-4) and after != before

    sampler = first.save_weights_and_get_sampling_client().result()
    drawn = sequence(sampler, TOKENS[:5], seed=3)
    again = sequence(sampler, TOKENS[:5], seed=3)
    saw["a_seed_repeats"] = [a.tokens == b.tokens for a, b in zip(drawn, again, strict=True)]
    whole = TOKENS[:5] + drawn[0].tokens
    (scored,), _ = logprobs(first, [datum(whole)])
    saw["gap"] = float(np.abs(np.subtract(scored[4:], drawn[0].logprobs)).max())
    base = service.create_sampling_client(base_model=name).result()
    ends, goes_on = (sequence(base, CASE, temperature=0.0, stop=stop)[0] for stop in (None, []))
    saw["ends"] = [ends.stop_reason, goes_on.stop_reason, goes_on.tokens[:5] == ends.tokens]
    prompt_logp = sampler.compute_logprobs(prompt(whole)).result()
    saw["first_is_none"] = prompt_logp[0] is None
    saw["prompt_gap"] = float(np.abs(np.subtract(scored, prompt_logp[1:])).max())
    cut = sequence(sampler, TOKENS[:5], seed=3, stop=[drawn[0].tokens[2]])[0]
    stopped = drawn[0].tokens.index(drawn[0].tokens[2]) + 1
    saw["stops"] = cut.tokens == drawn[0].tokens[:stopped] and cut.stop_reason == "stop"

    q = [0.0] * 4 + drawn[0].logprobs
    advantages = [0.0] * 4 + [1.0, -1.0, 0.5, 2.0, -0.5, 1.0][: len(drawn[0].tokens)]
    sampled = [datum(whole, logprobs=np.subtract(q, 0.3), advantages=advantages)]
    saw["rl"] = {
        loss: logprobs(first, sampled, loss, config)[1]["loss:sum"]
        for loss, config in (
            ("importance_sampling", None),
            ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        )
    }
    ratio = np.exp(np.subtract(scored, np.subtract(q, 0.3)))
    clipped = np.clip(ratio, 0.9, 1.1)
    saw["expected"] = {
        "importance_sampling": float(-(ratio * advantages).sum()),
        "ppo": float(-np.minimum(ratio * advantages, clipped * np.array(advantages)).sum()),
    }

    path = first.save_state("one").result().path
    loaded = service.create_training_client_from_state_with_optimizer(path).result()
    without = service.create_training_client_from_state(path).result()
    saw["loaded"] = logprobs(loaded, weighted)[0] == after
    moved = [step(run, weighted) for run in (first, loaded, without)]
    saw["its_moments_too"] = moved[0] == moved[1]
    saw["and_only_then"] = not np.allclose(moved[0], moved[2], atol=1e-3)
    first.load_state(path).result()
    saw["taken_back"] = logprobs(first, weighted)[0] == after
    later = first.save_weights_for_sampler("for-later").result().path
    saw["saved"] = later.split("/")[-2:]
    of_saved = sequence(service.create_sampling_client(later).result(), TOKENS[:5], seed=3)
    saw["saved_samples"] = [a.tokens == b.tokens for a, b in zip(drawn, of_saved, strict=True)]
    saw["path"], saw["drawn"] = path, [each.tokens for each in drawn]
    saw["norms"] = norms(service, name, weighted)
    print(json.dumps(saw))


def step(run, data):
    """The log-probabilities after one step."""
    run.forward_backward(data, "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return logprobs(run, data)[0]


def weighted_sum(logprobs, weights):
    return -(logprobs * weights).sum(), {}


def norms(service, name, data):
    """Of the gradient of a loss at the server, and of the same ones in PyTorch at the client."""
    ranks, found = {"logprobs": 1, "weights": 1}, []
    created = service.create_custom_loss(weighted_sum, input_ranks=ranks).result()
    passes = (
        lambda run: run.forward_backward(data, "cross_entropy"),
        lambda run: run.forward_backward_custom(data, lambda _, logp: (-logp[0].sum(), {})),
        lambda run: run.forward_backward_custom(data, created),
    )
    for accumulate in passes:
        run = service.create_lora_training_client(base_model=name, rank=4, seed=5).result()
        accumulate(run).result()
        stepped = run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        found.append(stepped.metrics["grad_norm"])
    return found


def resume(path: str) -> None:
    """After the server was killed: from what was saved, with another session."""
    service = tinker.ServiceClient()
    run = service.create_training_client_from_state_with_optimizer(path).result()
    sampler = service.create_sampling_client(path).result()
    tokens = [each.tokens for each in sequence(sampler, TOKENS[:5], seed=3)]
    found, _ = logprobs(run, [datum(TOKENS, weights=[1.0] * 11)])
    print(json.dumps({"drawn": tokens, "logprobs": found[0]}))


def mistakes() -> None:
    """What the SDK raises for requests that cannot be done, and whether the next one is."""
    service = tinker.ServiceClient()
    (served,) = tinker.RestClient().get_server_capabilities().result().supported_models
    name, good = served.model_name, [datum(TOKENS, weights=[1.0] * 11)]
    run = service.create_lora_training_client(base_model=name, rank=4).result()
    sampler = service.create_sampling_client(base_model=name).result()

    def work(*data, loss="cross_entropy", config=None):
        return lambda: run.forward_backward(list(data), loss, config).result()

    asked = {
        "model": lambda: service.create_lora_training_client("another/model").result(),
        "rank": lambda: service.create_lora_training_client(name, rank=1000).result(),
        "sampled": lambda: service.create_sampling_client(base_model="another/model").result(),
        "shape": work(datum(TOKENS, weights=[1.0] * 3)),
        "token": work(datum([5, 10**6, 7])),
        "negative token": work(datum([5, -1, 7])),
        "length": work(datum([5] * 300)),
        "input": work(datum(TOKENS), loss="ppo"),
        "loss": work(*good, loss="dro"),
        "option": work(*good, config={"beta": 1.0}),
        "step": lambda: run.optim_step(types.AdamParams()).result(),
        "prompt": lambda: sequence(sampler, [5, 10**6]),
        "weights": lambda: run.load_state("tinker://session-1:train:0/weights/none").result(),
        "saved name": lambda: run.save_state("../outside").result(),
        "none": work(),
        "no number": work(
            datum(TOKENS, logprobs=[0.0] * 11, advantages=[math.nan] * 11), loss="ppo"
        ),
        "image": work(types.Datum(model_input=picture(), loss_fn_inputs=good[0].loss_fn_inputs)),
        "external": lambda: run.save_weights_external("one").result(),
        "optimizer": lambda: service.create_lora_training_client(
            name, optimizer=types.DimuonOptimizerConfig()
        ).result(),
        "its step": lambda: run.optim_step(types.DimuonParams(learning_rate=1e-3)).result(),
        "alternatives": lambda: sampler.sample(
            prompt(TOKENS), 1, types.SamplingParams(), prompt_alt_tokens_k=2
        ).result(),
        "sessions": lambda: tinker.RestClient().list_sessions().result(),
    }
    saw = {what: told(ask) for what, ask in asked.items()}
    saw["trains"] = len(logprobs(run, good)[0][0])
    saw["samples"] = len(sequence(sampler, TOKENS[:5]))
    finish(run.model_id.split(":")[0])
    saw["ended run"], saw["ended sampler"] = told(work(*good)), told(asked["prompt"])
    saw["ended session"] = told(lambda: service.create_lora_training_client(name).result())
    another = tinker.ServiceClient().create_sampling_client(base_model=name).result()
    saw["samples of another"] = len(sequence(another, TOKENS[:5]))
    print(json.dumps(saw))


def told(ask):
    """The kind and the text of what the SDK raises."""
    try:
        return ["nothing", str(ask())]
    except (tinker.TinkerError, ValueError) as error:
        return [type(error).__name__, str(error)]


def finish(session: str) -> None:
    """Ends a session as another process of its user may."""
    address = f"{os.environ['TINKER_BASE_URL']}/api/v1/sessions/{session}/finish"
    httpx.post(address, headers={"X-API-Key": os.environ["TINKER_API_KEY"]}).raise_for_status()


def schema() -> None:
    """The fields of the SDK's messages: their numbers and types."""
    found = {}
    for name, message in tinker_public_pb2.DESCRIPTOR.message_types_by_name.items():
        found[name] = {each.name: [each.number, each.type] for each in message.fields}
    print(json.dumps(found))


if __name__ == "__main__":
    {"main": main, "resume": resume, "mistakes": mistakes, "schema": schema}[sys.argv[1]](
        *sys.argv[2:]
    )
