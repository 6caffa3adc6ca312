"""The losses of routers are those of transformers and of the papers; biases are worked by hand."""

import jax
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from seeupo_jax.algorithms.expert_balance import balance_loss, router_z_loss, updated_bias

X, Y, E, P = 23, 3, 5, 2


def logits(seed=0):
    return np.random.default_rng(seed).normal(0, 2, (X, Y, E)).astype(np.float32)


def counted():
    counted_X = np.ones(X, bool)
    counted_X[[3, 8, 22]] = False
    return counted_X


def load(logits_XYE, counted_X):
    """Tokens of each expert."""
    chosen_XYP = np.argsort(-logits_XYE, axis=2)[:, :, :P]
    return np.stack(
        [np.bincount(chosen_XYP[counted_X, y].reshape(-1), minlength=E) for y in range(Y)]
    ).astype(np.float32)


def ours(logits_XYE, counted_X, load_YE, tokens):
    return balance_loss(jax.nn.softmax(logits_XYE), counted_X, load_YE, tokens)


def torch_loss(logits_XYE, counted_X):
    """The mean over layers of the loss of transformers, of one layer each."""
    mask = torch.tensor(counted_X[None].astype(np.int64))
    losses = [load_balancing_loss_func((logits_XYE[:, y],), E, P, mask) for y in range(Y)]
    return sum(losses) / Y


def test_the_balance_loss_and_its_gradient_are_those_of_transformers():
    logits_XYE, counted_X = logits(), counted()
    load_YE, tokens = load(logits_XYE, counted_X), np.float32(counted_X.sum())
    loss, grad = jax.value_and_grad(ours)(logits_XYE, counted_X, load_YE, tokens)
    there = torch.tensor(logits_XYE, requires_grad=True)
    wanted = torch_loss(there, counted_X)
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-6)
    np.testing.assert_allclose(grad, there.grad.numpy(), atol=1e-7)
    assert np.abs(grad).max() > 1e-3
    assert not grad[~counted_X].any()


def test_an_even_load_has_as_its_loss_the_experts_of_a_token():
    """And the worst, all tokens at the same experts, the number of experts."""
    even_YE = np.full((1, E), P * 10 / E, np.float32)
    flat = np.full((10, 1, E), 1 / E, np.float32)
    one = np.ones(10, bool)
    assert float(balance_loss(flat, one, even_YE, 10.0)) == pytest.approx(P)
    sure = np.zeros((10, 1, E), np.float32)
    sure[..., 0] = 1
    first_YE = np.array([[10, 0, 0, 0, 0]], np.float32)  # one expert a token
    assert float(balance_loss(sure, one, first_YE, 10.0)) == pytest.approx(E)


def test_the_z_loss_is_the_mean_square_of_the_log_of_the_sum_of_exponentials():
    logits_XYE, counted_X = logits(), counted()
    exact = logits_XYE.astype(np.float64)[counted_X]
    wanted = (np.log(np.exp(exact).sum(axis=2)) ** 2).mean()
    loss = router_z_loss(logits_XYE, counted_X, np.float32(counted_X.sum()))
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    one = router_z_loss(np.zeros((1, 1, E), np.float32), np.ones(1, bool), 1.0)
    assert float(one) == pytest.approx(np.log(E) ** 2)


def test_parts_of_a_batch_sum_to_its_losses():
    logits_XYE, counted_X = logits(), counted()
    load_YE, tokens = load(logits_XYE, counted_X), np.float32(counted_X.sum())
    whole = ours(logits_XYE, counted_X, load_YE, tokens)
    parts = [ours(logits_XYE[i], counted_X[i], load_YE, tokens) for i in (slice(9), slice(9, X))]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)
    whole = router_z_loss(logits_XYE, counted_X, tokens)
    parts = [router_z_loss(logits_XYE[i], counted_X[i], tokens) for i in (slice(9), slice(9, X))]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)


def test_biases_step_towards_the_mean_load():
    """Worked by hand: layers of loads 1, 2, 3 and 4, 4, 4."""
    load_YE = np.array([[1, 2, 3], [4, 4, 4]], np.float32)
    bias_YE = np.array([[0.5, 0.0, -0.5], [1.0, 2.0, 3.0]], np.float32)
    wanted = [[0.51, 0.0, -0.51], [1.0, 2.0, 3.0]]
    np.testing.assert_allclose(updated_bias(bias_YE, load_YE, rate=0.01), wanted, rtol=1e-6)
