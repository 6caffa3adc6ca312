"""Trains and samples by Tinker's own SDK; runs in third_party/tinker/.venv, prints what it saw."""

import json
import math
import sys

import numpy as np
import tinker
from tinker import types

TOKENS = list(range(5, 17))


def datum(tokens, **inputs):
    given = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    targets = {"target_tokens": np.asarray(tokens[1:], np.int64)}
    prompt = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=prompt, loss_fn_inputs={**targets, **given})


def sequence(sampler, tokens, **params):
    prompt = types.ModelInput.from_ints(tokens)
    settings = types.SamplingParams(max_tokens=6, **params)
    return sampler.sample(prompt, num_samples=2, sampling_params=settings).result().sequences


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
    other, _ = logprobs(second, weighted)
    saw["runs_are_apart"] = np.allclose(before, other, atol=1e-4) and after != before

    sampler = first.save_weights_and_get_sampling_client().result()
    drawn = sequence(sampler, TOKENS[:5], seed=3)
    again = sequence(sampler, TOKENS[:5], seed=3)
    saw["a_seed_repeats"] = [a.tokens == b.tokens for a, b in zip(drawn, again, strict=True)]
    whole = TOKENS[:5] + drawn[0].tokens
    (scored,), _ = logprobs(first, [datum(whole)])
    saw["gap"] = float(np.abs(np.subtract(scored[4:], drawn[0].logprobs)).max())
    prompt_logp = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
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
    saw["loaded"] = np.allclose(logprobs(loaded, weighted)[0], after, atol=1e-5)
    saw["saved"] = first.save_weights_for_sampler("for-later").result().path.split("/")[-2:]
    saw["path"] = path
    try:
        first.forward_backward(weighted, "dro").result()
    except tinker.RequestFailedError as error:
        saw["refusal"] = [str(error.category), "loss_fn: got 'dro'; allowed:" in str(error)]
    print(json.dumps(saw))


def resume(path: str) -> None:
    """After the server was killed: from what was saved, with another session."""
    service = tinker.ServiceClient()
    run = service.create_training_client_from_state_with_optimizer(path).result()
    sampler = service.create_sampling_client(model_path=path).result()
    tokens = sequence(sampler, TOKENS[:5], seed=3)[0].tokens
    found, _ = logprobs(run, [datum(TOKENS, weights=[1.0] * 11)])
    print(json.dumps({"tokens": len(tokens), "logprobs": found[0]}))


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else resume(sys.argv[1])
