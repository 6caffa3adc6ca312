"""The losses against PyTorch in float64, as Tinker's documentation writes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from loss_twins import LOSS_TWINS

from seeupo_jax.train_service.losses import CLIP, LOSSES

ROWS, LENGTH = 3, 7


def drawn(seed):
    rng = np.random.default_rng(seed)
    shape = (ROWS, LENGTH)
    logp = -rng.exponential(size=shape)
    names = {
        "weights": rng.uniform(0, 2, shape),
        "logprobs": logp + rng.normal(scale=0.4, size=shape),
        "advantages": rng.normal(size=shape),
    }
    return logp, names


@pytest.mark.parametrize("bounds", [(0.8, 1.2), (0.5, 1.05)])
@pytest.mark.parametrize("name", LOSS_TWINS)
def test_values_and_derivatives_are_pytorchs(name, bounds):
    logp, inputs = drawn(0)
    ratio = np.exp(logp - inputs["logprobs"])
    assert (ratio < bounds[0]).any() and (ratio > bounds[1]).any()
    asked = torch.tensor(logp, requires_grad=True)
    expected = LOSS_TWINS[name](asked, {k: torch.tensor(v) for k, v in inputs.items()}, *bounds)
    expected.backward()
    loss = LOSSES[name]
    options = dict(zip(CLIP, bounds, strict=True))
    given = {name: jnp.asarray(inputs[name], jnp.float32) for name in loss.inputs}

    def total(logp_RL):
        return loss.of_token(logp_RL, given, options).sum()

    value, slope = jax.value_and_grad(total)(jnp.asarray(logp, jnp.float32))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(slope, asked.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_the_thresholds_that_hold_where_a_request_names_none():
    assert dict(CLIP) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert LOSSES["ppo"].options == LOSSES["cispo"].options == CLIP
    assert not LOSSES["cross_entropy"].options and not LOSSES["importance_sampling"].options
