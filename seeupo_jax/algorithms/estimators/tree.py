"""Credit in a tree of trajectories: what a turn changes about the reward that its leaves get."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimator_options import Options
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.estimators.grae import group_relative_advantage
from seeupo_jax.algorithms.standardize import exact_unit, standardize
from seeupo_jax.options import choice


class _Nodes(NamedTuple):
    """Statistics of the node that each turn leads to, [N, K]; 0 where there is no turn.

    leaves_NK: trajectories that pass it. value_NK: the mean of their rewards.
    """

    leaves_NK: jax.Array
    value_NK: jax.Array


@functools.partial(jax.jit, static_argnames=("baseline", "scale", "clip"))
def tree_advantage(
    reward_N: jax.Array,
    group_N: jax.Array,
    valid_N: jax.Array,
    node_NK: jax.Array,
    reward_NK: jax.Array | None = None,
    *,
    baseline: str = "parent",
    scale: str = "none",
    clip: float | None = 3.0,
) -> jax.Array:
    """The value of a turn's node less that of the node where its branch began.

    SPO, arXiv:2505.23564: V(node) is the mean reward of its leaves, A(child) = V(child) -
    V(parent). Nodes are where trajectories part and where they end; the turns between two of them
    are one branch and share its advantage. The root is the beginning of the group. Where nothing
    is shared, A is the reward less the group's mean.

    Args:
      reward_N: [N], reward units; those of invalid trajectories are not read.
      group_N: int [N], any ids; trajectories of one task have equal ones.
      valid_N: bool [N]; False leaves a trajectory out of everything.
      node_NK: int [N, K], equal where trajectories of a group share a turn, which they then do
        with all turns before it; negative where there is no such turn.
      reward_NK: [N, K], reward units, of each turn, equal where it is shared; for `siblings`.
      baseline: `parent`; `root`: V(node) - V(root), the mean over the node's leaves of their
        group-relative advantages (ARPO, arXiv:2507.19849, its "hard" estimate); `siblings`: the
        turn's own reward less the mean over the turns that begin where it does, each shared one
        counting once (SLATE, arXiv:2602.23440, Eq. 5, with scale `group`: by their deviation); 0
        where there is no other.
      scale: `none`; `group`: divided by the deviation (n - 1) of the group's rewards plus 1e-6;
        `batch`: standardised over all turns, a shared one counting once.
      clip: bound > 0 on the magnitude after `batch` scaling, None for no bound.

    Returns:
      float32 [N, K], the same wherever a turn is shared; 0 where there is no turn.

    Raises:
      ValueError: an unknown baseline or scale, arrays of other shapes.
    """
    for name, value, allowed in (("baseline", baseline, _BASELINES), ("scale", scale, _SCALES)):
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}; allowed: {', '.join(allowed)}.")
    reward_N, group_N = jnp.asarray(reward_N, jnp.float32), jnp.asarray(group_N)
    valid_N, node_NK = jnp.asarray(valid_N, bool), jnp.asarray(node_NK, jnp.int32)
    chex.assert_rank(node_NK, 2, custom_message="node_NK: [N, K]", exception_type=ValueError)
    chex.assert_shape(
        [reward_N, group_N, valid_N],
        node_NK.shape[:1],
        custom_message="reward_N, group_N, valid_N: [N]",
        exception_type=ValueError,
    )
    is_NK = (node_NK >= 0) & valid_N[:, None]
    if baseline == "siblings":
        reward_NK = _checked_rewards(reward_NK, node_NK)
        return _over_siblings(reward_NK, group_N, node_NK, is_NK, scale=scale, clip=clip)
    # Over the group's mean first: what all leaves of a group have in common would cost digits.
    over_N = group_relative_advantage(reward_N, group_N, scale="none", valid_N=valid_N)
    unit = exact_unit(jnp.max(jnp.abs(over_N), initial=0.0))
    nodes = _nodes(over_N / unit, jnp.where(is_NK, node_NK, -1))
    advantage_NK = _VALUES[baseline](nodes, _group_sizes(group_N, valid_N)) * unit
    advantage_NK = jnp.where(is_NK, advantage_NK, 0.0)
    if scale == "group":
        deviation_N = _deviation(over_N / unit, group_N, valid_N)
        return advantage_NK / unit / (deviation_N + 1e-6 / unit)[:, None]
    if scale == "batch":
        return _over_nodes(advantage_NK, node_NK, is_NK, clip)
    return advantage_NK


def _nodes(reward_N: jax.Array, node_NK: jax.Array) -> _Nodes:
    """Leaves and values, from rewards over their group's mean."""
    is_NK = node_NK >= 0
    _, index_M = jnp.unique(node_NK.ravel(), return_inverse=True, size=node_NK.size)
    reward_NK = jnp.where(is_NK, reward_N[:, None], 0.0)
    count_M, total_M = (
        jax.ops.segment_sum(x_NK.ravel(), index_M.ravel(), num_segments=node_NK.size)
        for x_NK in (is_NK.astype(jnp.float32), reward_NK)
    )
    leaves_NK, total_NK = (x_M[index_M].reshape(node_NK.shape) for x_M in (count_M, total_M))
    leaves_NK = jnp.where(is_NK, leaves_NK, 0.0)
    return _Nodes(leaves_NK, jnp.where(is_NK, total_NK / jnp.maximum(leaves_NK, 1.0), 0.0))


