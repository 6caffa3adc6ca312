"""A mixture of experts as the feed-forward: each token is routed to a few of many.

Axes beyond the legend in `types.py`:
  X  tokens of all rows     E  experts     F  width of an expert     C  groups of experts
  P  experts of one token   S  (token, expert) pairs, sorted by expert

A router may be given the experts of its tokens, those that another pass chose for them: routing
replay (GSPO, arXiv:2507.18071 §5.3; R3, arXiv:2510.11370 §3). Only the choice is replayed: a
token's weights are the router's own scores of the experts given, so it trains as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.parallel.mesh import RULES, per_shard
from seeupo_jax.policy.architecture import (
    SELECTION_BIAS,
    Architecture,
    LoraAdapters,
    Moe,
    Routing,
)
from seeupo_jax.policy.kernels.grouped import grouped_product
from seeupo_jax.policy.turn_factors import below_each_other, own_activations, side_by_side

EXPERT, TENSOR = RULES["experts"], RULES["mlp"]
# Parameters of a layer's router and experts, each with its logical axes.
_ROUTER = {"router": ("embed", None), "router_bias": (None,), SELECTION_BIAS: (None,)}
_EXPERTS = {
    "gate": ("experts", "embed", "mlp"),
    "up": ("experts", "embed", "mlp"),
    "down": ("experts", "mlp", "embed"),
    "gate_bias": ("experts", "mlp"),
    "up_bias": ("experts", "mlp"),
    "down_bias": ("experts", "embed"),
    # Low-rank adapters: gate and up read one A, as PEFT's, which has them as one matrix.
    "lora_gate_up_a": ("experts", "embed", "rank"),
    "lora_gate_b": ("experts", "rank", "mlp"),
    "lora_up_b": ("experts", "rank", "mlp"),
    "lora_down_a": ("experts", "mlp", "rank"),
    "lora_down_b": ("experts", "rank", "embed"),
}
_TINY = 1e-20  # of sigmoids that may all be 0, as in DeepSeek-V3


class RouterOutput(NamedTuple):
    """The outputs of a layer's router.

    expert_NLP: its own choice for each token, of `Routing.dtype`. logits_NLE: float32.
    """

    expert_NLP: jax.Array
    logits_NLE: jax.Array


class Experts(nnx.Module):
    """A sparse SwiGLU feed-forward; no expert has a capacity, so no token is ever dropped.

    On a mesh the experts are sharded over the axis `expert`: its devices gather each other's
    tokens, each runs its own experts on all of them, and the sums are scattered back. Matrices of
    experts are sharded over `tensor` as those of a dense feed-forward.

    Time and memory grow with the experts of a token, not with all (`policy/kernels/grouped.py`).
    """

    def __init__(
        self,
        width: int,
        moe: Moe,
        rngs: nnx.Rngs,
        *,
        gain: float,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        lora: LoraAdapters | None = None,
        shared: Callable[[jax.Array], jax.Array] | None = None,
    ):
        """
        Args:
          width: D of the residual stream.
          gain: factor on the initial size of `down`, which writes into the residual stream.
          activation: of the gates, but where `moe.swiglu_limit` is set.
          lora: adapters of the experts, which get their first values in `policy/lora.py`.
          shared: the expert that all tokens use, a module; None: there is none.
        """
        self.activation, self.lora = activation, lora
        D, F, E = width, moe.mlp_width, moe.experts
        self.moe, self.routing = moe, Routing(1, moe.per_token, moe.experts)

        def matrix(name: str, shape: tuple[int, ...], gain: float = 1.0) -> nnx.Param:
            init = jax.random.normal(rngs.params(), shape) * (gain * shape[-2] ** -0.5)
            return nnx.Param(init, logical=(_ROUTER | _EXPERTS)[name])

        def zeros(name: str, shape: tuple[int, ...]) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape), logical=(_ROUTER | _EXPERTS)[name])

        def adapter(name: str, shape: tuple[int, ...]) -> nnx.Param:
            if not lora.per_turn:
                return zeros(name, shape)
            logical = ("adapters", *_EXPERTS[name])
            return nnx.Param(jnp.zeros((lora.per_turn, *shape)), logical=logical)

        self.router = matrix("router", (D, E))
        self.gate = matrix("gate", (E, D, F))
        self.up = matrix("up", (E, D, F))
        self.down = matrix("down", (E, F, D), gain)
        if moe.selection_bias:
            self.selection_bias = zeros(SELECTION_BIAS, (E,))
        if moe.biases:
            self.router_bias = zeros("router_bias", (E,))
            self.gate_bias = zeros("gate_bias", (E, F))
            self.up_bias = zeros("up_bias", (E, F))
            self.down_bias = zeros("down_bias", (E, D))
        if lora is not None and "gate_proj" in lora.targets:
            self.lora_gate_up_a = adapter("lora_gate_up_a", (E, D, lora.rank))
            self.lora_gate_b = adapter("lora_gate_b", (E, lora.rank, F))
            self.lora_up_b = adapter("lora_up_b", (E, lora.rank, F))
        if lora is not None and "down_proj" in lora.targets:
            self.lora_down_a = adapter("lora_down_a", (E, F, lora.rank))
            self.lora_down_b = adapter("lora_down_b", (E, lora.rank, D))
        self.shared = shared
        if moe.shared_gate:
            init = jax.random.normal(rngs.params(), (D, 1)) * D**-0.5
            self.shared_gate = nnx.Param(init, logical=("embed", None))

    def __call__(
        self,
        x_NLD: jax.Array,
        given_NLP: jax.Array | None = None,
        adapter_NL: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterOutput]:
        """Each token's weighted sum of its experts' outputs, [N, L, D] of `x_NLD`'s dtype.

        Args:
          given_NLP: the experts of each token, `routing.unknown` where the router is to choose.
            None: it chooses everywhere.
          adapter_NL: of each token, where adapters are per turn.

        Returns: the sums, and the router's output.
        """
        rows = ("rows", "length", "embed")
        own, arrays = vars(self), {"x": x_NLD}
        logical: dict[str, tuple[str | None, ...]] = {"x": rows}
        for name, axes in (_ROUTER | _EXPERTS).items():
            if isinstance(own.get(name), nnx.Param):
                dtype = jnp.float32 if name == SELECTION_BIAS else x_NLD.dtype
                arrays[name], logical[name] = own[name][...].astype(dtype), axes
        if given_NLP is not None:
            arrays["given"], logical["given"] = given_NLP, rows
        if self.lora is not None and self.lora.per_turn:
            assert adapter_NL is not None  # `Transformer` says so in a sentence
            arrays["adapter"], logical["adapter"] = adapter_NL, rows[:2]
            for name in [name for name in arrays if name.startswith("lora_")]:
                join = side_by_side if name.endswith("_a") else below_each_other
                arrays[name] = join(arrays[name])

        def run(*parts: jax.Array) -> tuple[jax.Array, RouterOutput]:
            return self._run(dict(zip(arrays, parts, strict=True)))

        y_NLD, routed = per_shard(run, [*logical.values()], rows)(*arrays.values())
        if self.shared is not None:
            shared_NLD = self.shared(x_NLD)
            if self.moe.shared_gate:
                scale_NL1 = jax.nn.sigmoid(x_NLD @ self.shared_gate[...].astype(x_NLD.dtype))
                shared_NLD = scale_NL1 * shared_NLD
            y_NLD = y_NLD + shared_NLD
        return y_NLD, routed

    def _run(self, arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, RouterOutput]:
        """The router and the experts on one device's rows, with its own experts."""
        x_NLD, given_NLP, P = arrays["x"], arrays.get("given"), self.moe.per_token
        x_XD = x_NLD.reshape(-1, x_NLD.shape[-1])
        routed = route(
            x_XD,
            {name: arrays[name] for name in _ROUTER if name in arrays},
            None if given_NLP is None else given_NLP.reshape(-1, P),
            moe=self.moe,
            unknown=self.routing.unknown,
        )
        own_NLP = routed.own_XP.reshape(*x_NLD.shape[:2], P).astype(self.routing.dtype)
        output = RouterOutput(own_NLP, routed.logits_XE.reshape(*x_NLD.shape[:2], -1))
        experts = {name: arrays[name] for name in _EXPERTS if name in arrays}
        cut = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1) > 1
        if cut and "down_bias" in experts:  # added on one of the devices whose sums are added
            first = jax.lax.axis_index(TENSOR) == 0
            experts["down_bias"] = jnp.where(first, experts["down_bias"], 0)
        local = experts["gate"].shape[0]
        sharded = local < self.moe.experts
        weight_XP, expert_XP = routed.weight_XP, routed.expert_XP
        adapter_X = arrays["adapter"].reshape(-1) if "adapter" in arrays else None
        if sharded:

            def gather(y: jax.Array) -> jax.Array:
                return jax.lax.all_gather(y, EXPERT, tiled=True)

            x_XD, weight_XP, expert_XP = map(gather, (x_XD, weight_XP, expert_XP))
            adapter_X = None if adapter_X is None else gather(adapter_X)
            expert_XP = expert_XP - jax.lax.axis_index(EXPERT) * local
        y_XD = mix_experts(
            x_XD,
            weight_XP,
            expert_XP,
            experts,
            moe=self.moe,
            activation=self.activation,
            lora_scale=1.0 if self.lora is None else self.lora.scale,
            adapter_X=adapter_X,
            adapters=0 if self.lora is None else self.lora.per_turn,
        )
        if sharded:
            y_XD = jax.lax.psum_scatter(y_XD, EXPERT, tiled=True)
        if cut:
            y_XD = jax.lax.psum(y_XD, TENSOR)
        return y_XD.reshape(x_NLD.shape), output


