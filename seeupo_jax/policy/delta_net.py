"""Gated DeltaNet (Yang et al., arXiv:2412.06464): a layer's part with a state, not attention.

Axes beyond the legend in `types.py`: as in `kernels/gated_delta.py`; C channels of the convolution.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.parallel.mesh import constrain, per_shard
from seeupo_jax.policy.architecture import Architecture, DeltaNet
from seeupo_jax.policy.kernels import gated_delta
from seeupo_jax.policy.kernels.attention import NOWHERE
from seeupo_jax.policy.kernels.derivatives import rms_norm
from seeupo_jax.policy.kernels.gated_delta import DeltaInputs
from seeupo_jax.policy.kernels.paged import StateRows
from seeupo_jax.policy.projection import Projection

# Parameters that are float32 in the sampler too: decays would be others, and they are few.
FLOAT32 = ("conv1d", "a_log", "dt_bias", "norm_scale")
STATE_AXES = ("rows", None, None, None)  # logical axes of `DeltaStates`; the first of fewer


class DeltaStates(NamedTuple):
    """The sampler's cache of one layer: what the next token needs of those before it.

    S: states of the pool, or rows. input_SWC: the last inputs of the convolution.
    state_SHkv: float32.
    """

    input_SWC: jax.Array
    state_SHkv: jax.Array


class _Projected(NamedTuple):
    """Projections of hidden states: the convolution's channels, gates, strengths, decays."""

    x_NLC: jax.Array
    gate_NLHv: jax.Array
    strength_NLH: jax.Array
    decay_NLH: jax.Array


