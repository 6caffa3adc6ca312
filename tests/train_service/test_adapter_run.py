"""A run against PyTorch's AdamW and NumPy, and what its requests are refused for."""

import jax
import numpy as np
import pytest
import torch
from places import CONFIGS

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.policy.network import hidden, join_params
from seeupo_jax.policy_io import build
from seeupo_jax.train_service.adam import Adam
from seeupo_jax.train_service.adapter_run import AdapterRun, adapters_for
from seeupo_jax.train_service.messages import Datum, ForwardBackward
from seeupo_jax.train_service.refusals import RequestRefused
from seeupo_jax.train_service.saved_weights import SavedWeights
from seeupo_jax.train_service.serving import base_policy

RUN = "session-1:train:0"
SETTINGS = Adam(1e-2, 0.9, 0.95, 1e-8, 0.1, 0.0)


@pytest.fixture(scope="module")
def base():
    config = load_config(CONFIGS / "quickstart.py")
    made, params = build.load_policy(config, "package:order_desk")
    with jax.set_mesh(made.mesh):
        yield base_policy(config, made, params)


def new_run(base, rank=4):
    lora = adapters_for(base.network.arch, rank, attention=True, feed_forward=True)
    return AdapterRun(base, lora, seed=1)


def datum(first, length, **inputs):
    tokens = np.arange(first, first + length + 1, dtype=np.int32)
    given = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64), **given})


def asked(*data, loss="cross_entropy", forward_only=False, **options):
    return ForwardBackward(data, loss, options, forward_only)


def leaves(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def test_log_probabilities_are_the_softmaxs_whatever_else_is_in_the_pass(base):
    run = new_run(base)
    data = [datum(5, 12), datum(7, 3), datum(40, 30)]
    found = run.forward_backward(asked(*data, forward_only=True))
    params = join_params(run.state.params, run.policy.frozen)
    arch = run.network.arch
    for each, logp in zip(data, found.outputs["logprobs"], strict=True):
        rows = np.tile(each.tokens, (jax.device_count(), 1))
        states, _ = jax.jit(hidden, static_argnums=0)(run.network, params, rows)
        head = np.asarray(run.network.bind(params).head_VD(arch.dtype), np.float64)
        logits = np.asarray(states[0], np.float64) @ head.T
        logits[:, arch.unassigned_V()] = -np.inf
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        targets = each.inputs["target_tokens"]
        np.testing.assert_allclose(logp, expected[np.arange(len(targets)), targets], atol=2e-3)


def test_gradients_of_requests_add_up_until_the_step_which_is_pytorchs_adamw(base):
    run, together = new_run(base), new_run(base)
    first, second = datum(5, 12), datum(7, 3, weights=[0, 1, 2])
    theirs = [torch.tensor(x, requires_grad=True) for x in leaves(run.state.params)]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(theirs, **settings)
    for _ in range(2):
        run.forward_backward(asked(first))
        run.forward_backward(asked(second))
        together.forward_backward(asked(second, first))
        for own, other in zip(leaves(run._gradient), leaves(together._gradient), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-3)
        for tensor, gradient in zip(theirs, leaves(run._gradient), strict=True):
            tensor.grad = torch.tensor(gradient)
        optimizer.step()
        run.step(SETTINGS)
        together.step(SETTINGS)
        for own, tensor in zip(leaves(run.state.params), theirs, strict=True):
            np.testing.assert_allclose(own, tensor.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_a_step_needs_a_gradient_and_a_forward_pass_leaves_none(base):
    run = new_run(base)
    run.forward_backward(asked(datum(5, 4), forward_only=True))
    with pytest.raises(RequestRefused, match="^optim_step: got no gradient; allowed: after"):
        run.step(SETTINGS)


def test_what_is_saved_goes_on_as_if_it_had_not_been_interrupted(base, tmp_path):
    saved = SavedWeights(tmp_path, base, tmp_path)
    run = new_run(base)
    run.forward_backward(asked(datum(5, 12)))
    run.step(SETTINGS)
    path = saved.save(run, RUN, "weights", "one", {"lora_rank": 4}, overwrite=False)
    assert path == f"tinker://{RUN}/weights/one"
    other = saved.load(saved.find(path), optimizer=True)
    assert other.lora == run.lora
    for each in (run, other):
        each.forward_backward(asked(datum(9, 8)))
        each.step(SETTINGS)
    for own, loaded in zip(leaves(run.state), leaves(other.state), strict=True):
        np.testing.assert_array_equal(own, loaded)
    with pytest.raises(RequestRefused, match="^path: got 'one', which this run has"):
        saved.check_name(RUN, "weights", "one")
    with pytest.raises(
        RequestRefused, match="^path: got 'tinker://nothing'; allowed: tinker://RUN"
    ):
        saved.find("tinker://nothing")


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (asked(datum(5, 4), loss="gspo"), "loss_fn: got 'gspo'; allowed: cross_entropy, "),
        (asked(), "data: got none; allowed: one datum or more."),
        (asked(datum(5, 200)), r"data\[0\]: got 200 tokens; allowed: 1 to 128."),
        (asked(datum(5, 4), beta=1.0), "loss_fn_config: got 'beta'; allowed for cross_entropy: no"),
        (asked(datum(5, 4), loss="ppo"), r"data\[0\].advantages: got none; allowed for ppo: targ"),
        (asked(datum(5, 4, mask=[1] * 4)), r"data\[0\].mask: got some; allowed for cross_entropy"),
        (asked(datum(5, 4, weights=[1])), r"data\[0\].weights: got 1 numbers; allowed: 4, one a "),
        (asked(datum(5, 2, weights=[1, np.nan])), r"data\[0\].weights: got a number that is not"),
        (asked(datum(10**6, 4)), r"data\[0\].model_input: got the token 1000000; allowed: 0 to "),
    ],
)
def test_bad_data_is_refused_before_anything_is_computed(base, request_, sentence):
    with pytest.raises(RequestRefused, match=f"^{sentence}"):
        new_run(base).forward_backward(request_)


def test_adapters_are_in_what_is_to_train(base):
    arch = base.network.arch
    attention = adapters_for(arch, 2, attention=True, feed_forward=False)
    assert (attention.rank, attention.scale) == (2, 16.0)
    assert not {"gate_proj", "up_proj", "down_proj"} & {*attention.targets}
    with pytest.raises(RequestRefused, match="^lora_config: got neither train_attn nor train_mlp"):
        adapters_for(arch, 2, attention=False, feed_forward=False)
