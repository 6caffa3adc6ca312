"""A mixture of experts as the feed-forward (Qwen3-MoE): each token is routed to a few of many.

Axes beyond the legend in `types.py`:
  X  tokens of all rows     E  experts     F  width of an expert
  P  experts of one token   S  (token, expert) pairs, sorted by expert

A router may be given the experts of its tokens, those that another pass chose for them: routing
replay (GSPO, arXiv:2507.18071 §5.3; R3, arXiv:2510.11370 §3). Only the choice is replayed: a
token's weights are the router's own probabilities of the experts given, so it trains as before.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.parallel.mesh import RULES, per_shard
from seeupo_jax.policy.architecture import Architecture, Routing

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
        self.routing = Routing(1, per_token, experts)

        def matrix(shape: tuple[int, ...], *logical: str | None, gain: float = 1.0) -> nnx.Param:
            init = jax.random.normal(rngs.params(), shape) * (gain * shape[-2] ** -0.5)
            return nnx.Param(init, logical=logical)

        self.router = matrix((D, E), "embed", None)
        self.gate = matrix((E, D, F), "experts", "embed", "mlp")
        self.up = matrix((E, D, F), "experts", "embed", "mlp")
        self.down = matrix((E, F, D), "experts", "mlp", "embed", gain=gain)

    def __call__(
        self, x_NLD: jax.Array, given_NLP: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Each token's weighted sum of its experts' outputs, [N, L, D] of `x_NLD`'s dtype.

        Args:
          given_NLP: the experts of each token, `routing.unknown` where the router is to choose.
            None: it chooses everywhere.

        Returns: the sums, and the router's own choice [N, L, P], of `routing.dtype`.
        """
        rows = ("rows", "length", "embed")
        params = (self.router, self.gate, self.up, self.down)
        # Of a layer of a scan they still begin with that of the stack.
        names = [param.get_metadata("logical")[-param[...].ndim :] for param in params]
        arrays = [x_NLD, *(param[...].astype(x_NLD.dtype) for param in params)]
        if given_NLP is None:
            return per_shard(self._run, [rows, *names], rows)(*arrays)
        return per_shard(self._run, [rows, *names, rows], rows)(*arrays, given_NLP)

    def _run(
        self,
        x_NLD: jax.Array,
        router_DE: jax.Array,
        gate_EDF: jax.Array,
        up_EDF: jax.Array,
        down_EFD: jax.Array,
        given_NLP: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The layer on one device's rows, with its own experts."""
        matrices, P = (gate_EDF, up_EDF, down_EFD), self.per_token
        x_XD = x_NLD.reshape(-1, x_NLD.shape[-1])
        weight_XP, expert_XP, own_XP = route(
            x_XD,
            router_DE,
            None if given_NLP is None else given_NLP.reshape(-1, P),
            per_token=P,
            normalize=self.normalize,
            unknown=self.routing.unknown,
        )
        own_NLP = own_XP.reshape(*x_NLD.shape[:2], P).astype(self.routing.dtype)
        local = matrices[0].shape[0]
        sharded = local < router_DE.shape[1]
        if sharded:

            def gather(y: jax.Array) -> jax.Array:
                return jax.lax.all_gather(y, EXPERT, tiled=True)

            x_XD, weight_XP, expert_XP = map(gather, (x_XD, weight_XP, expert_XP))
            expert_XP = expert_XP - jax.lax.axis_index(EXPERT) * local
        y_XD = mix_experts(x_XD, weight_XP, expert_XP, *matrices)
        if sharded:
            y_XD = jax.lax.psum_scatter(y_XD, EXPERT, tiled=True)
        if jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1) > 1:
            y_XD = jax.lax.psum(y_XD, TENSOR)
        return y_XD.reshape(x_NLD.shape), own_NLP


def split_by_layer(arch: Architecture, given_NLG: jax.Array | None) -> list[jax.Array | None]:
    """Each layer's part of the experts given; None where it has none to be given."""
    if given_NLG is None or arch.routing is None:
        return [None] * arch.layers
    parts = iter(jnp.split(given_NLG, arch.routing.layers, axis=-1))
    return [next(parts) if arch.is_sparse(layer) else None for layer in range(arch.layers)]


def route(
    x_XD: jax.Array,
    router_DE: jax.Array,
    given_XP: jax.Array | None = None,
    *,
    per_token: int,
    normalize: bool,
    unknown: int = -1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The experts of each token, and what their outputs weigh.

    Args:
      given_XP: the experts, `unknown` where the router chooses; None: it chooses everywhere.

    Returns: weight_XP of x's dtype, from a float32 softmax over all experts; expert_XP, int32; and
      the router's own choice, int32 [X, P]: the most probable ones, of equal ones the first.
    """
    probability_XE = jax.nn.softmax((x_XD @ router_DE).astype(jnp.float32), axis=-1)
    weight_XP, own_XP = jax.lax.top_k(probability_XE, per_token)
    expert_XP = own_XP
    if given_XP is not None:
        given_XP = given_XP.astype(jnp.int32)
        expert_XP = jnp.where(given_XP == unknown, own_XP, given_XP)
        weight_XP = jnp.take_along_axis(probability_XE, expert_XP, axis=1)
    if normalize:
        weight_XP = weight_XP / weight_XP.sum(axis=-1, keepdims=True)
    return weight_XP.astype(x_XD.dtype), expert_XP, own_XP


def mix_experts(
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
