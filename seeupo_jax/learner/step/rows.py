"""The rows of one microbatch on the device, and the spans that lie in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.parallel.mesh import constrain
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.attention import KeyValues, Tree
from seeupo_jax.policy.network import Network
from seeupo_jax.policy.transformer import Computed
from seeupo_jax.types import TurnBatch

_OF_ROWS = (
    *("tokens_MRL", "depth_MRL", "end_MRL", "parent_MRX", "target_MRX"),
    *("segment_MRL", "counted_MRL", "expert_MRLG", "adapter_MRL"),
    *("teacher_top_MRXK", "teacher_top_logp_MRXJ"),
)


def microbatch(batch: TurnBatch, index: jax.Array) -> TurnBatch:
    """Microbatch `index`: its rows, sharded over the mesh, and its own spans' slots in them.

    Other spans have no mask.
    """
    held = {name: x for name in _OF_ROWS if (x := getattr(batch, name)) is not None}
    rows = {name: take(x, index) for name, x in held.items()}
    slot_PA, mask_PA = own_slots(batch.slot_PA, batch.mask_PA, index, rows["target_MRX"].size)
    return batch._replace(**rows, slot_PA=slot_PA, mask_PA=mask_PA)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Part `index` of an array: rows, sharded over the mesh."""
    x = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
    return constrain(x, "rows", *(None,) * (x.ndim - 1))


def own_slots(
    slot_PA: jax.Array, mask_PA: jax.Array, index: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Slots within part `index` of flattened parts of a size, and the mask of what lies in it."""
    own_PA = slot_PA - index * size
    inside_PA = (own_PA >= 0) & (own_PA < size)
    return own_PA.clip(0, size - 1), jnp.where(inside_PA, mask_PA, 0.0)


def of_spans(x_RX: jax.Array, slot_PA: jax.Array, mask_PA: jax.Array) -> jax.Array:
    """Values [R, X, ...] of the rows' predictions at the spans' tokens: [P, A, ...]; 0 where the
    mask is 0."""
    own = x_RX.reshape(-1, *x_RX.shape[2:])[slot_PA]
    held = mask_PA > 0
    return jnp.where(held.reshape(*held.shape, *(1,) * (own.ndim - 2)), own, 0)


def compute_row(network: Network, params: Any, row: TurnBatch) -> Computed:
    """The pass over one microbatch."""
    tree = None if row.segment_MRL is not None else Tree(row.depth_MRL, row.end_MRL)
    return policy.compute(
        network,
        params,
        row.tokens_MRL,
        tree=tree,
        segment_NL=row.segment_MRL,
        given_NLG=row.expert_MRLG,
        adapter_NL=row.adapter_MRL,
    )


class RowLogp(NamedTuple):
    """log π of a microbatch's predicted tokens, and entropies of their distributions (nats).

    entropy_RX: None if it was not requested. collision_RX: sums of squared probabilities; likewise.
    hidden_RXD: the states that predict.
    keys: keys and values of the pass. routed_RLG, router_RLYE: what its routers chose, and their
      logits; None without experts.
    forward_kl_RX: divergences from the teacher's distributions; None: not requested.
    """

    logp_RX: jax.Array
    entropy_RX: jax.Array | None
    hidden_RXD: jax.Array
    keys: list[KeyValues]
    routed_RLG: jax.Array | None
    router_RLYE: jax.Array | None
    collision_RX: jax.Array | None = None
    forward_kl_RX: jax.Array | None = None


def row_logp(
    network: Network,
    params: Any,
    row: TurnBatch,
    temperature: float,
    *,
    entropy: bool = False,
    collision: bool = False,
    forward_kl: bool = False,
) -> RowLogp:
    """Log-probabilities of one microbatch; see `RowLogp`. `collision` computes the entropy too.

    With `forward_kl` no collision is computed.
    """
    hidden_RLD, keys, *routed = compute_row(network, params, row)
    if forward_kl:
        hidden_RXD = policy.gather_positions(hidden_RLD, row.parent_MRX)
        teacher = row.teacher_top_MRXK, row.teacher_top_logp_MRXJ
        options = {"temperature": temperature, "entropy": entropy}
        logp_RX, *entropy_RX, kl_RX = policy.token_logp_and_forward_kl(
            network, params, hidden_RXD, row.target_MRX, *teacher, **options
        )
        found = logp_RX, entropy_RX[0] if entropy else None, hidden_RXD
        return RowLogp(*found, list(keys), *routed, forward_kl_RX=kl_RX)
    if not (entropy or collision):
        logp_RX, hidden_RXD = logp_at(
            network, params, hidden_RLD, row.parent_MRX, row.target_MRX, temperature
        )
        return RowLogp(logp_RX, None, hidden_RXD, list(keys), *routed)
    hidden_RXD = policy.gather_positions(hidden_RLD, row.parent_MRX)
    find = policy.token_logp_and_statistics if collision else policy.token_logp_and_entropy
    logp_RX, entropy_RX, *more = find(
        network, params, hidden_RXD, row.target_MRX, temperature=temperature
    )
    return RowLogp(logp_RX, entropy_RX, hidden_RXD, list(keys), *routed, *more)


def logp_at(
    network: Network,
    params: Any,
    hidden_RLD: jax.Array,
    parent_RX: jax.Array,
    target_RX: jax.Array,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """log π of some tokens, each predicted by its parent, and the parents' hidden states."""
    hidden_RXD = policy.gather_positions(hidden_RLD, parent_RX)
    logp_RX = policy.token_logp(network, params, hidden_RXD, target_RX, temperature=temperature)
    return logp_RX, hidden_RXD


def row_top(
    network: Network,
    params: Any,
    row: TurnBatch,
    temperature: float,
    count: int,
    among: Architecture,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`network.token_logp_and_top` of one microbatch's predictions: [R, X, ...]."""
    hidden_RXD = policy.gather_positions(
        compute_row(network, params, row).hidden_NLD, row.parent_MRX
    )
    options = {"temperature": temperature, "count": count, "among": among}
    return policy.token_logp_and_top(network, params, hidden_RXD, row.target_MRX, **options)
