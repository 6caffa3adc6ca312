"""The auxiliary model that scores turns, and its step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.optimization.optimizer import select_or_cond, step_if_finite
from seeupo_jax.learner.state_layout import in_host_memory, on_device
from seeupo_jax.learner.step.critic import (
    auxiliary_optimizer,
    fresh_head,
    fresh_state,
    own_trunk,
    row_value,
)
from seeupo_jax.learner.step.rows import microbatch, of_spans, row_logp
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.network import Network
from seeupo_jax.types import CriticState, TrainState, TurnBatch


@dataclass(frozen=True)
class TurnScorer:
    """The static options of the model that scores turns; hashable, part of its step's program.

    kind: `policy` is a copy of the policy that is trained apart: its log-probabilities of action
      tokens score (an implicit process reward model). `head` and `model` are as for `Critic`, read
      at the last token of each turn (a progress estimator); but what a `head` reads, the policy's
      own hidden states, its step leaves as they are.
    width: of the hidden states.
    optimizer: has a state of its own and clips the scorer's gradient by its own norm.
    temperature: of its log-probabilities, as of the policy's.
    """

    kind: str
    width: int
    optimizer: optax.GradientTransformation
    temperature: float

    @property
    def of_tokens(self) -> bool:
        """Whether it scores every action token, not only the last one of each turn."""
        return self.kind == "policy"

    def trunk(self, tree: Any) -> Any:
        """The nodes of a tree like the policy's parameters that it has a copy of."""
        return tree if self.kind == "policy" else own_trunk(self.kind, tree)

    def init(self, params: Any) -> CriticState:
        """The scorer before the first step: the policy, or scores of 0. For use inside `jax.jit`.

        Args:
          params: those of the policy's parameters that train.
        """
        head = {} if self.kind == "policy" else fresh_head(self.width)
        return fresh_state(self.optimizer, head, self.trunk(params))


def scorer_optimizer(config: Config, *, total_steps: int) -> optax.GradientTransformation | None:
    """The scorer's optimizer: the configured one, at its learning rate; None without one."""
    if config.algorithm.scorer is None:
        return None
    rate = config.algorithm.estimator.scorer_rate * config.optimizer.learning_rate
    return auxiliary_optimizer(config, rate, total_steps=total_steps)


def make_scorer(
    algorithm: Algorithm,
    width: int,
    optimizer: optax.GradientTransformation | None,
    temperature: float,
) -> TurnScorer | None:
    """The scorer that an algorithm's estimator needs; None: it needs none."""
    if algorithm.scorer is None or optimizer is None:
        return None
    return TurnScorer(algorithm.scorer, width, optimizer, temperature)


def _row_scores(
    network: Network, scorer: TurnScorer, params: Any, scorer_params: Any, row: TurnBatch
) -> jax.Array:
    """The scorer's output for each token that one microbatch asks for: float32 [R, X].

    Args:
      params: all of the policy's.
    """
    if not scorer.of_tokens:
        return row_value(network, scorer, params, scorer_params, row)
    logp_RX, *_ = row_logp(
        network, policy.join_params(scorer_params["trunk"], params), row, scorer.temperature
    )
    return logp_RX


def scorer_step(
    network: Network,
    scorer: TurnScorer,
    state_shardings: TrainState | None,
    frozen: Any,
    state: TrainState,
    batch: TurnBatch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step of the scorer, from the derivative of its loss by every token's score.

    The loss compares whole trajectories, whose tokens may lie in several microbatches. The
    derivatives are at the scores of these same parameters, so the gradient is exact.

    Args:
      state_shardings: gradients lie as the state's parameters do. None: one device.
      frozen: the policy's parameters that no step changes.
      batch: with `score_grad_PA`; without rows no step is taken.

    Returns: the state, and float32 scalars: the gradient's norm before clipping, and whether the
      step was skipped because that is not finite.
    """
    held, params = state.scorer, policy.join_params(state.params, frozen)

    def loss(trained: Any, row: TurnBatch) -> jax.Array:
        score_RX = _row_scores(network, scorer, params, trained, row)
        return jnp.sum(row.score_grad_PA * of_spans(score_RX, row.slot_PA, row.mask_PA))

    def place(grads: Any) -> Any:
        if state_shardings is None:
            return grads
        return jax.lax.with_sharding_constraint(grads, state_shardings.scorer.params)

    def body(index: jax.Array, grads: Any) -> Any:
        new = jax.grad(loss)(held.params, microbatch(batch, index))
        return jax.tree.map(jnp.add, grads, place(new))

    with jax.named_scope("sweep/scorer"):
        zeros = place(jax.tree.map(jnp.zeros_like, held.params))
        grads = jax.lax.fori_loop(0, batch.microbatches, body, zeros)
        streamed = in_host_memory(held.opt_state)
        held = held._replace(opt_state=on_device(held.opt_state))
        held, norm, skipped = select_or_cond(
            batch.microbatches > 0,
            lambda: step_if_finite(scorer.optimizer, grads, held, streamed=streamed),
            lambda: (held, jnp.zeros(()), jnp.zeros(())),
            streamed=streamed,
        )
    metrics = {"scorer_grad_norm": norm, "scorer_skipped": skipped}
    return state._replace(scorer=held), metrics
