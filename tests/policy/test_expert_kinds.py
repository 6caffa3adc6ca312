"""Routers and experts of published families compute what their PyTorch modules compute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy import moe
from seeupo_jax.policy.architecture import Architecture, Moe
from seeupo_jax.policy.moe import Experts
from seeupo_jax.policy.transformer import Mlp

D, F, E, P, SHARED = 12, 20, 8, 3, 10

SIGMOID = Moe(E, P, F, normalize=True, scores="sigmoid", scale=2.5, selection_bias=True)
GROUPED = dataclasses.replace(SIGMOID, groups=4, groups_per_token=2, shared_width=2 * F)
KINDS = {
    "qwen2_moe": Moe(E, P, F, normalize=False, shared_width=SHARED, shared_gate=True),
    "mixtral": Moe(E, P, F, normalize=True),
    "deepseek_v3": GROUPED,
    "deepseek_v3, weights as they are": dataclasses.replace(GROUPED, normalize=False, groups=2),
    # A limit that a good part of the values reach.
    "gpt_oss": Moe(E, P, F, normalize=True, biases=True, swiglu_limit=0.7),
}
SIZES = {"hidden_size": D, "num_experts_per_tok": P, "moe_intermediate_size": F}


def torch_block(kind):
    """The module of transformers, with random parameters, and their names here."""
    family, of = kind.partition(",")[0], KINDS[kind]
    more = {
        "qwen2_moe": {"num_experts": E, "shared_expert_intermediate_size": SHARED},
        "mixtral": {"num_local_experts": E, "intermediate_size": F},
        "gpt_oss": {"num_local_experts": E, "intermediate_size": F, "swiglu_limit": 0.7},
        "deepseek_v3": {
            "n_routed_experts": E,
            "n_shared_experts": 2,
            "n_group": of.groups,
            "topk_group": of.groups_per_token,
            "routed_scaling_factor": of.scale,
        },
    }[family]
    settings = transformers.AutoConfig.for_model(
        family, **SIZES, **more, norm_topk_prob=of.normalize, experts_implementation="eager"
    )
    block = {
        "qwen2_moe": Qwen2MoeSparseMoeBlock,
        "mixtral": MixtralSparseMoeBlock,
        "gpt_oss": GptOssMLP,
        "deepseek_v3": DeepseekV3MoE,
    }[family](settings)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in [*block.named_parameters(), *block.named_buffers()]:
            small = name.endswith(("bias", "proj_bias"))
            size = 0.3 if small else x.shape[-1] ** -0.5
            x.copy_(torch.randn(x.shape, generator=draw) * size)
    return block.eval()


def named_here(kind, tensors):
    """Tensors of a block, by the paths of our parameters and in their orientation."""
    named = {name: x.detach().numpy() for name, x in tensors.items()}
    gate_up, down = named.pop("experts.gate_up_proj"), named.pop("experts.down_proj")
    if kind == "gpt_oss":
        bias = named.pop("experts.gate_up_proj_bias")
        return {
            "router": named["router.weight"].T,
            "router_bias": named["router.bias"],
            "gate": gate_up[..., ::2],
            "up": gate_up[..., 1::2],
            "down": down,
            "gate_bias": bias[:, ::2],
            "up_bias": bias[:, 1::2],
            "down_bias": named["experts.down_proj_bias"],
        }
    gate, up = np.split(gate_up.swapaxes(1, 2), 2, axis=2)
    here = {"router": named.pop("gate.weight").T, "gate": gate, "up": up}
    here["down"] = down.swapaxes(1, 2)
    if "gate.e_score_correction_bias" in named:
        here["selection_bias"] = named.pop("gate.e_score_correction_bias")
    if "shared_expert_gate.weight" in named:
        here["shared_gate"] = named.pop("shared_expert_gate.weight").T
    for name, x in named.items():  # of the expert that all tokens use
        _, part, _ = name.split(".")
        here.setdefault("shared", {})[part.removesuffix("_proj")] = {"kernel": x.T}
    return here


@functools.cache
def graph(kind):
    of = KINDS[kind]

    def make():
        rngs, shared = nnx.Rngs(0), None
        if of.shared_width:
            arch = Architecture(8, D, 1, 1, 1, 4, of.shared_width)
            shared = Mlp(arch, 0, rngs, gain=1.0)
        return Experts(D, of, rngs, gain=1.0, shared=shared)

    return nnx.split(nnx.eval_shape(make))[0]


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_grads(graph, params, x_NLD):
    def loss(params, x_NLD):
        y_NLD, routed = nnx.merge(graph, nnx.State(params))(x_NLD)
        direction = jnp.cos(jnp.arange(y_NLD.size, dtype=jnp.float32)).reshape(y_NLD.shape)
        return (y_NLD * direction).sum(), (y_NLD, routed)

    grads, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x_NLD)
    return results, grads


def tokens(rows=4, length=6):
    drawn = np.random.default_rng(0).normal(size=(rows, length, D))
    return drawn.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_gradients_and_choices_are_those_of_transformers(kind):
    block = torch_block(kind)
    x_NLD = tokens()
    params = named_here(kind, dict(block.state_dict()))
    (got, routed), (grads, x_grad) = outputs_and_grads(graph(kind), params, x_NLD)
    x = torch.tensor(x_NLD, requires_grad=True)
    wanted = block(x)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)
    direction = torch.cos(torch.arange(wanted.numel(), dtype=torch.float32))
    (wanted * direction.reshape(wanted.shape)).sum().backward()
    torch_grads = named_here(kind, {name: p.grad for name, p in block.named_parameters()})
    if "selection_bias" in grads:  # it is a buffer there
        assert not grads.pop("selection_bias").any()
    assert jax.tree.structure(grads) == jax.tree.structure(torch_grads)
    for path, grad in jax.tree.leaves_with_path({"x": x_grad, **grads}):
        of = torch_grads | {"x": x.grad.numpy()}
        for key in path:
            of = of[key.key]
        np.testing.assert_allclose(grad, of, rtol=0, atol=1e-4 * np.abs(of).max(), err_msg=path)
    router = block.router if kind == "gpt_oss" else block.gate
    logits, _, chosen = router(torch.tensor(x_NLD.reshape(-1, D)))
    np.testing.assert_array_equal(
        np.sort(np.asarray(routed.expert_NLP).reshape(-1, P)), np.sort(chosen.numpy())
    )
    np.testing.assert_allclose(
        np.asarray(routed.logits_NLE).reshape(-1, E), logits.detach().numpy(), atol=1e-5
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_eight_devices_compute_what_one_computes(kind):
    params, x_NLD = named_here(kind, dict(torch_block(kind).state_dict())), tokens()
    wanted = outputs_and_grads(graph(kind), params, x_NLD)
    with jax.set_mesh(make_mesh(schema.Mesh(data=1, fsdp=2, expert=2, tensor=2))):
        got = outputs_and_grads(graph(kind), params, x_NLD)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted)


def test_a_selection_bias_changes_the_choice_and_no_weight():
    """Worked by hand: sigmoids 1/2 of all logits, and a bias that lifts the last experts."""
    of = Moe(4, 2, F, normalize=False, scores="sigmoid", selection_bias=True)
    router = {"router": np.zeros((D, 4), np.float32)}
    bias_E = np.array([0.0, 0.1, 0.0, 0.2], np.float32)
    plain = moe.route(tokens()[0], router | {"selection_bias": 0 * bias_E}, moe=of)
    lifted = moe.route(tokens()[0], router | {"selection_bias": bias_E}, moe=of)
    assert (np.asarray(plain.own_XP) == [0, 1]).all()
    assert (np.asarray(lifted.own_XP) == [3, 1]).all()
    assert (np.asarray(lifted.weight_XP) == 0.5).all()


def test_the_best_group_is_that_of_the_two_best_experts():
    """Worked by hand: the single best expert is alone in its group, which loses."""
    of = Moe(6, 2, F, normalize=False, scores="sigmoid", groups=3, groups_per_token=1)
    logits_E = np.array([3.0, -5.0, 1.0, 0.9, 0.5, 0.4], np.float32)
    x_XD = np.eye(1, D, dtype=np.float32)
    router_DE = np.zeros((D, 6), np.float32)
    router_DE[0] = logits_E
    routed = moe.route(x_XD, {"router": router_DE}, moe=of)
    np.testing.assert_array_equal(routed.own_XP, [[2, 3]])
    np.testing.assert_allclose(routed.weight_XP, [1 / (1 + np.exp([-1.0, -0.9]))], rtol=1e-6)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"per_token": 9}, "experts per token: got 9; allowed: 1 to 8, all the experts"),
        (
            {"groups": 3},
            "groups of experts: got 1 per token of 3 for 8 experts; allowed: a divisor",
        ),
        ({"groups": 4, "groups_per_token": 5}, "got 5 per token of 4 for 8 experts"),
        (
            {"groups": 4, "per_token": 3},
            "experts per token: got 3; allowed: 1 to 2, the experts of",
        ),
        ({"scores": "relu"}, "scores: got 'relu'; allowed: softmax, sigmoid"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(Moe(8, 2, F, True), **changes)
