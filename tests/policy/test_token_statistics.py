"""A teacher's likeliest tokens and the divergence from it, against PyTorch's whole softmax."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from twin_policy import random_network

from seeupo_jax.algorithms.distillation import UNTAUGHT, forward_kl
from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture

V, D, R, A, K = 58, 16, 4, 7, 5
HOLES = (5, 9, 20, 21, 50)  # ids 5 to 8, 20, and all from 50 on
UNASSIGNED = np.isin(np.arange(V), [*range(5, 9), 20, *range(50, V)])
ARCH = Architecture(V, D, layers=1, heads=2, kv_heads=2, head_dim=8, mlp_width=24, tied=False)
CAPPED = dataclasses.replace(ARCH, logit_cap=3.0, logit_scale=0.5)
# More ids than the policy has, as a teacher may.
TEACHER = dataclasses.replace(ARCH, vocab_size=64)
TEMPERATURE = 0.7
MESH = schema.Mesh(data=1, fsdp=2, context=2, tensor=2)


def given(arch, seed=0):
    """A network, parameters whose distributions are far from even, hidden states and targets."""
    network, params = random_network(arch)
    params = params | {"head": 2 * params["head"]}
    rng = np.random.default_rng(seed)
    hidden_RAD = rng.normal(size=(R, A, D)).astype(np.float32)
    target_RA = rng.choice(np.flatnonzero(~UNASSIGNED), (R, A)).astype(np.int32)
    return network, params, hidden_RAD, target_RA


def torch_logp(arch, head_VD, hidden_RAD):
    """Log-probabilities of all ids in float64."""
    logits = torch.einsum("rad,vd->rav", hidden_RAD, head_VD) * arch.logit_scale
    if arch.logit_cap is not None:
        logits = arch.logit_cap * torch.tanh(logits / arch.logit_cap)
    logits = logits / TEMPERATURE
    if arch.unassigned:
        hole_V = torch.tensor(np.append(UNASSIGNED, np.zeros(max(0, arch.vocab_size - V), bool)))
        logits = logits.masked_fill(hole_V, -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def double(*arrays):
    return [torch.tensor(np.asarray(x, np.float64)) for x in arrays]


def torch_top(arch, params, hidden_RAD, allowed_V):
    """Ids and log-probabilities of the K likeliest of the allowed ids, and of all others."""
    head_VD, hidden = double(params["head"], hidden_RAD)
    logp = torch_logp(arch, head_VD, hidden)
    masked = logp.masked_fill(torch.tensor(~allowed_V), -torch.inf)
    top = masked.topk(K, dim=-1)
    rest = logp.scatter(-1, top.indices, -torch.inf).logsumexp(-1, keepdim=True)
    return top.indices.numpy(), torch.cat([top.values, rest], -1).numpy()


@contextlib.contextmanager
def on_mesh(cut, network, params, *arrays):
    """Parameters and rows on one device, or on a mesh that cuts vocabulary, rows and lengths."""
    if not cut:
        yield params, *arrays
        return
    mesh = make_mesh(MESH)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
        yield placed, *jax.device_put(arrays, sharding(mesh, ("rows",)))


CUT = pytest.mark.parametrize("cut", [False, True], ids=["one device", "a cut vocabulary"])


@CUT
@pytest.mark.parametrize("arch", [ARCH, CAPPED, TEACHER], ids=["plain", "capped", "more ids"])
def test_the_likeliest_tokens_are_pytorchs(monkeypatch, cut, arch):
    """Those that the policy has too: what else the teacher knows counts among all others."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", 6 * V)
    network, params, hidden_RAD, target_RA = given(arch)
    among = dataclasses.replace(ARCH, unassigned=HOLES)
    allowed_V = np.append(~UNASSIGNED, np.zeros(arch.vocab_size - V, bool))
    token_RAK, logp_RAJ = torch_top(arch, params, hidden_RAD, allowed_V)

    @jax.jit
    def find(params, hidden_RAD, target_RA):
        options = {"temperature": TEMPERATURE, "count": K, "among": among}
        return policy.token_logp_and_top(network, params, hidden_RAD, target_RA, **options)

    with on_mesh(cut, network, params, hidden_RAD, target_RA) as arrays:
        logp_RA, got_RAK, got_RAJ = find(*arrays)
    np.testing.assert_array_equal(got_RAK, token_RAK)
    np.testing.assert_allclose(got_RAJ, logp_RAJ, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(np.asarray(got_RAJ, np.float64)).sum(-1), 1, atol=1e-5)
    every = torch_logp(arch, *double(params["head"], hidden_RAD))
    wanted_RA = every.gather(-1, torch.tensor(target_RA[..., None], dtype=torch.int64))[..., 0]
    np.testing.assert_allclose(logp_RA, wanted_RA, rtol=1e-5, atol=1e-5)
    unlimited = every.topk(K, dim=-1).indices.numpy()
    assert not np.array_equal(unlimited, token_RAK)  # the excluded ids are among the likeliest


