"""The value function that generalized advantage estimation asks, and what it is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.algorithms.critics import HeadCritic, ModelCritic, NoCritic
from seeupo_jax.algorithms.value import clipped_value_loss
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.step.rows import compute_row
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.network import Network
from seeupo_jax.types import CriticState, TurnBatch

# Logical axes of the linear map from a last hidden state to its value.
HEAD_AXES = {"kernel": ("embed",), "bias": (None,)}


@dataclass(frozen=True)
class Critic:
    """The static options of the value function; hashable, part of each program.

    options: of kind `head` it reads the policy's own last hidden states, and its loss trains the
      policy's trunk too; of kind `model` those of a transformer of its own, which begins as the
      policy. With adapters either shares with the policy what does not train, and `model` has
      adapters of its own. For `coef` and `clip` see `clipped_value_loss`.
    width: of the hidden states.
    optimizer: has a state of its own and clips the value function's gradient by its own norm.
    """

    options: HeadCritic | ModelCritic
    width: int
    optimizer: optax.GradientTransformation

    sums = ("value_loss", "value_clipped")  # what a step counts for its metrics

    @property
    def kind(self) -> str:
        """`head` or `model`."""
        return self.options.kind

    def trunk(self, tree: Any) -> Any:
        """The nodes of a tree like the policy's parameters that it has a copy of."""
        return own_trunk(self.kind, tree)

    def init(self, params: Any) -> CriticState:
        """The critic before the first step: every value is 0. For use inside `jax.jit`.

        Args:
          params: those of the policy's parameters that train; `model` begins with a copy of them.
        """
        return fresh_state(self.optimizer, fresh_head(self.width), self.trunk(params))


# The policy's output table is of no use to values.
_TRUNKS: dict[str, Callable[[Any], Any]] = {
    "head": lambda tree: {},
    "model": lambda tree: {name: node for name, node in tree.items() if name != "head"},
}


class ValueModel(Protocol):
    """A model that gives values: a critic, or another one with such a head."""

    @property
    def kind(self) -> str: ...


def own_trunk(kind: str, tree: Any) -> Any:
    """The nodes of a tree like the policy's parameters that a `head` or a `model` has a copy of."""
    return _TRUNKS[kind](tree)


def fresh_head(width: int) -> Any:
    """A linear map whose every value is 0."""
    return {"kernel": jnp.zeros(width), "bias": jnp.zeros(1)}


def fresh_state(optimizer: optax.GradientTransformation, head: Any, trunk: Any) -> CriticState:
    """The state before the first step, with a copy of the trunk."""
    params = {"head": head, "trunk": jax.tree.map(jnp.copy, trunk)}
    return CriticState(params, optimizer.init(params))


def critic_optimizer(config: Config, *, total_steps: int) -> optax.GradientTransformation:
    """The optimizer of the value function: the configured one, at the critic's learning rate."""
    options = config.algorithm.critic
    rate = None if isinstance(options, NoCritic) else options.learning_rate
    return auxiliary_optimizer(config, rate, total_steps=total_steps)


def auxiliary_optimizer(
    config: Config, rate: float | None, *, total_steps: int
) -> optax.GradientTransformation:
    """The configured optimizer for an auxiliary model; `rate` None: the policy's learning rate."""
    # Groups and the average belong to the policy's parameters.
    options = dataclasses.replace(config.optimizer, groups=(), ema=None)
    if rate is not None:
        kwargs = dict(options.kwargs)
        if "adam_learning_rate" in kwargs:  # Muon's for what is no matrix, in the same proportion
            kwargs["adam_learning_rate"] *= rate / options.learning_rate
        options = dataclasses.replace(options, learning_rate=rate, kwargs=kwargs)
    return make_optimizer(options, total_steps=total_steps)


def make_critic(
    algorithm: Algorithm, width: int, optimizer: optax.GradientTransformation
) -> Critic | None:
    """The value function that an algorithm asks for; None: it has none."""
    options = algorithm.critic
    return None if isinstance(options, NoCritic) else Critic(options, width, optimizer)


def row_value(
    network: Network,
    critic: ValueModel,
    params: Any,
    critic_params: Any,
    row: TurnBatch,
    hidden_RXD: jax.Array | None = None,
) -> jax.Array:
    """The value before each token that one microbatch predicts: float32 [R, X], reward units.

    Args:
      params: all of the policy's.
      hidden_RXD: the policy's last hidden states that predict the tokens; None: not at hand.
    """
    if critic.kind == "model":
        # Of the policy's stays what does not train, and its output table, which is not read.
        params, hidden_RXD = policy.join_params(critic_params["trunk"], params), None
        row = row._replace(expert_MRLG=None)  # its routers are others than the policy's
    if hidden_RXD is None:
        hidden_RXD = policy.gather_positions(
            compute_row(network, params, row).hidden_NLD, row.parent_MRX
        )
    head = critic_params["head"]
    value_RX = jnp.einsum("rxd,d->rx", hidden_RXD.astype(jnp.float32), head["kernel"])
    return value_RX + head["bias"][None, :]


def span_loss(critic: Critic, value_PA: jax.Array, row: TurnBatch) -> tuple[jax.Array, jax.Array]:
    """Each token's error, and 1.0 where the clipped one counts, which has no gradient: [P, A]."""
    plain_PA, loss_PA = (
        clipped_value_loss(value_PA, row.value_PA, row.returns_PA, clip=clip, mask=row.mask_PA)
        for clip in (None, critic.options.clip)
    )
    return loss_PA, (loss_PA > plain_PA).astype(jnp.float32)
