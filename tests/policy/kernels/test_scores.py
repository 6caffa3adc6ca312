"""Bounded scores and sinks, in every kernel, against the softmax written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_cases import CASES, random_arrays

from seeupo_jax.policy.kernels import attention, tree_attention, tree_kernels, tree_kernels_gpu
from seeupo_jax.policy.kernels.attention import KeyValues, attend
from seeupo_jax.policy.kernels.scores import add_sinks

CAP, WINDOW = 0.8, 20
KERNELS = {
    "all_pairs": attention.all_pairs,
    "xla": functools.partial(tree_attention.attend, block=16),
    "pallas": functools.partial(tree_kernels.attend, block=128),
    "triton": functools.partial(tree_kernels_gpu.attend, block=16),
}


def softmax_with_sinks(q, k, v, sink_H, visible_NLC, cap):
    """The scores of all pairs and a sink beside them; a key's weight is its part of all."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("nlhd,nchd->nhlc", q, k) / np.sqrt(q.shape[3])
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = jnp.where(visible_NLC[:, None], scores, -jnp.inf)
    sinks = jnp.broadcast_to(sink_H[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)
    return jnp.einsum("nhlc,nchd->nlhd", weights[..., :-1], v)


def with_gradients(f, weight, *arrays):
    def loss(*arrays):
        out = f(*arrays)
        return jnp.sum(out * weight), out

    every = tuple(range(len(arrays)))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, every, has_aux=True))(*arrays)
    return out, *grads


def assert_equal(got, wanted):
    for name, x, y in zip(("out", "d_q", "d_k", "d_v", "d_sink"), got, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max(), err_msg=name)


@pytest.mark.sampled("xla-0.8", "triton-None")
@pytest.mark.parametrize("cap", [CAP, None])
@pytest.mark.parametrize("kernel", KERNELS)
def test_trees_are_attended_with_bounded_scores_and_sinks(kernel, cap):
    case = CASES["trees"]
    *qkv, weight = random_arrays(case)
    sink_H = np.array([0.5, -1.0, 3.0, 0.0], np.float32)
    mask = case.tree_mask
    order, depth = mask.order_NL[:, :, None], mask.depth_NL[:, :, None]
    visible = (mask.first_NC[:, None] <= order) & (order < mask.end_NC[:, None])
    visible &= mask.key_depth_NC[:, None] > depth - WINDOW

    def ours(q, k, v, sink_H):
        return add_sinks(*KERNELS[kernel](q, k, v, *mask, window=WINDOW, cap=cap), sink_H)

    reference = functools.partial(softmax_with_sinks, visible_NLC=visible, cap=cap)
    wanted = with_gradients(reference, weight, *qkv, sink_H)
    assert_equal(with_gradients(ours, weight, *qkv, sink_H), wanted)


@pytest.mark.parametrize("chunks", [False, True])
def test_rows_are_attended_with_bounded_scores_and_sinks(monkeypatch, chunks):
    if chunks:
        monkeypatch.setattr(attention, "SCORES_AT_ONCE", 1)
        monkeypatch.setattr(attention, "QUERIES_AT_LEAST", 50)
    *qkv, weight = random_arrays(CASES["causal"])
    sink_H = np.array([0.5, -1.0, 3.0, 0.0], np.float32)
    N, L = weight.shape[:2]
    index_L = np.arange(L)
    visible = np.broadcast_to(index_L[None, :] <= index_L[:, None], (N, L, L))
    position_NL = np.broadcast_to(index_L, (N, L))

    def ours(q, k, v, sink_H):
        return attend(q, KeyValues(k, v), position_NL, position_NL, cap=CAP, sink_H=sink_H)

    reference = functools.partial(softmax_with_sinks, visible_NLC=visible, cap=CAP)
    wanted = with_gradients(reference, weight, *qkv, sink_H)
    assert_equal(with_gradients(ours, weight, *qkv, sink_H), wanted)


def test_splash_bounds_scores_of_rows():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 128, 2, 8)).astype(np.float32) for _ in range(3))
    position_NL = np.arange(128)[None, :]
    each = [
        attend(q, KeyValues(k, v), position_NL, position_NL, cap=CAP, kernel=kernel)
        for kernel in ("splash", "xla")
    ]
    np.testing.assert_allclose(*each, atol=1e-5)


def test_a_kernel_without_sinks_refuses_them():
    q = np.zeros((1, 128, 2, 8), np.float32)
    position_NL = np.arange(128)[None, :]
    sinks = {"sink_H": np.zeros(2, np.float32), "kernel": "splash"}
    with pytest.raises(ValueError, match="kernel 'splash' got sinks; allowed: none"):
        attend(q, KeyValues(q, q), position_NL, position_NL, **sinks)
