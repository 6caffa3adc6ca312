"""The gated delta rule: NumPy's recurrence, transformers' two forms, and the two of ours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from seeupo_jax.policy.kernels import gated_delta
from seeupo_jax.policy.kernels.gated_delta import DeltaInputs

N, L, H, KEY, VALUE = 2, 37, 3, 6, 5
CUTS = np.array([[0, 1, 9, 21], [0, 16, 17, 32]])  # where segments begin, also within chunks of 8


def inputs_of(forget=1.0, length=L, seed=0):
    """Random inputs, of float32 as float64, and a state in front of them."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, N, length, H, KEY))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -forget * np.log1p(np.exp(2 * rng.normal(size=(N, length, H))))
    beta = 1 / (1 + np.exp(-2 * rng.normal(size=(N, length, H))))
    arrays = q, k, rng.normal(size=(N, length, H, VALUE)), decay, beta
    state = rng.normal(size=(N, H, KEY, VALUE))
    return [x.astype(np.float32).astype(np.float64) for x in arrays], state.astype(np.float32)


def recurrence(arrays, state_NHkv, segment_NL=None):
    """Equation (10) of the paper, one token after the other, in float64."""
    q, k, v, decay, beta = arrays
    state, outputs = np.array(state_NHkv, np.float64), []
    for t in range(q.shape[1]):
        for n in range(N) if segment_NL is not None and t else ():
            if segment_NL[n, t] != segment_NL[n, t - 1]:
                state[n] = 0
        output = np.zeros((N, H, VALUE))
        for n in range(N):
            for h in range(H):
                write = beta[n, t, h] * np.outer(k[n, t, h], v[n, t, h])
                erase = np.eye(KEY) - beta[n, t, h] * np.outer(k[n, t, h], k[n, t, h])
                state[n, h] = np.exp(decay[n, t, h]) * erase @ state[n, h] + write
                output[n, h] = state[n, h].T @ q[n, t, h]
        outputs.append(output)
    return np.stack(outputs, axis=1), state


def segments():
    return np.stack([np.searchsorted(cuts, np.arange(L), side="right") for cuts in CUTS])


def ours(form, arrays, state, *more, **options):
    run = {"token": gated_delta.by_token, "chunk": gated_delta.by_chunk}[form]
    inputs = DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in arrays))
    return jax.jit(functools.partial(run, **options))(inputs, jnp.asarray(state), *more)


@pytest.mark.parametrize("forget", [0.02, 1.0, 16.0])  # of weak and of the strongest initial decays
@pytest.mark.parametrize("form, options", [("token", {}), ("chunk", {"chunk": 8}), ("chunk", {})])
def test_both_forms_are_the_recurrence(form, options, forget):
    arrays, state = inputs_of(forget)
    got, wanted = ours(form, arrays, state, **options), recurrence(arrays, state)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("form", ["token", "chunk"])
def test_transformers_forms_give_the_same(form):
    arrays, state = inputs_of()
    tensors = [torch.tensor(x, dtype=torch.float32) for x in arrays]
    of_torch = {"token": torch_recurrent_gated_delta_rule, "chunk": torch_chunk_gated_delta_rule}
    wanted = of_torch[form](*tensors, initial_state=torch.tensor(state), output_final_state=True)
    arrays[0] = arrays[0] * KEY**-0.5  # transformers scales queries inside
    for one, other in zip(ours(form, arrays, state), wanted, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=2e-6)


@pytest.mark.parametrize("chunk", [8, 64])
def test_segments_are_computed_as_if_they_stood_alone(chunk):
    arrays, state = inputs_of(0.1)
    segment_NL = segments()
    got = ours("chunk", arrays, state, jnp.asarray(segment_NL, jnp.int32), chunk=chunk)
    for one, other in zip(got, recurrence(arrays, state, segment_NL), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_a_segment_in_a_chunk_of_its_own_forgets_the_state_in_front():
    arrays, state = inputs_of(0.1, length=16)
    segment_NL = np.repeat([[0, 1]] * N, 8, axis=1)
    got = ours("chunk", arrays, state, jnp.asarray(segment_NL, jnp.int32), chunk=8)
    for one, other in zip(got, recurrence(arrays, state, segment_NL), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("segmented", [False, True])
def test_gradients_of_chunks_are_those_of_the_recurrence(segmented):
    arrays, state = inputs_of(0.3)
    pull = np.random.default_rng(7).normal(size=(N, L, H, VALUE))
    segment_NL = segments() if segmented else None

    def loss(arrays, state):
        segment = None if segment_NL is None else jnp.asarray(segment_NL, jnp.int32)
        out, _ = gated_delta.by_chunk(DeltaInputs(*arrays), state, segment, chunk=8)
        return (out * pull.astype(np.float32)).sum()

    given = [jnp.asarray(x, jnp.float32) for x in arrays]
    grads = jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(given, jnp.asarray(state)))
    rng = np.random.default_rng(11)
    both = [*arrays, state.astype(np.float64)]
    for number, grad in enumerate(grads):  # along a random direction of each input, by differences
        way = rng.normal(size=both[number].shape)

        def moved(step, number=number, way=way):
            here = [x + step * way if i == number else x for i, x in enumerate(both)]
            return (recurrence(here[:-1], here[-1], segment_NL)[0] * pull).sum()

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        np.testing.assert_allclose((np.asarray(grad) * way).sum(), slope, rtol=2e-4, atol=1e-4)


def test_a_convolution_reads_the_last_tokens_of_its_own_segment():
    rng = np.random.default_rng(2)
    x_NLC, weight_CW = rng.normal(size=(N, L, 7)), rng.normal(size=(7, 4))
    segment_NL, before_NWC = segments(), rng.normal(size=(N, 3, 7))

    def wanted(first, behind):
        out = np.zeros_like(x_NLC)
        for n in range(N):
            for t in range(L):
                for back in range(4):
                    if t - back >= first(n, t):
                        out[n, t] += weight_CW[:, 3 - back] * x_NLC[n, t - back]
                    elif behind:
                        out[n, t] += weight_CW[:, 3 - back] * before_NWC[n, 3 + t - back]
        return out

    x, weight, before = (jnp.asarray(a, jnp.float32) for a in (x_NLC, weight_CW, before_NWC))
    alone = gated_delta.convolve(x, weight, segment_NL=jnp.asarray(segment_NL, jnp.int32))
    starts = wanted(lambda n, t: CUTS[n][segment_NL[n, t] - 1], behind=False)
    np.testing.assert_allclose(alone, starts, atol=1e-5)
    behind = gated_delta.convolve(x, weight, before)
    np.testing.assert_allclose(behind, wanted(lambda n, t: 0, behind=True), atol=1e-5)


def test_the_inputs_in_front_of_the_next_token_are_the_last_ones_that_count():
    x_NLC = np.arange(2 * 5 * 1, dtype=np.float32).reshape(2, 5, 1)
    before_NWC = -np.ones((2, 3, 1), np.float32)
    last = gated_delta.last_inputs(jnp.asarray(x_NLC), jnp.asarray(before_NWC), jnp.array([2, 0]))
    np.testing.assert_array_equal(last[..., 0], [[-1, 0, 1], [-1, -1, -1]])
