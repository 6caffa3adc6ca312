"""Counts of the experts that the routers of a pass chose."""

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
    replayed: float32, (token, layer) pairs whose experts were given.
    mismatched: float32, those of them that the router would have sent to other experts.
    """

    load_YE: jax.Array
    replayed: jax.Array
    mismatched: jax.Array

    @classmethod
    def zeros(cls, routing: Routing) -> RouterCounts:
        load_YE = jnp.zeros((routing.layers, routing.experts), jnp.int32)
        return cls(load_YE, jnp.zeros(()), jnp.zeros(()))

    def plus(self, other: RouterCounts) -> RouterCounts:
        return RouterCounts(*(a + b for a, b in zip(self, other, strict=True)))


def count_routed(routing: Routing, row: TurnBatch, routed_RLG: jax.Array) -> RouterCounts:
    """The counts of one microbatch.

    Args:
      routed_RLG: the routers' own choice, `Computed.routed_NLG`.
    """
    counted_RL = row.counted_MRL

    def by_layer(x_RLG: jax.Array) -> jax.Array:
        return x_RLG.reshape(*counted_RL.shape, routing.layers, -1)

    routed_RLYP, unknown = by_layer(routed_RLG.astype(jnp.int32)), routing.unknown
    used_RLYP, replayed, mismatched = routed_RLYP, jnp.zeros(()), jnp.zeros(())
    if row.expert_MRLG is not None:
        given_RLYP = by_layer(row.expert_MRLG.astype(jnp.int32))
        replayed_RLYP = given_RLYP != unknown
        used_RLYP = jnp.where(replayed_RLYP, given_RLYP, routed_RLYP)
        # As sets: the order is that of the probabilities.
        same_RLY = (routed_RLYP[..., :, None] == used_RLYP[..., None, :]).any(axis=-1).all(axis=-1)
        replayed_RLY = replayed_RLYP.all(axis=-1) & counted_RL[:, :, None]
        replayed = replayed_RLY.sum(dtype=jnp.float32)
        mismatched = (replayed_RLY & ~same_RLY).sum(dtype=jnp.float32)
    layer_RLYP = jax.lax.broadcasted_iota(jnp.int32, used_RLYP.shape, 2)
    load_YE = jnp.zeros((routing.layers, routing.experts), jnp.int32)
    counted_RLYP = jnp.broadcast_to(counted_RL[:, :, None, None], used_RLYP.shape)
    load_YE = load_YE.at[layer_RLYP, used_RLYP].add(counted_RLYP.astype(jnp.int32))
    return RouterCounts(load_YE, replayed, mismatched)


def routing_sums(
    config: LossConfig, routing: Routing | None, row: TurnBatch, routed_RLG: jax.Array | None
) -> dict[str, jax.Array]:
    """Sums of one microbatch for a step's metrics; empty without replay."""
    if config.options.router_replay == "none":
        return {}
    counts = count_routed(routing, row, routed_RLG)
    return {"replayed": counts.replayed, "router_mismatched": counts.mismatched}
