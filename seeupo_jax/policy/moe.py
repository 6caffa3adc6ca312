"""A mixture of experts as the feed-forward (Qwen3-MoE): each token is routed to a few of many.

Axes beyond the legend in `types.py`:
  X  tokens of all rows     E  experts     F  width of an expert
  P  experts of one token   S  (token, expert) pairs, sorted by expert
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.parallel.mesh import RULES, per_shard

EXPERT, TENSOR = RULES["experts"], RULES["mlp"]


class Experts(nnx.Module):
    """A sparse SwiGLU feed-forward; no expert has a capacity, so no token is ever dropped.

    On a mesh the experts are sharded over the axis `expert`: its devices gather each other's
    tokens, each runs its own experts on all of them, and the sums are scattered back. Matrices of
    experts are sharded over `tensor` as those of a dense feed-forward.

    The grouped matmuls are `jax.lax.ragged_dot`, a native instruction on TPU. On CPU, and on GPUs
    whose XLA has no kernel for it, XLA multiplies a masked copy of all sorted tokens for each
    expert of the device: time and memory grow with E, which sharding divides.
    """

    def __init__(
        self,
        width: int,
        mlp_width: int,
        experts: int,
        per_token: int,
        normalize: bool,
        rngs: nnx.Rngs,
        *,
        gain: float,
    ):
        """
        Args:
          width, mlp_width: D of the residual stream and F of one expert.
          experts, per_token: how many there are, and how many of them each token runs through.
          normalize: whether the weights of a token's experts are scaled to sum to 1.
          gain: factor on the initial size of `down`, which writes into the residual stream.

        Raises:
          ValueError: `per_token` is not in 1 to `experts`.
        """
        if not 1 <= per_token <= experts:
            raise ValueError(
                f"experts per token: got {per_token}; allowed: 1 to {experts}, all the experts."
            )
        D, F, E = width, mlp_width, experts
        self.per_token, self.normalize = per_token, normalize

        def matrix(shape: tuple[int, ...], *logical: str | None, gain: float = 1.0) -> nnx.Param:
            init = jax.random.normal(rngs.params(), shape) * (gain * shape[-2] ** -0.5)
            return nnx.Param(init, logical=logical)

        self.router = matrix((D, E), "embed", None)
        self.gate = matrix((E, D, F), "experts", "embed", "mlp")
        self.up = matrix((E, D, F), "experts", "embed", "mlp")
        self.down = matrix((E, F, D), "experts", "mlp", "embed", gain=gain)

    def __call__(self, x_NLD: jax.Array) -> jax.Array:
        """Each token's weighted sum of its experts' outputs, [N, L, D] of `x_NLD`'s dtype."""
        rows = ("rows", "length", "embed")
        params = (self.router, self.gate, self.up, self.down)
        names = [param.get_metadata("logical") for param in params]
        run = per_shard(self._run, [rows, *names], rows)
        return run(x_NLD, *(param[...].astype(x_NLD.dtype) for param in params))

    def _run(self, x_NLD: jax.Array, router_DE: jax.Array, *matrices: jax.Array) -> jax.Array:
        """The layer on one device's rows, with its own experts."""
        x_XD = x_NLD.reshape(-1, x_NLD.shape[-1])
        weight_XP, expert_XP = route(
            x_XD, router_DE, per_token=self.per_token, normalize=self.normalize
        )
        local = matrices[0].shape[0]
        sharded = local < router_DE.shape[1]
        if sharded:
            gather = lambda y: jax.lax.all_gather(y, EXPERT, tiled=True)  # noqa: E731
            x_XD, weight_XP, expert_XP = map(gather, (x_XD, weight_XP, expert_XP))
            expert_XP = expert_XP - jax.lax.axis_index(EXPERT) * local
        y_XD = mix(x_XD, weight_XP, expert_XP, *matrices)
        if sharded:
            y_XD = jax.lax.psum_scatter(y_XD, EXPERT, tiled=True)
        if jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1) > 1:
            y_XD = jax.lax.psum(y_XD, TENSOR)
        return y_XD.reshape(x_NLD.shape)


def route(
    x_XD: jax.Array, router_DE: jax.Array, *, per_token: int, normalize: bool
) -> tuple[jax.Array, jax.Array]:
    """The most probable experts of each token; of equal ones the first.

    Returns: weight_XP of x's dtype, from a float32 softmax over all experts, and expert_XP, int32.
    """
    probability_XE = jax.nn.softmax((x_XD @ router_DE).astype(jnp.float32), axis=-1)
    weight_XP, expert_XP = jax.lax.top_k(probability_XE, per_token)
    if normalize:
        weight_XP = weight_XP / weight_XP.sum(axis=-1, keepdims=True)
    return weight_XP.astype(x_XD.dtype), expert_XP


def mix(
    x_XD: jax.Array,
    weight_XP: jax.Array,
    expert_XP: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
    """Each token's sum of its experts' outputs, times their weights, [X, D].

    Args:
      expert_XP: int32 index into the matrices' E; pairs outside of 0 .. E-1 add nothing.
    """
    E, (X, P) = gate_EDF.shape[0], expert_XP.shape
    group_S = jnp.where(expert_XP < 0, E, expert_XP).reshape(-1)  # foreign ones last
    order_S = jnp.argsort(group_S)
    size_E = jnp.bincount(group_S, length=E)
    # A grouped matmul leaves rows of no group undefined on some devices, forwards and backwards:
    # cleared in its input (for the gradient) and its output.
    real_S = (jnp.arange(X * P) < size_E.sum())[:, None]
    x_SD = jnp.where(real_S, x_XD[order_S // P], 0)
    gate_SF = jax.lax.ragged_dot(x_SD, gate_EDF, size_E)
    up_SF = jax.lax.ragged_dot(x_SD, up_EDF, size_E)
    y_SD = jax.lax.ragged_dot(jax.nn.silu(gate_SF) * up_SF, down_EFD, size_E)
    y_SD = jnp.where(real_S, y_SD, 0)
    place_XP = jnp.argsort(order_S).reshape(X, P)
    return jnp.einsum("xp,xpd->xd", weight_XP, y_SD[place_XP])
