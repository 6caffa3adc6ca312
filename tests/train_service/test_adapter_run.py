"""A run against PEFT's model and PyTorch's AdamW, and what its requests are refused for."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from loss_twins import LOSS_TWINS
from places import CONFIGS
from safetensors.numpy import load_file

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.policy.files.weights import resolve_path
from seeupo_jax.policy.lora import save_adapters
from seeupo_jax.policy_io import build
from seeupo_jax.train_service.adam import Adam
from seeupo_jax.train_service.adapter_run import AdapterRun, adapters_for
from seeupo_jax.train_service.build_service import base_policy
from seeupo_jax.train_service.refusals import RequestRefused
from seeupo_jax.train_service.saved_weights import SavedWeights
from seeupo_jax.train_service.tinker_messages import Datum, ForwardBackward

# PEFT 0.21 reads a name that transformers 5.23 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

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


def randomise(run, scale=0.1):
    """Adapters that have an effect; new ones have none."""
    rng = np.random.default_rng(3)
    run.load(
        jax.tree.map(lambda x: x.at[:].set(scale * rng.normal(size=x.shape)), run.state.params)
    )


def in_peft(run, tree, folder, tmp_path):
    """A tree of adapters, or of their gradient, by PEFT's names."""
    save_adapters(run.network.bind(run.policy.merged(tree)), tmp_path / folder, tmp_path)
    tensors = load_file(tmp_path / folder / "adapter_model.safetensors")
    return {name.replace(".weight", ".default.weight"): x for name, x in tensors.items()}


@pytest.fixture
def twin(base, tmp_path):
    """A run, and the same adapters on the same model in PyTorch, by PEFT."""
    run = new_run(base)
    randomise(run)
    folder = Path(resolve_path("package:order_desk"))
    in_peft(run, run.state.params, "start", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = importlib.import_module("peft")
    return run, peft.PeftModel.from_pretrained(model, tmp_path / "start", is_trainable=True)


def sampled(first, length):
    """A datum with what the losses of reinforcement learning need."""
    rng = np.random.default_rng(first)
    q, advantages = rng.normal(-6, 2, length), rng.normal(size=length)
    return datum(first, length, logprobs=q, advantages=advantages)


def twin_logp(run, model, data):
    """log p of the targets of each datum."""
    unassigned = torch.tensor(run.network.arch.unassigned_V())
    found = []
    for each in data:
        logits = model(torch.tensor(each.tokens[None].astype(np.int64))).logits[0]
        logits = logits.masked_fill(unassigned, -torch.inf)
        targets = torch.tensor(each.inputs["target_tokens"])[:, None]
        found.append(logits.log_softmax(-1).gather(1, targets)[:, 0])
    return found


def twin_loss(run, model, loss, data):
    logp = twin_logp(run, model, data)
    inputs = [{k: torch.tensor(v) for k, v in each.inputs.items()} for each in data]
    if loss == "cross_entropy":
        inputs = [
            {"weights": torch.ones(len(each.tokens)), **x}
            for each, x in zip(data, inputs, strict=True)
        ]
    return logp, sum(LOSS_TWINS[loss](p, x, 0.8, 1.2) for p, x in zip(logp, inputs, strict=True))


def check_gradient(run, model, tmp_path, name):
    expected = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    found = in_peft(run, run.gradient, name, tmp_path)
    assert found.keys() == expected.keys() and len(found) == 2 * 7 * 3  # A and B, layers
    for key, gradient in found.items():
        wanted = expected[key].numpy()
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.sampled("cross_entropy", "ppo")
@pytest.mark.parametrize("loss", LOSS_TWINS)
def test_losses_and_gradients_are_those_of_pefts_model(twin, tmp_path, loss):
    run, model = twin
    weights = [0.0, 1.0, 2.0]
    data = [sampled(5, 12), sampled(7, 3), sampled(40, 30)]
    if loss == "cross_entropy":
        data = [datum(5, 12), datum(7, 3, weights=weights), datum(40, 30)]
    found = run.forward_backward(asked(*data, loss=loss))
    logp, expected = twin_loss(run, model, loss, data)
    expected.backward()
    for own, wanted in zip(found.outputs["logprobs"], logp, strict=True):
        np.testing.assert_allclose(own, wanted.detach().numpy(), atol=1e-4)
    assert found.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
    each = [values.sum() for values in found.outputs["elementwise_loss"]]
    assert sum(each) == pytest.approx(expected.item(), rel=1e-4)
    check_gradient(run, model, tmp_path, loss)


def test_gradients_of_two_requests_add_up_and_steps_are_pytorchs_adamw_and_clip(twin, tmp_path):
    run, model = twin
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    wanted = {k: p for k, p in model.named_parameters() if p.requires_grad}
    passes = {"cross_entropy": [datum(5, 12)], "ppo": [sampled(7, 9), sampled(40, 30)]}
    for number, (rate, clip) in enumerate(((1e-2, 0.5), (3e-3, 0.0))):
        for loss, data in passes.items():
            run.forward_backward(asked(*data, loss=loss))
            twin_loss(run, model, loss, data)[1].backward()
        check_gradient(run, model, tmp_path, f"gradient-{number}")
        # As a small gradient's rounding would move a step of Adam, whose first one is its sign.
        for key, gradient in in_peft(run, run.gradient, f"taken-{number}", tmp_path).items():
            wanted[key].grad = torch.tensor(gradient)
        norm = torch.nn.utils.clip_grad_norm_(wanted.values(), clip or torch.inf)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        metrics = run.step(Adam(rate, 0.9, 0.95, 1e-8, 0.1, clip))
        assert metrics == {"grad_norm": pytest.approx(norm.item(), rel=1e-4), "update_skipped": 0.0}
        assert norm > 0.5 and run.gradient is None
        for key, own in in_peft(run, run.state.params, f"step-{number}", tmp_path).items():
            np.testing.assert_allclose(own, wanted[key].detach().numpy(), rtol=1e-4, atol=1e-6)


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
        (
            asked(sampled(5, 4), loss="ppo", clip_low_threshold=np.nan),
            "loss_fn_config.clip_low_threshold: got nan; allowed: a finite number.",
        ),
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
