"""The gated delta rule (Yang et al., arXiv:2412.06464) and the convolution before it.

A head's state S [k, v] maps keys to values. A token with key k, value v, log decay g <= 0 and
strength β forgets, corrects what the state says of its key, and reads by its query q:

    S <- exp(g) S;    S <- S + k (β (v - kᵀ S))ᵀ;    output = Sᵀ q

`step` is this; `by_token` repeats it; `by_chunk` is the same in matrix products over chunks of
tokens (§3.3 of the paper), which trains. All of it is float32.

Axes beyond the legend in `types.py`: H value heads, k and v the dimensions of a key and a value,
T chunks, B tokens of a chunk, W tokens that the convolution covers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens, as in the published implementations
_EPSILON = 1e-6  # in the norm of queries and keys


class DeltaInputs(NamedTuple):
    """The inputs of the rule, float32.

    q_NLHk: queries; k_NLHk: keys; v_NLHv: values. decay_NLH: log, at most 0. beta_NLH: strength.
    """

    q_NLHk: jax.Array
    k_NLHk: jax.Array
    v_NLHv: jax.Array
    decay_NLH: jax.Array
    beta_NLH: jax.Array


def normalize(x: jax.Array) -> jax.Array:
    """Vectors of length 1 along the last axis."""
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _EPSILON)


def step(
    state_NHkv: jax.Array,
    q_NHk: jax.Array,
    k_NHk: jax.Array,
    v_NHv: jax.Array,
    decay_NH: jax.Array,
    beta_NH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of every row: the state behind it, and its output [N, H, v].

    Sums of products without matrix units: these would round to fewer bits on GPU and TPU.
    """
    state_NHkv = state_NHkv * jnp.exp(decay_NH)[..., None, None]
    known_NHv = (state_NHkv * k_NHk[..., None]).sum(axis=-2)
    change_NHv = (v_NHv - known_NHv) * beta_NH[..., None]
    state_NHkv = state_NHkv + k_NHk[..., None] * change_NHv[..., None, :]
    return state_NHkv, (state_NHkv * q_NHk[..., None]).sum(axis=-2)


