"""Steps with losses of routers and with selection biases, however their tokens lie in rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import optax
import pytest
import torch
import transformers
from flax import nnx
from stored_fields import with_fields
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from seeupo_jax.algorithms.expert_options import ExpertBalance
from seeupo_jax.configuration import schema
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.imitation.imitation_batches import pack
from seeupo_jax.learner.imitation.imitation_step import Imitation
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.architecture import Moe
from seeupo_jax.policy.files.parameter_names import leaf_at, stored_parameters
from seeupo_jax.policy.network import compute, split_model
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.types import Segment, TrainState

EXPERTS, EACH = 5, 2
BIASED = Moe(
    EXPERTS,
    EACH,
    mlp_width=12,
    normalize=True,
    dense_layers=(0,),
    scores="sigmoid",
    selection_bias=True,
)
PLAIN = dataclasses.replace(BIASED, scores="softmax", selection_bias=False)
LOSSES = ExpertBalance(balance_coef=0.3, z_coef=0.05)
RATE = 0.01


def keep_gradients():
    """An optimizer that moves nothing, and whose state is the last gradient."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(zeros, lambda grads, state, params: (zeros(grads), grads))


KEEP = keep_gradients()


@functools.cache
def policy(moe, scan=False):
    moe = dataclasses.replace(moe, dense_layers=()) if scan else moe
    arch = dataclasses.replace(cases.ARCH, layers=2, moe=moe, scan_layers=scan)
    network, params = split_model(Transformer(arch, nnx.Rngs(0)))
    return network, cases.jittered(params, 0.2)


def segments(count=5, vocab=50):
    """Conversations without a common beginning, so that each token is computed once."""
    rng = np.random.default_rng(2)
    made = []
    for number in range(count):
        length = int(rng.integers(6, 20))
        tokens_L = rng.integers(1, vocab, length).astype(np.int32)
        tokens_L[0] = number
        turn_L = np.where(np.arange(length) < 3, -1, 0).astype(np.int32)
        made.append(Segment(tokens_L, turn_L, np.zeros(length, np.float32)))
    return made


def sft_step(network, params, shown, balance, *, lengths=(24,), rows=1, share=True):
    shapes = Shapes(lengths, action=24, rows=rows, trajectories=len(shown), share=share)
    packed = pack([[each] for each in shown], shapes, network.arch.routing)
    zero = jnp.zeros((), jnp.int32)
    params = jax.tree.map(jnp.array, params)
    state = TrainState(params, KEEP.init(params), zero, zero + 0)
    after, metrics = Imitation(network, KEEP, balance=balance).step(state, packed.rows)
    return cases.host(after), {name: float(x) for name, x in metrics.items()}, packed


def torch_step(model, shown):
    """The losses and the gradients of a mean negative log-likelihood with those of the routers."""
    nll, routers, count = 0.0, [], 0
    for each in shown:
        ids = torch.tensor(each.tokens_L.astype(np.int64))[None]
        out = model(ids, output_router_logits=True)
        logp = torch.log_softmax(out.logits[0, :-1], dim=-1)[range(ids.shape[1] - 1), ids[0, 1:]]
        trained = torch.tensor(each.turn_L[1:] >= 0)
        nll, count = nll - logp[trained].sum(), count + int(trained.sum())
        routers.append(out.router_logits)
    by_layer = [torch.cat(parts) for parts in zip(*routers, strict=True)]
    balance = sum(load_balancing_loss_func((x,), EXPERTS, EACH) for x in by_layer) / len(by_layer)
    z = sum((torch.logsumexp(x, dim=1) ** 2).mean() for x in by_layer) / len(by_layer)
    (nll / count + LOSSES.balance_coef * balance + LOSSES.z_coef * z).backward()
    losses = {"loss": nll / count, "balance_loss": balance, "router_z_loss": z}
    return {name: x.item() for name, x in losses.items()}


def test_a_supervised_steps_losses_and_gradients_are_those_of_pytorch(tmp_path):
    torch.manual_seed(0)
    values = transformers.AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=40,
        num_experts=EXPERTS,
        num_experts_per_tok=EACH,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    )
    reference = transformers.AutoModelForCausalLM.from_config(values, dtype=torch.float32)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(tmp_path)
    network, params = split_model(from_pretrained(tmp_path, dtype="float32")[0])
    after, metrics, packed = sft_step(network, params, segments(), LOSSES)
    assert int(packed.rows.microbatches) > 2
    wanted = torch_step(reference.eval(), segments())
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    torch_grads = {name: x.grad.numpy() for name, x in reference.named_parameters()}
    compared = 0
    for stored in stored_parameters(network.arch, params):
        grad = leaf_at(after.opt_state, stored.path)
        if stored.grouped:
            continue
        wanted = torch_grads[stored.names[0]]
        grad = grad.T if stored.transposed else grad
        assert np.abs(grad - wanted).max() <= 1e-4 * np.abs(wanted).max(), stored.names[0]
        compared += 1
    assert compared == 21  # both routers among them