def split_by_layer(arch: Architecture, given_NLG: jax.Array | None) -> list[jax.Array | None]:
    """Each layer's part of the experts given; None where it has none to be given."""
    if given_NLG is None or arch.routing is None:
        return [None] * arch.layers
    parts = iter(jnp.split(given_NLG, arch.routing.layers, axis=-1))
    return [next(parts) if arch.is_sparse(layer) else None for layer in range(arch.layers)]


class Routed(NamedTuple):
    """The experts of each token.

    weight_XP: of their outputs, of the dtype of the tokens. expert_XP: int32.
    own_XP: int32, the router's own choice: those of the highest scores, of equal ones the first.
    logits_XE: float32.
    """

    weight_XP: jax.Array
    expert_XP: jax.Array
    own_XP: jax.Array
    logits_XE: jax.Array


def route(
    x_XD: jax.Array,
    router: Mapping[str, jax.Array],
    given_XP: jax.Array | None = None,
    *,
    moe: Moe,
    unknown: int = -1,
) -> Routed:
    """The experts of each token, and what their outputs weigh.

    Args:
      router: its matrix `router`, and `router_bias` and `selection_bias` where it has them.
      given_XP: the experts, `unknown` where the router chooses; None: it chooses everywhere.
    """
    if moe.scores == "sigmoid":
        logits_XE = jnp.matmul(x_XD, router["router"], preferred_element_type=jnp.float32)
    else:
        logits_XE = (x_XD @ router["router"]).astype(jnp.float32)
    if "router_bias" in router:
        logits_XE = logits_XE + router["router_bias"].astype(jnp.float32)[None, :]
    score_XE = expert_scores(logits_XE, moe)
    own_XP = _choose(jax.lax.stop_gradient(score_XE), router.get(SELECTION_BIAS), moe)
    expert_XP = own_XP
    if given_XP is not None:
        given_XP = given_XP.astype(jnp.int32)
        expert_XP = jnp.where(given_XP == unknown, own_XP, given_XP)
    weight_XP = jnp.take_along_axis(score_XE, expert_XP, axis=1)
    if moe.normalize:
        total_X1 = weight_XP.sum(axis=-1, keepdims=True)
        weight_XP = weight_XP / (total_X1 + _TINY if moe.scores == "sigmoid" else total_X1)
    weight_XP = (weight_XP * moe.scale).astype(x_XD.dtype)
    return Routed(weight_XP, expert_XP, own_XP, logits_XE)


