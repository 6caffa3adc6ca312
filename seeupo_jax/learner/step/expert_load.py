"""What the routers of a pass chose, counted over its tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.learner.step.loss_config import LossConfig
from seeupo_jax.policy.architecture import Routing
from seeupo_jax.types import TurnBatch


class RouterCounts(NamedTuple):
    """Counts over the tokens that `TurnBatch.counted_MRL` marks.

    load_YE: int32, tokens of each expert, a row a layer that has experts.
    routed: float32, (token, layer) pairs whose experts were given.
    mismatched: float32, those of them that the router would have sent to other experts.
    """

    load_YE: jax.Array
    routed: jax.Array
    mismatched: jax.Array

    @classmethod
    def zeros(cls, routing: Routing) -> RouterCounts:
        load_YE = jnp.zeros((routing.layers, routing.experts), jnp.int32)
        return cls(load_YE, jnp.zeros(()), jnp.zeros(()))

    def plus(self, other: RouterCounts) -> RouterCounts:
        return RouterCounts(*(a + b for a, b in zip(self, other, strict=True)))


def count_routed(routing: Routing, row: TurnBatch, chosen_RLG: jax.Array) -> RouterCounts:
    """The counts of one microbatch.

    Args:
      chosen_RLG: the routers' own choice, `Computed.chosen_NLG`.
    """
    counted_RL = row.counted_MRL
    by_layer = lambda x_RLG: x_RLG.reshape(*counted_RL.shape, routing.layers, -1)  # noqa: E731
    own_RLYP, unknown = by_layer(chosen_RLG.astype(jnp.int32)), routing.unknown
    used_RLYP, routed, mismatched = own_RLYP, jnp.zeros(()), jnp.zeros(())
    if row.expert_MRLG is not None:
        given_RLYP = by_layer(row.expert_MRLG.astype(jnp.int32))
        known_RLYP = given_RLYP != unknown
        used_RLYP = jnp.where(known_RLYP, given_RLYP, own_RLYP)
        # As sets: the order is that of the probabilities.
        same_RLY = (own_RLYP[..., :, None] == used_RLYP[..., None, :]).any(axis=-1).all(axis=-1)
        known_RLY = known_RLYP.all(axis=-1) & counted_RL[:, :, None]
        routed = known_RLY.sum(dtype=jnp.float32)
        mismatched = (known_RLY & ~same_RLY).sum(dtype=jnp.float32)
    layer_RLYP = jax.lax.broadcasted_iota(jnp.int32, used_RLYP.shape, 2)
    load_YE = jnp.zeros((routing.layers, routing.experts), jnp.int32)
    counted_RLYP = jnp.broadcast_to(counted_RL[:, :, None, None], used_RLYP.shape)
    load_YE = load_YE.at[layer_RLYP, used_RLYP].add(counted_RLYP.astype(jnp.int32))
    return RouterCounts(load_YE, routed, mismatched)


def routing_sums(
    config: LossConfig, routing: Routing | None, row: TurnBatch, chosen_RLG: jax.Array | None
) -> dict[str, jax.Array]:
    """What a step counts of one microbatch for its metrics; nothing without replay."""
    if config.options.router_replay == "none":
        return {}
    counts = count_routed(routing, row, chosen_RLG)
    return {"routed": counts.routed, "router_mismatched": counts.mismatched}