@pytest.mark.exhaustive
@pytest.mark.parametrize("moe", [PLAIN, BIASED], ids=["softmax", "sigmoid"])
def test_how_conversations_lie_in_rows_changes_neither_losses_nor_gradients(moe):
    network, params = policy(moe)
    shown = segments(vocab=cases.ARCH.vocab_size)
    one, metrics, packed = sft_step(network, params, shown, LOSSES, lengths=(96,), rows=2)
    assert int(packed.rows.microbatches) == 1
    for layout in ({}, {"rows": 2}, {"lengths": (32,), "share": False}):
        other, found, packed = sft_step(network, params, shown, LOSSES, **layout)
        assert int(packed.rows.microbatches) > 1
        assert found == pytest.approx(metrics, rel=1e-5)
        cases.assert_trees_close(other.opt_state, one.opt_state, 2e-6)
    without, plain, _ = sft_step(network, params, shown, ExpertBalance(), lengths=(96,), rows=2)
    assert plain.keys() == metrics.keys() - {"balance_loss", "router_z_loss"}
    assert plain["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), without.opt_state, one.opt_state)
    assert max(jax.tree.leaves(gaps)) > 1e-3


@functools.partial(jax.jit, static_argnums=0)
def routed(network, params, row_1L):
    return compute(network, params, row_1L).routed_NLG


def loads(network, params, shown):
    """Tokens of each expert of each layer that has any, by passes over one sequence at a time."""
    routing = network.arch.routing
    load_YE = np.zeros((routing.layers, routing.experts))
    for each in shown:
        length = len(each.tokens_L)
        row_1L = np.pad(each.tokens_L, (0, 24 - length))[None]
        routed_G = np.asarray(routed(network, params, row_1L))[0, :length]
        chosen_YX = routed_G.reshape(-1, routing.layers, routing.per_token).swapaxes(0, 1)
        for row_E, chosen_X in zip(load_YE, chosen_YX.reshape(routing.layers, -1), strict=True):
            row_E += np.bincount(chosen_X, minlength=routing.experts)
    return load_YE


def biases(params, scan=False):
    layers = params["layers"]
    if scan:
        return np.asarray(layers["mlp"]["selection_bias"])
    sparse = (layers[i]["mlp"] for i in sorted(layers) if "selection_bias" in layers[i]["mlp"])
    return np.stack([each["selection_bias"] for each in sparse])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scan", [False, True])
def test_a_step_moves_biases_by_the_sign_of_what_an_expert_has_less_than_the_mean(scan):
    network, params = policy(BIASED, scan)
    shown = segments(vocab=cases.ARCH.vocab_size)
    after, _, _ = sft_step(network, params, shown, ExpertBalance(bias_rate=RATE))
    load_YE = loads(network, params, shown)
    assert load_YE.sum() == len(load_YE) * EACH * sum(len(each.tokens_L) for each in shown)
    wanted = biases(params, scan) + RATE * np.sign(load_YE.mean(1, keepdims=True) - load_YE)
    np.testing.assert_allclose(biases(after.params, scan), wanted, rtol=1e-6)
    still, _, _ = sft_step(network, params, shown, LOSSES)
    np.testing.assert_array_equal(biases(still.params, scan), biases(params, scan))


@pytest.mark.exhaustive
def test_biases_even_out_the_load():
    network, params = policy(BIASED)
    shown = segments(vocab=cases.ARCH.vocab_size)

    def spread(params):
        load_YE = loads(network, params, shown)
        return (load_YE.max(1) / load_YE.mean(1)).mean()

    before, state = spread(params), None
    for _ in range(40):
        state, _, _ = sft_step(network, params, shown, ExpertBalance(bias_rate=0.02))
        params = state.params
    assert spread(params) < 1 + 0.6 * (before - 1)


def learner(balance, shapes=cases.SHAPES, optimizer=None, **choices):
    optimizer = optax.sgd(0.3) if optimizer is None else optimizer
    made = schema.Algorithm(**choices)
    return Learner(policy(BIASED)[0], optimizer, made, shapes, 1.0, seed=5, balance=balance)


def run(made, **more):
    params = policy(BIASED)[1]
    state, reference = cases.new_state(made.optimizer, params), jax.device_put(params)
    found = sweep(made, state, reference, cases.branching(), iteration=3, **more)
    return cases.host(found.train.params), found.metrics


@pytest.mark.exhaustive
def test_a_sweeps_steps_have_the_losses_of_routers_however_tokens_lie_in_rows():
    params, metrics = run(learner(LOSSES))
    assert metrics["sweep/balance_loss"] > 0.9 * EACH and metrics["sweep/router_z_loss"] > 0
    other, found = run(learner(LOSSES, dataclasses.replace(cases.SHAPES, lengths=(48,), rows=1)))
    cases.assert_trees_close(other, params, 2e-5)
    for name in ("sweep/balance_loss", "sweep/router_z_loss", "sweep/loss"):
        assert found[name] == pytest.approx(metrics[name], rel=1e-4)
    without, plain = run(learner(ExpertBalance()))
    assert "sweep/balance_loss" not in plain
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), without, params)
    assert max(jax.tree.leaves(gaps)) > 1e-3