class GatedDeltaNet(nnx.Module):
    """Projections, a convolution, the gated delta rule, and a gated norm of its outputs."""

    def __init__(self, arch: Architecture, rngs: nnx.Rngs, *, gain: float):
        delta = self.delta = arch.delta
        D, H, C = arch.width, delta.value_heads, delta.channels
        values = H * delta.value_dim
        self.eps, self.dtype = arch.norm_eps, arch.dtype
        project = functools.partial(Projection, rngs=rngs, int8=arch.int8)
        names = {"qkv": C, "z": values, "b": H, "a": H}
        if delta.grouped:
            names = {"qkvz": C + values, "ba": 2 * H}
        for name, size in names.items():
            setattr(self, name, project((D, size), ("embed", "heads")))
        draw = jax.random.uniform(rngs.params(), (H,), minval=0.01, maxval=16.0)
        conv = jax.random.normal(rngs.params(), (C, 1, delta.conv)) * delta.conv**-0.5
        self.conv1d = nnx.Param(conv, logical=(None, None, None))
        self.a_log = nnx.Param(jnp.log(draw), logical=("heads",))
        self.dt_bias = nnx.Param(jnp.ones(H), logical=("heads",))
        self.norm_scale = nnx.Param(jnp.ones(delta.value_dim), logical=("head_dim",))
        self.out = project((values, D), ("heads", "embed"), gain=gain)

    def __call__(self, x_NLD: jax.Array, segment_NL: jax.Array | None = None) -> jax.Array:
        """Whole sequences, each from an empty state; `segment_NL` as of `Transformer.compute`."""
        projected = self._project(x_NLD)
        weight_CW = self.conv1d[...][:, 0]
        convolved = gated_delta.convolve(projected.x_NLC, weight_CW, segment_NL=segment_NL)
        inputs = self._inputs(projected, convolved)
        empty = jnp.zeros((x_NLD.shape[0], *_state_shape(self.delta)), jnp.float32)
        out_NLHv, _ = gated_delta.by_chunk(inputs, empty, segment_NL)
        return self._read(out_NLHv, projected.gate_NLHv)

    def extend(
        self,
        x_RLD: jax.Array,
        position_RL: jax.Array,
        states: DeltaStates,
        rows: StateRows | None = None,
    ) -> tuple[jax.Array, DeltaStates]:
        """Tokens that continue the states of their rows.

        Args:
          position_RL: of each token; the first of a sequence begins from an empty state. `NOWHERE`
            at padding, which comes last and changes no state.
          states: a pool, which `rows` reads and writes; None: one of each row, in their order.
        """
        projected, weight_CW = self._project(x_RLD), self.conv1d[...][:, 0]
        valid_RL, goes_on_R = position_RL != NOWHERE, position_RL[:, 0] != 0
        before_RWC, state_RHkv = (
            jnp.where(goes_on_R.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
            for x in (states if rows is None else take_states(states, rows))
        )
        convolved = gated_delta.convolve(projected.x_NLC, weight_CW, before_RWC)
        inputs = self._inputs(projected, convolved)
        inputs = inputs._replace(  # at padding: nothing is forgotten, nothing written
            decay_NLH=jnp.where(valid_RL[..., None], inputs.decay_NLH, 0),
            beta_NLH=jnp.where(valid_RL[..., None], inputs.beta_NLH, 0),
        )
        if x_RLD.shape[1] == 1:
            state_RHkv, out_RHv = gated_delta.step(state_RHkv, *(x[:, 0] for x in inputs))
            out_RLHv = out_RHv[:, None]
        else:
            out_RLHv, state_RHkv = gated_delta.by_chunk(inputs, state_RHkv)
        before_RWC = gated_delta.last_inputs(projected.x_NLC, before_RWC, valid_RL.sum(axis=1))
        after = DeltaStates(before_RWC, state_RHkv)
        states = after if rows is None else put_states(states, after, rows)
        return self._read(out_RLHv, projected.gate_NLHv), states

    def _project(self, x_NLD: jax.Array) -> _Projected:
        delta = self.delta
        lead, H = x_NLD.shape[:2], delta.value_heads
        if not delta.grouped:
            gate = self.z(x_NLD).reshape(*lead, H, delta.value_dim)
            return self._decays(self.qkv(x_NLD), gate, self.b(x_NLD), self.a(x_NLD))
        each, k = H // delta.key_heads, delta.key_dim  # value heads of a key head
        v = each * delta.value_dim
        qkvz = self.qkvz(x_NLD).reshape(*lead, delta.key_heads, -1)
        ba = self.ba(x_NLD).reshape(*lead, delta.key_heads, -1)
        parts = jnp.split(qkvz, (k, 2 * k, 2 * k + v), axis=-1)
        x_NLC = jnp.concatenate([part.reshape(*lead, -1) for part in parts[:3]], axis=-1)
        gate = parts[3].reshape(*lead, H, delta.value_dim)
        b, a = (part.reshape(*lead, H) for part in jnp.split(ba, 2, axis=-1))
        return self._decays(x_NLC, gate, b, a)

    def _decays(self, x_NLC: jax.Array, gate: jax.Array, b: jax.Array, a: jax.Array) -> _Projected:
        rate_H = jnp.exp(self.a_log[...].astype(jnp.float32))
        bias_H = self.dt_bias[...].astype(jnp.float32)
        decay_NLH = -rate_H[None, None, :] * jax.nn.softplus(
            a.astype(jnp.float32) + bias_H[None, None, :]
        )
        return _Projected(x_NLC, gate, jax.nn.sigmoid(b.astype(jnp.float32)), decay_NLH)

    def _inputs(self, projected: _Projected, convolved_NLC: jax.Array) -> DeltaInputs:
        delta, lead = self.delta, convolved_NLC.shape[:2]
        keys = delta.key_heads * delta.key_dim
        q, k, v = jnp.split(jax.nn.silu(convolved_NLC), (keys, 2 * keys), axis=-1)
        q, k = (gated_delta.normalize(x.reshape(*lead, -1, delta.key_dim)) for x in (q, k))
        each = delta.value_heads // delta.key_heads
        q, k = (jnp.repeat(x, each, axis=2) for x in (q * delta.key_dim**-0.5, k))
        v = v.reshape(*lead, delta.value_heads, delta.value_dim)
        return DeltaInputs(q, k, v, projected.decay_NLH, projected.strength_NLH)

    def _read(self, out_NLHv: jax.Array, gate_NLHv: jax.Array) -> jax.Array:
        normed = rms_norm(out_NLHv, self.norm_scale[...], self.eps, 0.0)
        y = normed * jax.nn.silu(gate_NLHv.astype(jnp.float32))
        return self.out(y.reshape(*y.shape[:2], -1).astype(self.dtype))


def new_states(arch: Architecture, states: int) -> DeltaStates:
    """A pool of empty states, those of all shards of the rows together."""
    inputs = (arch.delta.conv - 1, arch.delta.channels)

    def make(shape: tuple[int, ...], dtype: str) -> jax.Array:
        return constrain(jnp.zeros((states, *shape), dtype), *STATE_AXES[: 1 + len(shape)])

    return DeltaStates(make(inputs, arch.dtype), make(_state_shape(arch.delta), "float32"))


def _state_shape(delta: DeltaNet) -> tuple[int, int, int]:
    return delta.value_heads, delta.key_dim, delta.value_dim


def take_states(pool: DeltaStates, rows: StateRows) -> DeltaStates:
    """The states that rows read."""
    return DeltaStates(*(_take(x, rows.read_R) for x in pool))


def put_states(pool: DeltaStates, states: DeltaStates, rows: StateRows) -> DeltaStates:
    """The pool with the states that rows write."""
    return DeltaStates(*(_put(x, new, rows.write_R) for x, new in zip(pool, states, strict=True)))


def _take(x: jax.Array, row_R: jax.Array) -> jax.Array:
    take = per_shard(
        lambda x, row_R: x.at[row_R].get(mode="fill", fill_value=0),
        (STATE_AXES[: x.ndim], ("rows",)),
        STATE_AXES[: x.ndim],
    )
    return take(x, row_R)


def _put(x: jax.Array, new: jax.Array, row_R: jax.Array) -> jax.Array:
    put = per_shard(
        lambda x, new, row_R: x.at[row_R].set(new, mode="drop"),
        (STATE_AXES[: x.ndim], STATE_AXES[: x.ndim], ("rows",)),
        STATE_AXES[: x.ndim],
    )
    return put(x, new, row_R)