def expert_scores(logits_XE: jax.Array, moe: Moe) -> jax.Array:
    """A token's scores of all experts: float32 in 0 to 1."""
    return jax.nn.softmax(logits_XE) if moe.scores == "softmax" else jax.nn.sigmoid(logits_XE)


def _choose(score_XE: jax.Array, selection_bias_E: jax.Array | None, moe: Moe) -> jax.Array:
    """The experts of the highest scores among those of a token's groups, int32 [X, P]."""
    if selection_bias_E is not None:
        score_XE = score_XE + jax.lax.stop_gradient(selection_bias_E)[None, :]
    if moe.groups_per_token < moe.groups:
        score_XCE = score_XE.reshape(len(score_XE), moe.groups, -1)
        # DeepSeek-V3 takes two (arXiv:2412.19437 §2.1.2), DeepSeek-V2 one.
        best = min(moe.group_best, score_XCE.shape[2])
        of_group_XC = jax.lax.top_k(score_XCE, best)[0].sum(axis=2)
        group_XK = jax.lax.top_k(of_group_XC, moe.groups_per_token)[1]
        chosen_XC = jax.nn.one_hot(group_XK, moe.groups, dtype=bool).any(axis=1)
        score_XE = jnp.where(chosen_XC[:, :, None], score_XCE, -jnp.inf).reshape(score_XE.shape)
    return jax.lax.top_k(score_XE, moe.per_token)[1]


