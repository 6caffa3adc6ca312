"""The programs of supervised training: a step on a batch's mean loss, and the loss alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.algorithms.expert_options import NO_BALANCE, ExpertBalance
from seeupo_jax.learner.state_layout import HashableShardings, average
from seeupo_jax.learner.step.expert_balance import (
    RouterLosses,
    router_losses,
    router_terms,
    step_biases,
    zero_sums,
)
from seeupo_jax.learner.step.rows import microbatch, of_spans, row_logp
from seeupo_jax.learner.step.turn_step import apply_gradients, place_gradients
from seeupo_jax.policy.network import Network, join_params
from seeupo_jax.types import TrainState, TurnBatch


def imitation_loss(
    params: Any,
    frozen: Any,
    network: Network,
    row: TurnBatch,
    routers: RouterLosses | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One microbatch's negative log-likelihood of assistant tokens plus the losses of its routers.

    A token that several conversations share counts for each of them.

    Returns: the sum, and its parts: `loss`, the likelihood's, in nats, and those of the routers.
    """
    scored = row_logp(network, join_params(params, frozen), row, 1.0)
    loss = -of_spans(scored.logp_RX, row.slot_PA, row.mask_PA).sum()
    router_loss, sums = router_terms(routers, network.arch, row, scored)
    return loss + router_loss, jax.lax.stop_gradient(sums | {"loss": loss})


def imitation_step(
    network: Network,
    optimizer: optax.GradientTransformation,
    ema: float | None,
    balance: ExpertBalance,
    state_shardings: TrainState | None,
    frozen: Any,
    state: TrainState,
    batch: TurnBatch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on the mean negative log-likelihood of a batch's assistant tokens.

    The sum over all microbatches is divided once, so that how rows are packed does not matter.

    Args:
      ema: decay of the average in the state. balance: of the experts' load.
      state_shardings: of the state; None: one device.
      frozen: the parameters that do not train.

    Returns: the state, and `loss` before the step, `grad_norm`, `update_skipped`, and the losses of
      routers where they are on.
    """
    grad, tokens = jax.grad(imitation_loss, has_aux=True), batch.mask_PA.sum()
    params = join_params(state.params, frozen)
    routers = router_losses(network, balance, params, batch, tokens)

    def body(index: jax.Array, carry: Any) -> Any:
        total, grads = carry
        new, sums = grad(state.params, frozen, network, microbatch(batch, index), routers)
        new, _ = place_gradients(state_shardings, (new, None))
        return jax.tree.map(jnp.add, (total, grads), (sums, new))

    with jax.named_scope("sft/step"):
        zeros, _ = place_gradients(
            state_shardings, (jax.tree.map(jnp.zeros_like, state.params), None)
        )
        start = zero_sums(network.arch, balance) | {"loss": jnp.zeros(())}
        total, grads = jax.lax.fori_loop(0, batch.microbatches, body, (start, zeros))
        grads = jax.tree.map(lambda g: g / tokens, grads)
        state, metrics = apply_gradients(optimizer, None, (grads, None), state, tokens > 0)
        skipped = metrics["update_skipped"]
        state, total = step_biases(network.arch, balance, state, total, skipped)
        if ema is not None:
            state = state._replace(ema=average(state.params, state.ema, ema))
    return state, metrics | total | {"loss": total["loss"] / tokens}


def total_loss(network: Network, frozen: Any, params: Any, batch: TurnBatch) -> jax.Array:
    """Negative log-likelihood of a batch's assistant tokens, summed: float32 [], nats."""

    def body(index: jax.Array, total: jax.Array) -> jax.Array:
        return total + imitation_loss(params, frozen, network, microbatch(batch, index))[0]

    with jax.named_scope("sft/loss"):
        return jax.lax.fori_loop(0, batch.microbatches, body, jnp.zeros(()))


@dataclass(frozen=True, eq=False)
class Imitation:
    """The parts of a supervised run that its steps need and do not change.

    frozen: parameters that do not train. ema: decay of the average of the parameters per step.
    balance: losses of routers, and the step of selection biases, of a policy with experts.
    state_shardings: shardings of the state, and `replicated` one of small arrays; None: one device.
    """

    network: Network
    optimizer: optax.GradientTransformation
    frozen: Any = field(default_factory=dict)
    ema: float | None = None
    balance: ExpertBalance = NO_BALANCE
    state_shardings: TrainState | None = None
    replicated: jax.sharding.Sharding | None = None

    def step(self, state: TrainState, batch: TurnBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        """`imitation_step`; the state is donated."""
        shardings = HashableShardings.of(self.state_shardings)
        of_step = self.network, self.optimizer, self.ema, self.balance
        program = step_program(*of_step, shardings, self.replicated)
        return program(self.frozen, state, batch)

    def loss(self, params: Any, batch: TurnBatch) -> jax.Array:
        """`total_loss`."""
        return loss_program(self.network, self.replicated)(self.frozen, params, batch)


# Equal runs share their programs, as sweeps do.
_shared = functools.lru_cache(maxsize=16)


@_shared
def step_program(
    network: Network,
    optimizer: optax.GradientTransformation,
    ema: float | None,
    balance: ExpertBalance,
    shardings: HashableShardings,
    replicated: jax.sharding.Sharding | None,
) -> Callable[..., Any]:
    """`imitation_step` from the frozen parameters on."""
    step = functools.partial(imitation_step, network, optimizer, ema, balance, shardings.tree)
    return jax.jit(step, donate_argnums=1, out_shardings=(shardings.tree, replicated))


@_shared
def loss_program(
    network: Network, replicated: jax.sharding.Sharding | None
) -> Callable[..., jax.Array]:
    """`total_loss` from the frozen parameters on."""
    return jax.jit(functools.partial(total_loss, network), out_shardings=replicated)