def _group_sizes(group_N: jax.Array, valid_N: jax.Array) -> jax.Array:
    """Valid trajectories of each one's group, float32 [N]."""
    _, index_N = jnp.unique(group_N, return_inverse=True, size=group_N.shape[0])
    size_N = jax.ops.segment_sum(valid_N.astype(jnp.float32), index_N, group_N.shape[0])
    return size_N[index_N]


def _over_parent(nodes: _Nodes, size_N: jax.Array) -> jax.Array:
    """V(child) - V(parent); a branch begins where fewer leaves pass than before."""

    def step(carry: tuple[jax.Array, ...], turn: _Nodes) -> tuple[tuple[jax.Array, ...], Any]:
        leaves_N, value_N, parent_N = carry
        parent_N = jnp.where(turn.leaves_NK < leaves_N, value_N, parent_N)
        return (turn.leaves_NK, turn.value_NK, parent_N), turn.value_NK - parent_N

    root_N = jnp.zeros_like(size_N)  # rewards are over the group's mean
    turns = _Nodes(*(x_NK.T for x_NK in nodes))
    _, advantage_KN = jax.lax.scan(step, (size_N, root_N, root_N), turns)
    return advantage_KN.T


def _over_root(nodes: _Nodes, size_N: jax.Array) -> jax.Array:
    return nodes.value_NK


def _deviation(over_N: jax.Array, group_N: jax.Array, valid_N: jax.Array) -> jax.Array:
    """The standard deviation (n - 1) of each one's group, [N]."""
    _, index_N = jnp.unique(group_N, return_inverse=True, size=group_N.shape[0])
    square_N = jnp.where(valid_N, over_N**2, 0.0)
    square_N = jax.ops.segment_sum(square_N, index_N, group_N.shape[0])[index_N]
    return jnp.sqrt(square_N / jnp.maximum(_group_sizes(group_N, valid_N) - 1, 1))


def _over_nodes(
    advantage_NK: jax.Array, node_NK: jax.Array, is_NK: jax.Array, clip: float | None
) -> jax.Array:
    """Standardised over all turns, each by the first trajectory that has it."""
    node_M = jnp.where(is_NK, node_NK, -1).ravel()
    unique_M, first_M, index_M = jnp.unique(
        node_M, return_index=True, return_inverse=True, size=node_M.size, fill_value=-1
    )
    scaled_M = standardize(advantage_NK.ravel()[first_M], unique_M >= 0, clip=clip)
    return jnp.where(is_NK, scaled_M[index_M].reshape(node_NK.shape), 0.0)


def _checked_rewards(reward_NK: jax.Array | None, node_NK: jax.Array) -> jax.Array:
    if reward_NK is None:
        raise ValueError("reward_NK: got None; allowed with baseline=siblings: an array [N, K].")
    chex.assert_shape(
        reward_NK,
        node_NK.shape,
        custom_message="reward_NK: [N, K]",
        exception_type=ValueError,
    )
    return jnp.asarray(reward_NK, jnp.float32)


def _over_siblings(
    reward_NK: jax.Array,
    group_N: jax.Array,
    node_NK: jax.Array,
    is_NK: jax.Array,
    *,
    scale: str,
    clip: float | None,
) -> jax.Array:
    """Rewards of turns, each turn once, relative to those that begin at the same node."""
    _, group_N = jnp.unique(group_N, return_inverse=True, size=group_N.shape[0])
    # The roots of groups are no turns: numbers that no node has.
    before_NK = jnp.concatenate([-1 - group_N.reshape(-1, 1), node_NK[:, :-1]], axis=1)
    node_M = jnp.where(is_NK, node_NK, -1).ravel()
    unique_M, first_M, index_M = jnp.unique(
        node_M, return_index=True, return_inverse=True, size=node_M.size, fill_value=-1
    )
    advantage_M = group_relative_advantage(
        reward_NK.ravel()[first_M],
        before_NK.ravel()[first_M],
        scale=scale,
        clip=clip,
        valid_N=unique_M >= 0,
    )
    return jnp.where(is_NK, advantage_M[index_M].reshape(node_NK.shape), 0.0)


_VALUES = {"parent": _over_parent, "root": _over_root}
_BASELINES = (*_VALUES, "siblings")
_SCALES = ("none", "group", "batch")


@dataclass(frozen=True)
class TreeOptions(Options):
    """Options of `tree`."""

    baseline: str = choice("parent", "root", "siblings")
    """Subtracts the value of the node where a branch began, or that of the group; siblings:
    compares the rewards of the turns that begin where a turn does."""

    @property
    def compares_siblings(self) -> bool:
        return self.baseline == "siblings"


ESTIMATOR = Estimator(
    tree_advantage,
    "turn",
    ("reward_N", "group_N", "valid_N", "node_NK", "reward_NK"),
    TreeOptions,
    scales=True,
)
