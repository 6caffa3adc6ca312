"""Every token runs through its experts, all of them and no others, wherever the experts live."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.policy import moe
from seeupo_jax.policy.architecture import Moe
from seeupo_jax.policy.moe import Experts

D, F, E, P = 12, 20, 8, 3

MIX = ("gate", "up", "down")
QWEN3 = Moe(E, P, F, normalize=True)


@functools.partial(jax.jit, static_argnames=("moe_", "normalize", "per_token"))
def route(x_XD, router_DE, given_XP=None, moe_=QWEN3, normalize=True, per_token=P):
    """Weights, experts and the router's own choice."""
    moe_ = dataclasses.replace(
        moe_, experts=router_DE.shape[1], normalize=normalize, per_token=per_token
    )
    return moe.route(x_XD, {"router": router_DE}, given_XP, moe=moe_)[:3]


@jax.jit
def mix(x_XD, weight_XP, expert_XP, *matrices):
    experts = dict(zip(MIX, matrices, strict=True))
    return moe.mix_experts(x_XD, weight_XP, expert_XP, experts, moe=QWEN3)


def experts(normalize=True, per_token=P):
    return Experts(D, Moe(E, per_token, F, normalize), nnx.Rngs(0), gain=0.5)


@functools.cache
def layer(normalize=True, per_token=P):
    """The layer's graph, and parameters of its shapes."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: experts(normalize, per_token)))
    rng = np.random.default_rng(1)

    def draw(s):
        return (rng.normal(size=s.shape) * s.shape[-2] ** -0.5).astype(s.dtype)

    return graph, jax.tree.map(draw, nnx.to_pure_dict(shapes))


@functools.partial(jax.jit, static_argnums=0)
def run(graph, params, x_NLD):
    return nnx.merge(graph, nnx.State(params))(x_NLD)[0]


@functools.partial(jax.jit, static_argnums=0)
def run_given(graph, params, x_NLD, given_NLP):
    y_NLD, routed = nnx.merge(graph, nnx.State(params))(x_NLD, given_NLP)
    return y_NLD, routed.expert_NLP


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, D)).astype(np.float32)


def twin(params, x_NLD, *, per_token=P, normalize=True):
    """The layer in float64, token by token and expert by expert."""
    router, gate, up, down = (
        np.asarray(params[name], np.float64) for name in ("router", "gate", "up", "down")
    )
    y_NLD = np.zeros(x_NLD.shape)
    for at in np.ndindex(x_NLD.shape[:2]):
        x = x_NLD[at].astype(np.float64)
        logits = x @ router
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        experts = np.argsort(-probability, kind="stable")[:per_token]
        total = probability[experts].sum() if normalize else 1.0
        for e in experts:
            a = x @ gate[e]
            y = (a / (1 + np.exp(-a)) * (x @ up[e])) @ down[e]
            y_NLD[at] += probability[e] / total * y
    return y_NLD


def torch_block(params, normalize, dtype=torch.float32):
    """The block of transformers, with these parameters."""
    settings = Qwen3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=F,
        num_experts=E,
        num_experts_per_tok=P,
        norm_topk_prob=normalize,
        experts_implementation="eager",
    )
    block = Qwen3MoeSparseMoeBlock(settings)

    def swap(name):
        return np.swapaxes(params[name], -1, -2)

    gate_up = np.concatenate([swap("gate"), swap("up")], axis=1)
    with torch.no_grad():
        block.gate.weight.copy_(torch.tensor(swap("router")))
        block.experts.gate_up_proj.copy_(torch.tensor(gate_up))
        block.experts.down_proj.copy_(torch.tensor(swap("down")))
    return block.to(dtype)


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_grads(graph, params, x_NLD):
    def loss(params, x_NLD):
        y_NLD = run(graph, params, x_NLD)
        direction = jnp.cos(jnp.arange(y_NLD.size, dtype=jnp.float32)).reshape(y_NLD.shape)
        return (y_NLD * direction).sum(), y_NLD

    grads, y_NLD = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x_NLD)
    return y_NLD, grads


@pytest.mark.parametrize("per_token, normalize", [(P, True), (P, False), (1, False), (E, True)])
def test_the_layer_is_its_definition(per_token, normalize):
    graph, params = layer(normalize, per_token)
    x_NLD = tokens(2, 8)
    wanted = twin(params, x_NLD, per_token=per_token, normalize=normalize)
    np.testing.assert_allclose(run(graph, params, x_NLD), wanted, atol=2e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_outputs_and_gradients_are_those_of_transformers(normalize):
    graph, params = layer(normalize)
    x_NLD = tokens(2, 7)
    got, (grads, x_grad) = outputs_and_grads(graph, params, x_NLD)
    block, x = torch_block(params, normalize), torch.tensor(x_NLD, requires_grad=True)
    wanted = block(x)
    np.testing.assert_allclose(got, wanted.detach().numpy(), atol=2e-5)
    direction = torch.cos(torch.arange(wanted.numel(), dtype=torch.float32))
    (wanted * direction.reshape(wanted.shape)).sum().backward()
    gate_up = block.experts.gate_up_proj.grad.numpy()
    swapped = {
        "router": block.gate.weight.grad.numpy(),
        "gate": gate_up[:, :F],
        "up": gate_up[:, F:],
        "down": block.experts.down_proj.grad.numpy(),
    }
    for name, grad in swapped.items():
        grad = np.swapaxes(grad, -1, -2)
        np.testing.assert_allclose(grads[name], grad, rtol=0, atol=1e-4 * np.abs(grad).max())
    x_wanted = x.grad.numpy()
    np.testing.assert_allclose(x_grad, x_wanted, rtol=0, atol=1e-4 * np.abs(x_wanted).max())


def drawn_experts(x_NLD, seed=3):
    """Of each token some that no router chose."""
    rng = np.random.default_rng(seed)
    draw = [rng.permutation(E)[:P] for _ in range(x_NLD.shape[0] * x_NLD.shape[1])]
    return np.array(draw, np.uint8).reshape(*x_NLD.shape[:2], P)


def given_twin(params, x_NLD, given_NLP, normalize):
    """The layer with given experts in PyTorch, float64: a token at a time, an expert at a time."""
    params = {name: torch.tensor(x, dtype=torch.float64) for name, x in params.items()}
    leaves = {**params, "x": torch.tensor(x_NLD, dtype=torch.float64)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    sums = []
    for row, experts in zip(leaves["x"].reshape(-1, D), given_NLP.reshape(-1, P), strict=True):
        probability = torch.softmax(row @ leaves["router"], dim=0)[torch.tensor(experts).long()]
        weights = probability / probability.sum() if normalize else probability
        outputs = [
            (torch.nn.functional.silu(row @ leaves["gate"][e]) * (row @ leaves["up"][e]))
            @ leaves["down"][e]
            for e in experts
        ]
        sums.append(sum(weight * y for weight, y in zip(weights, outputs, strict=True)))
    return torch.stack(sums).reshape(*x_NLD.shape), leaves


@pytest.mark.parametrize("normalize", [True, False])
def test_given_experts_have_the_routers_own_weights_and_gradients(normalize):
    graph, params = layer(normalize)
    x_NLD = tokens(2, 4)
    given_NLP = drawn_experts(x_NLD)

    def loss(params, x_NLD):
        y_NLD = run_given(graph, params, x_NLD, given_NLP)[0]
        return (y_NLD * jnp.cos(jnp.arange(y_NLD.size)).reshape(y_NLD.shape)).sum()

    got, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x_NLD)
    wanted, leaves = given_twin(params, x_NLD, given_NLP, normalize)
    direction = torch.cos(torch.arange(wanted.numel(), dtype=torch.float64))
    total = (wanted * direction.reshape(wanted.shape)).sum()
    total.backward()
    assert float(got) == pytest.approx(total.item(), abs=1e-5)
    for name, grad in {**grads[0], "x": grads[1]}.items():
        np.testing.assert_allclose(grad, leaves[name].grad.numpy(), rtol=0, atol=1e-5)
    assert np.abs(grads[0]["router"]).max() > 1e-3


def test_a_replay_of_the_routers_own_choice_changes_no_bit():
    graph, params = layer()
    x_NLD = tokens(2, 8)
    unknown = np.full((2, 8, P), 255, np.uint8)
    y_NLD, routed_NLP = run_given(graph, params, x_NLD, unknown)
    again_NLD, same_NLP = run_given(graph, params, x_NLD, routed_NLP)
    assert routed_NLP.dtype == np.uint8
    np.testing.assert_array_equal(again_NLD, y_NLD)
    np.testing.assert_array_equal(same_NLP, routed_NLP)
    np.testing.assert_allclose(run(graph, params, x_NLD), y_NLD, atol=1e-6)
    other_NLD, own_NLP = run_given(graph, params, x_NLD, drawn_experts(x_NLD))
    np.testing.assert_array_equal(own_NLP, routed_NLP)  # whatever was given
    assert np.abs(other_NLD - y_NLD).max() > 0.1


def test_near_a_tie_only_a_replay_is_continuous():
    graph, params = layer(per_token=1)
    params = {**params, "router": params["router"].copy()}
    # Two experts that no token tells apart, and that half of the tokens go to.
    params["router"][:, :2] = 5 * params["router"][:, :1]

    def nudge(size):
        return {**params, "router": params["router"] * (1 + size * np.eye(E)[1])}

    x_NLD = tokens(2, 8)
    _, routed_NLP = run_given(graph, params, x_NLD, np.full((2, 8, 1), 255, np.uint8))
    tied = np.isin(routed_NLP[..., 0], (0, 1))
    assert tied.any()
    before, below, above = (nudge(size) for size in (0, -1e-6, 1e-6))
    jumps = [np.abs(run(graph, each, x_NLD) - run(graph, before, x_NLD)) for each in (below, above)]
    assert max(jump[tied].max() for jump in jumps) > 0.1
    for each in (below, above):
        replayed = [run_given(graph, at, x_NLD, routed_NLP)[0] for at in (each, before)]
        np.testing.assert_allclose(*replayed, atol=1e-5)


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers():
    graph, params = layer()
    x_NLD = tokens(8, 16).astype(jnp.bfloat16).astype(np.float32)
    got = run(graph, params, x_NLD.astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    reference = torch_block(params, True, torch.bfloat16)(torch.tensor(x_NLD, dtype=torch.bfloat16))
    exact = twin(params, x_NLD)

    def error(y):
        return np.sqrt(np.mean((np.asarray(y, np.float32) - exact) ** 2))

    assert error(got) <= 1.1 * error(reference.float().detach().numpy()) < 0.1


def test_the_routing_of_bfloat16_tokens_is_a_float32_softmax():
    rng = np.random.default_rng(0)
    x_XD, router_DE = (rng.normal(0, 0.9, s).astype(jnp.bfloat16) for s in ((64, D), (D, 512)))
    logits_XE = x_XD.astype(np.float64) @ router_DE.astype(np.float64)
    least_XP = np.argsort(logits_XE, axis=1)[:, :P].astype(np.int32)  # rounding shows most there
    weight_XP, expert_XP, _ = route(x_XD, router_DE, least_XP, per_token=P, normalize=False)
    assert weight_XP.dtype == jnp.bfloat16 and expert_XP.dtype == jnp.int32
    probability_XE = np.exp(logits_XE) / np.exp(logits_XE).sum(axis=1, keepdims=True)
    wanted = np.take_along_axis(probability_XE, least_XP, axis=1)
    assert (
        np.abs(logits_XE).max() < 16
    )  # so a logit that is rounded to bfloat16 is at most 1/32 off
    np.testing.assert_allclose(weight_XP.astype(np.float32), wanted, rtol=1 / 16)


def test_weights_are_normalised_only_where_asked():
    x_XD, router_DE = tokens(6), layer()[1]["router"]
    scaled, *_ = route(x_XD, router_DE, per_token=P, normalize=True)
    plain, *_ = route(x_XD, router_DE, per_token=P, normalize=False)
    np.testing.assert_allclose(scaled.sum(1), 1, rtol=1e-6)
    assert (plain.sum(1) < 0.99).all()
    np.testing.assert_allclose(scaled, plain / plain.sum(1, keepdims=True), rtol=1e-6)


def test_of_equally_probable_experts_the_first_are_taken():
    router_DE = np.zeros((D, E), np.float32)
    router_DE[0, 5] = 1.0  # ahead where the token's first entry is positive, last where negative
    x_XD = np.zeros((2, D), np.float32)
    x_XD[:, 0] = 2.0, -2.0
    _, expert_XP, _ = route(x_XD, router_DE, per_token=P, normalize=True)
    np.testing.assert_array_equal(expert_XP, [[5, 0, 1], [0, 1, 2]])


def test_no_token_is_dropped_when_all_go_to_one_expert():
    graph, params = layer(per_token=1)
    x_NLD = np.abs(tokens(2, 8))
    params = params | {"router": np.float32(np.arange(E) == 6) * np.ones((D, 1), np.float32)}
    wanted = twin(params, x_NLD, per_token=1)
    gate, up, down = (np.asarray(params[name][6]) for name in ("gate", "up", "down"))
    a = x_NLD @ gate
    np.testing.assert_allclose(wanted, (a / (1 + np.exp(-a)) * (x_NLD @ up)) @ down, atol=1e-5)
    np.testing.assert_allclose(run(graph, params, x_NLD), wanted, atol=2e-6)
    assert (np.abs(wanted).max(axis=-1) > 1e-3).all()


def test_other_tokens_do_not_change_a_token():
    graph, params = layer()
    x_NLD = tokens(2, 8)
    wanted = run(graph, params, x_NLD)[0, :4]
    for other in (0.0, 1e3, np.nan):
        changed = np.full_like(x_NLD, other)
        changed[0, :4] = x_NLD[0, :4]
        np.testing.assert_allclose(run(graph, params, changed)[0, :4], wanted, atol=1e-6)
    moved = run(graph, params, x_NLD[::-1, ::-1].copy())[1, :3:-1]
    np.testing.assert_allclose(moved, wanted, atol=1e-6)


def test_pairs_of_foreign_experts_add_nothing():
    _, params = layer()
    x_XD, local = tokens(10), 4
    matrices = [params[name] for name in ("gate", "up", "down")]
    weight_XP, expert_XP, _ = route(x_XD, params["router"], per_token=P, normalize=True)
    wanted = mix(x_XD, weight_XP, expert_XP, *matrices)
    parts = [
        mix(x_XD, weight_XP, expert_XP - first, *(m[first : first + local] for m in matrices))
        for first in (0, local)
    ]
    np.testing.assert_allclose(sum(parts), wanted, atol=1e-6)


def place(params, mesh):
    module = nnx.eval_shape(experts)
    names = {name: vars(module)[name].get_metadata("logical") for name in params}
    return jax.device_put(params, param_shardings(mesh, names, params))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes, rows",
    [
        ({"expert": 4, "tensor": 2}, 3),  # rows that their devices do not divide
        ({"expert": 2, "tensor": 2, "fsdp": 2}, 4),
    ],
)
def test_eight_devices_compute_what_one_computes(sizes, rows):
    graph, params = layer()
    x_NLD = tokens(rows, 5)
    wanted, given_NLP = outputs_and_grads(graph, params, x_NLD), drawn_experts(x_NLD)
    mesh = make_mesh(schema.Mesh(**{"data": 1, **sizes}))
    with jax.set_mesh(mesh):
        got = outputs_and_grads(graph, place(params, mesh), x_NLD)
        replayed = run_given(graph, place(params, mesh), x_NLD, given_NLP)
    for a, b in zip(replayed, run_given(graph, params, x_NLD, given_NLP), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)


def test_a_device_holds_and_runs_its_own_experts_only(monkeypatch):
    seen, real = [], moe.mix_experts

    def watched(*a, **moe):
        return seen.append([x.shape for x in jax.tree.leaves(a)]) or real(*a, **moe)

    monkeypatch.setattr(moe, "mix_experts", watched)
    graph, params = layer()
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, expert=2, tensor=2))
    with jax.set_mesh(mesh):
        placed = place(params, mesh)
        run.eval_shape(graph, placed, tokens(4, 6))
    X, local = 2 * 6, E // 2  # the rows of the two devices that share the experts
    # In the order of their names: down, gate, up.
    matrices = [(local, F // 2, D), (local, D, F // 2), (local, D, F // 2)]
    assert seen == [[(X, D), (X, P), (X, P), *matrices]]
    assert placed["gate"].sharding.shard_shape(placed["gate"].shape) == (local, D // 2, F // 2)


def test_layers_may_be_scanned_and_rematerialised():
    graph, params = layer()
    stacked = jax.tree.map(lambda a: np.stack([a, a[..., ::-1]]), params)

    def step(x, p):
        return x + run(graph, p, x)

    def scanned(stacked, x_NLD):
        body = jax.checkpoint(lambda x, p: (step(x, p), None))
        return (jax.lax.scan(body, x_NLD, stacked)[0] ** 2).sum()

    def unrolled(stacked, x_NLD):
        for i in range(2):
            x_NLD = step(x_NLD, jax.tree.map(lambda a, i=i: a[i], stacked))
        return (x_NLD**2).sum()

    x_NLD = tokens(4, 3)
    wanted = jax.jit(jax.grad(unrolled))(stacked, x_NLD)
    with jax.set_mesh(make_mesh(schema.Mesh(data=1, expert=4, tensor=2))):
        got = jax.jit(jax.grad(scanned))(stacked, x_NLD)
    for name, grad in wanted.items():
        np.testing.assert_allclose(got[name], grad, atol=1e-5 * np.abs(grad).max(), err_msg=name)


def test_every_matrix_starts_at_the_size_of_its_inputs():
    module = experts()
    expected = {"router": D**-0.5, "gate": D**-0.5, "up": D**-0.5, "down": 0.5 * F**-0.5}
    for name, size in expected.items():
        np.testing.assert_allclose(np.std(vars(module)[name][...]), size, rtol=0.2, err_msg=name)


def test_more_experts_for_a_token_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="per token: got 9; allowed: 1 to 8, all the experts"):
        experts(per_token=9)