def by_token(inputs: DeltaInputs, state_NHkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rule token by token.

    Returns: the outputs [N, L, H, v], and the state behind the last token.
    """
    by_time = [jnp.moveaxis(x, 1, 0) for x in inputs]
    state_NHkv, out_LNHv = jax.lax.scan(
        lambda state, token: step(state, *token), state_NHkv, by_time
    )
    return jnp.moveaxis(out_LNHv, 0, 1), state_NHkv


def by_chunk(
    inputs: DeltaInputs,
    state_NHkv: jax.Array,
    segment_NL: jax.Array | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """The rule over chunks of tokens, in matrix products.

    Args:
      segment_NL: int32, rising: tokens of one number are a sequence of their own. The state in
        front belongs to the first one. None: all are one sequence.

    Returns: as `by_token`.
    """
    L = inputs.q_NLHk.shape[1]
    segment_NL = jnp.zeros(inputs.q_NLHk.shape[:2], jnp.int32) if segment_NL is None else segment_NL
    padding = -L % min(chunk, max(L, 1))
    chunk = min(chunk, max(L, 1))
    # A token without strength or decay leaves the state as it is.
    inputs = DeltaInputs(*(_by_chunks(x, padding, chunk) for x in inputs))
    segment_TNB = _by_chunks(segment_NL, padding, chunk, mode="edge")
    last_TN = segment_TNB[:, :, -1]
    before_TN = jnp.concatenate([segment_TNB[:1, :, 0], last_TN[:-1]])

    # A chunk's own part is computed again in the backward pass: [B, B] and more a head and chunk.
    @jax.checkpoint
    def one(
        state_NHkv: jax.Array, chunk_inputs: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        *of_tokens, segment_NB, before_N = chunk_inputs
        return _chunk(state_NHkv, DeltaInputs(*of_tokens), segment_NB, before_N)

    state_NHkv, out_TNBHv = jax.lax.scan(one, state_NHkv, (*inputs, segment_TNB, before_TN))
    out = jnp.moveaxis(out_TNBHv, 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :L], state_NHkv


def _by_chunks(x: jax.Array, padding: int, chunk: int, **pad: str) -> jax.Array:
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), **pad)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _chunk(
    state_NHkv: jax.Array, inputs: DeltaInputs, segment_NB: jax.Array, before_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One chunk behind a state, which belongs to the segment before_N: the next state, outputs."""
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in inputs[:3])  # [N, H, B, ...]
    beta_NHB1 = jnp.moveaxis(inputs.beta_NLH, 2, 1)[..., None]
    decay_NHB = jnp.moveaxis(inputs.decay_NLH, 2, 1)
    earlier_BB = jnp.tril(jnp.ones((q.shape[2],) * 2, bool))

    def factor(log: jax.Array, reaches: jax.Array) -> jax.Array:
        return jnp.exp(jnp.where(reaches, log, -jnp.inf))

    # Decays between pairs of tokens, from the state to each, from each to the end: 0 between
    # segments. Those of a pair are added up: a difference of two sums from the chunk's start would
    # have the rounding of what all of its tokens forget.
    between_NHBB = jnp.where(earlier_BB.T[None, None], 0, decay_NHB[..., None])
    log_NHBB = product("il,nhlj->nhij", earlier_BB.astype(jnp.float32), between_NHBB)
    same_NBB = (segment_NB[:, :, None] == segment_NB[:, None, :]) & earlier_BB[None]
    pair = factor(log_NHBB, same_NBB[:, None])
    first_NB = segment_NB == before_N[:, None]
    total_NHB = jnp.cumsum(decay_NHB, axis=-1)
    start = factor(total_NHB, first_NB[:, None])[..., None]
    end = pair[:, :, -1, :, None]
    whole = start[:, :, -1:]

    # Each token's correction depends on those before it: a triangular system.
    system = product("nhik,nhjk->nhij", k * beta_NHB1, k) * pair
    recalled = product("nhik,nhkv->nhiv", k * beta_NHB1 * start, state_NHkv)
    change = jax.lax.linalg.triangular_solve(
        system, v * beta_NHB1 - recalled, left_side=True, lower=True, unit_diagonal=True
    )
    scores = product("nhik,nhjk->nhij", q, k) * pair
    out = product("nhik,nhkv->nhiv", q * start, state_NHkv)
    out += product("nhij,nhjv->nhiv", scores, change)
    state_NHkv = state_NHkv * whole + product("nhik,nhiv->nhkv", k * end, change)
    return state_NHkv, jnp.moveaxis(out, 1, 2)


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of float32 in float32: matrix units of GPU and TPU would round its factors."""
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)


def convolve(
    x_NLC: jax.Array,
    weight_CW: jax.Array,
    before_NWC: jax.Array | None = None,
    segment_NL: jax.Array | None = None,
) -> jax.Array:
    """A causal convolution of every channel with weights of its own, float32.

    Args:
      before_NWC: the W - 1 inputs in front of the first; None: zeros.
      segment_NL: as of `by_chunk`, without inputs in front.
    """
    L, W = x_NLC.shape[1], weight_CW.shape[1]
    if before_NWC is None:
        before_NWC = jnp.zeros((x_NLC.shape[0], W - 1, x_NLC.shape[2]), x_NLC.dtype)
    x_NXC = jnp.concatenate([before_NWC, x_NLC], axis=1).astype(jnp.float32)
    if segment_NL is not None:
        segment_NX = jnp.pad(segment_NL, ((0, 0), (W - 1, 0)), constant_values=-1)
    out_NLC, weight_CW = jnp.zeros(x_NLC.shape, jnp.float32), weight_CW.astype(jnp.float32)
    for tap in range(W):
        part_NLC = x_NXC[:, tap : tap + L]
        if segment_NL is not None:
            same_NL = segment_NX[:, tap : tap + L] == segment_NL
            part_NLC = jnp.where(same_NL[..., None], part_NLC, 0)
        out_NLC += part_NLC * weight_CW[None, None, :, tap]
    return out_NLC


def last_inputs(x_NLC: jax.Array, before_NWC: jax.Array, count_N: jax.Array) -> jax.Array:
    """The inputs that stand in front of a row's next token, of which it has the first count_N."""
    x_NXC = jnp.concatenate([before_NWC, x_NLC.astype(before_NWC.dtype)], axis=1)
    index_NW = count_N[:, None] + jnp.arange(before_NWC.shape[1])[None, :]
    return jnp.take_along_axis(x_NXC, index_NW[..., None], axis=1)