def mix_experts(
    x_XD: jax.Array,
    weight_XP: jax.Array,
    expert_XP: jax.Array,
    experts: Mapping[str, jax.Array],
    *,
    moe: Moe,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    lora_scale: float = 1.0,
    adapter_X: jax.Array | None = None,
    adapters: int = 0,
) -> jax.Array:
    """Each token's sum of its experts' outputs, times their weights, [X, D].

    Args:
      expert_XP: int32 index into the experts here; pairs outside of them add nothing.
      experts: their matrices `gate` and `up` [E, D, F] and `down` [E, F, D], and where they have
        biases and adapters those, such as `gate_bias` [E, F].
      lora_scale: of what adapters add.
      adapter_X: int32, of each token which of so many `adapters` is its own; their factors are then
        those of `turn_factors`. None: there is one.
    """
    E, (X, P) = experts["gate"].shape[0], expert_XP.shape
    group_S = jnp.where(expert_XP < 0, E, expert_XP).reshape(-1)  # foreign ones last
    order_S = jnp.argsort(group_S)
    size_E = jnp.bincount(group_S, length=E)

    def project(x: jax.Array, name: str) -> jax.Array:
        y = grouped_product(x, experts[name], size_E)
        if f"{name}_bias" not in experts:
            return y
        bias = experts[f"{name}_bias"][jnp.minimum(group_S[order_S], E - 1)]
        return y + jnp.where((jnp.arange(X * P) < size_E.sum())[:, None], bias, 0)

    def lower(x: jax.Array, a: str) -> jax.Array | None:
        if a not in experts:
            return None
        low_SR = grouped_product(x, experts[a], size_E)
        if adapter_X is None:
            return low_SR
        return own_activations(low_SR, adapter_X[order_S // P], adapters)

    def adapt(y: jax.Array, low_SR: jax.Array | None, b: str) -> jax.Array:
        if low_SR is None:
            return y
        more = grouped_product(low_SR, experts[b], size_E).astype(jnp.float32) * lora_scale
        return y + more.astype(y.dtype)

    x_SD = x_XD[order_S // P]
    low_SR = lower(x_SD, "lora_gate_up_a")
    gate_SF = adapt(project(x_SD, "gate"), low_SR, "lora_gate_b")
    up_SF = adapt(project(x_SD, "up"), low_SR, "lora_up_b")
    h_SF = _gated(gate_SF, up_SF, moe, activation)
    y_SD = adapt(project(h_SF, "down"), lower(h_SF, "lora_down_a"), "lora_down_b")
    place_XP = jnp.argsort(order_S).reshape(X, P)
    return jnp.einsum("xp,xpd->xd", weight_XP, y_SD[place_XP])


def _gated(
    gate: jax.Array, up: jax.Array, moe: Moe, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    limit = moe.swiglu_limit
    if limit is None:
        return activation(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(moe.swiglu_alpha * gate)