@pytest.mark.exhaustive
def test_losses_of_routers_do_not_depend_on_how_the_objective_is_averaged():
    """The denominator of the policy's loss does not divide them."""
    still = {"scale": "none", "kl_coef": 0.0, "optimizer": KEEP}
    alike = [with_fields(t, reward=1.0) for t in cases.branching()]  # no advantage
    grads = []
    for aggregation in ("action", "token"):
        made = learner(LOSSES, loss_aggregation=aggregation, **still)
        params = policy(BIASED)[1]
        state, reference = cases.new_state(KEEP, params), jax.device_put(params)
        found = sweep(made, state, reference, alike, iteration=3)
        grads.append(cases.host(found.train.opt_state))
    cases.assert_trees_close(*grads, 1e-6)
    assert max(np.abs(x).max() for x in jax.tree.leaves(grads[0])) > 1e-3


@pytest.mark.exhaustive
def test_a_sweep_steps_biases_once_a_step_and_resumes_with_the_same_bits():
    balance, optimizer = ExpertBalance(bias_rate=RATE), cases.recording("sgd", 0.3)
    made = learner(balance, optimizer=optimizer)
    wanted, metrics = run(made)
    moved = np.abs(biases(wanted) - biases(policy(BIASED)[1])) / RATE
    assert moved.max() <= metrics["sweep/steps"] + 1e-3
    np.testing.assert_allclose(moved, np.round(moved), atol=1e-3)
    assert moved.any()
    asked = iter([False, False])
    with pytest.raises(SweepStopped) as stopped:
        run(made, stop=lambda: next(asked, True))
    arrays = cases.reread(stopped.value.arrays)
    again = sweep(
        made,
        arrays["state"],
        jax.device_put(policy(BIASED)[1]),
        cases.branching(),
        iteration=3,
        resume=(arrays, stopped.value.notes),
    )
    cases.assert_trees_equal(cases.host(again.train.params), wanted)


def test_a_step_that_is_skipped_moves_no_bias():
    network, params = policy(BIASED)
    bad = jax.tree.map(np.array, params)
    bad["norm"]["scale"][0] = np.nan
    shown = segments(vocab=cases.ARCH.vocab_size)
    after, metrics, _ = sft_step(network, bad, shown, ExpertBalance(bias_rate=RATE))
    assert metrics["update_skipped"] == 1
    np.testing.assert_array_equal(biases(after.params), biases(params))


@pytest.mark.exhaustive
def test_weight_decay_moves_no_bias():
    network, params = policy(BIASED)
    shown = segments(vocab=cases.ARCH.vocab_size)
    shapes = Shapes((24,), action=24, rows=1, trajectories=len(shown))
    packed = pack([[each] for each in shown], shapes, network.arch.routing)
    decay = optax.adamw(0.1, weight_decay=0.5)
    after, _ = Imitation(network, decay).step(cases.new_state(decay, params), packed.rows)
    np.testing.assert_array_equal(biases(cases.host(after.params)), biases(params))
    assert np.abs(np.asarray(after.params["norm"]["scale"]) - params["norm"]["scale"]).max() > 0.01