@CUT
@pytest.mark.parametrize("entropy", [False, True], ids=["alone", "with the entropy"])
@pytest.mark.parametrize("holes", [(), HOLES], ids=["all ids", "ids without a token"])
@pytest.mark.parametrize("arch", [ARCH, CAPPED], ids=["plain", "capped"])
def test_the_divergence_and_its_gradient_are_pytorchs(monkeypatch, cut, entropy, holes, arch):
    """Of 28 tokens in chunks of 5, a middle one without any and four without a teacher."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", 5 * V // (2 if cut else 1))
    arch = dataclasses.replace(arch, unassigned=holes)
    network, params, hidden_RAD, target_RA = given(arch)
    _, others, other_RAD, _ = given(dataclasses.replace(ARCH, unassigned=HOLES), seed=1)
    top_RAK, top_logp_RAJ = torch_top(ARCH, others, other_RAD, ~UNASSIGNED)
    weight_RA = np.random.default_rng(3).normal(size=(R, A)).astype(np.float32)
    target_RA.reshape(-1)[9:16] = policy.NO_TARGET
    top_logp_RAJ[3, 2:6] = UNTAUGHT
    taught_RA = (target_RA != policy.NO_TARGET) & (top_logp_RAJ[..., 0] > UNTAUGHT)
    weight_RA[target_RA == policy.NO_TARGET] = 0
    top = top_RAK.astype(np.int32), top_logp_RAJ.astype(np.float32)

    def loss(params, hidden_RAD, target_RA, weight_RA, *top):
        found = policy.token_logp_and_forward_kl(
            network, params, hidden_RAD, target_RA, *top, temperature=TEMPERATURE, entropy=entropy
        )
        total = jnp.sum(weight_RA * found[-1])
        return total + (jnp.sum(weight_RA * found[1]) if entropy else 0.0), found

    arrays = hidden_RAD, target_RA, weight_RA, *top
    with on_mesh(cut, network, params, *arrays) as placed:
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, found), (grads, hidden_grad_RAD) = run(*placed)

    head_VD, hidden = (x.requires_grad_() for x in double(params["head"], hidden_RAD))
    logp = torch_logp(arch, head_VD, hidden)
    ids = torch.tensor(top_RAK, dtype=torch.int64)
    left = torch.ones(R, A, V, dtype=torch.bool).scatter(-1, ids, False)
    rest = (logp.exp() * left).sum(-1, keepdim=True).log()
    own = torch.cat([logp.gather(-1, ids), rest], -1)
    taught = torch.tensor(top_logp_RAJ).exp()
    kl = torch.nn.functional.kl_div(own, taught, reduction="none").sum(-1)
    kl = torch.where(torch.tensor(taught_RA), kl, 0.0)
    total = (torch.tensor(weight_RA) * kl).sum()
    if entropy:
        plain = torch.where(torch.isinf(logp), 0.0, logp)
        entropy_RA = -(logp.exp() * plain).sum(-1)
        total = total + (torch.tensor(weight_RA) * entropy_RA).sum()
    total.backward()
    real_RA = target_RA != policy.NO_TARGET
    got_RA = np.where(real_RA, found[-1], 0)
    np.testing.assert_allclose(got_RA, kl.detach().numpy(), rtol=1e-5, atol=1e-5)
    assert (got_RA[taught_RA] > 0.01).all() and not got_RA[~taught_RA].any()
    for got, wanted in ((grads["head"], head_VD.grad), (hidden_grad_RAD, hidden.grad)):
        np.testing.assert_allclose(got, np.nan_to_num(wanted.numpy()), rtol=1e-4, atol=1e-5)
        assert np.isfinite(wanted.numpy()).all()
    alone = jax.jit(lambda *x: policy.token_logp(network, *x, temperature=TEMPERATURE))
    if not cut:  # the divergence changes no bit of the log-probabilities
        np.testing.assert_array_equal(found[0], alone(params, hidden_RAD, target_RA))


def test_the_rest_has_its_digits_where_almost_nothing_is_left():
    """Of a token that has all but e^-60: what is left to 1 would be 0 in float32."""
    arch = dataclasses.replace(ARCH, vocab_size=8, width=8, heads=1, kv_heads=1)
    network, params = random_network(arch)
    params = params | {"head": np.diag([60.0] + [0.0] * 7).astype(np.float32)}
    hidden_RAD = np.ones((1, 1, 8), np.float32)
    target_RA = np.zeros((1, 1), np.int32)
    options = {"temperature": 1.0, "count": 1, "among": arch}
    found = policy.token_logp_and_top(network, params, hidden_RAD, target_RA, **options)
    _, token_RAK, logp_RAJ = found
    np.testing.assert_allclose(logp_RAJ[0, 0], [0.0, np.log(7.0) - 60.0], rtol=1e-6)
    assert token_RAK[0, 0, 0] == 0
    top = token_RAK, logp_RAJ

    def divergence(hidden_RAD):
        return policy.token_logp_and_forward_kl(
            network, params, hidden_RAD, target_RA, *top, temperature=1.0
        )[1].sum()

    value, gradient = jax.value_and_grad(divergence)(hidden_RAD)
    assert value == 0 and np.isfinite(gradient).all()


def test_the_divergence_of_a_worked_example():
    """Teacher 1/2, 1/4 and 1/4 for all others; policy 1/4, 1/4, 1/2: log(2) / 4."""
    teacher, own = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.25, 0.5]])
    np.testing.assert_allclose(forward_kl(own, teacher), [np.log(2) / 4], rtol=1e-6)
    np.testing.assert_array_equal(forward_kl(own, own), [0.0])
    np.testing.assert_array_equal(forward_kl(own, np.full((1, 3), UNTAUGHT)), [0.0])


def test_fewer_outcomes_have_at_most_the_divergence_of_all():
    rng = np.random.default_rng(0)
    for _ in range(50):
        teacher, own = rng.dirichlet(np.full(12, 0.4), 2) + 1e-9
        order = np.argsort(-teacher)
        sizes = []
        for count in (1, 3, 6, 11):
            top = [np.append(x[order[:count]], x[order[count:]].sum()) for x in (own, teacher)]
            sizes.append(float(forward_kl(*(np.log(x)[None] for x in top))[0]))
        assert -1e-6 <= sizes[0] and (np.diff(sizes) >= -1e-5).all()
        whole = (teacher * np.log(teacher / own)).sum()
        np.testing.assert_allclose(sizes[-1], whole, rtol=1e-4, atol=1e-5)
