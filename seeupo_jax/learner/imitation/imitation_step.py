"""The programs of supervised training: a step on a batch's mean loss, and the loss alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.learner.state_layout import HashableShardings, average
from seeupo_jax.learner.step.rows import microbatch, of_spans, row_logp
from seeupo_jax.learner.step.turn_step import apply_gradients, place_gradients
from seeupo_jax.policy.network import Network, join_params
from seeupo_jax.types import TrainState, TurnBatch


def imitation_loss(params: Any, frozen: Any, network: Network, row: TurnBatch) -> jax.Array:
    """Negative log-likelihood in nats of one microbatch's assistant tokens, summed.

    A token that several conversations share counts for each of them.
    """
    scored = row_logp(network, join_params(params, frozen), row, 1.0)
    return -of_spans(scored.logp_RX, row.slot_PA, row.mask_PA).sum()


def imitation_step(
    network: Network,
    optimizer: optax.GradientTransformation,
    ema: float | None,
    state_shardings: TrainState | None,
    frozen: Any,
    state: TrainState,
    batch: TurnBatch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on the mean negative log-likelihood of a batch's assistant tokens.

    The sum over all microbatches is divided once, so that how rows are packed does not matter.

    Args:
      ema: decay of the average in the state. state_shardings: of the state; None: one device.
      frozen: the parameters that do not train.

    Returns: the state, and `loss` before the step, `grad_norm` and `update_skipped`.
    """
    loss = jax.value_and_grad(imitation_loss)

    def body(index: jax.Array, carry: Any) -> Any:
        total, grads = carry
        microbatch_loss, new = loss(state.params, frozen, network, microbatch(batch, index))
        new, _ = place_gradients(state_shardings, (new, None))
        return total + microbatch_loss, jax.tree.map(jnp.add, grads, new)

    with jax.named_scope("sft/step"):
        zeros, _ = place_gradients(
            state_shardings, (jax.tree.map(jnp.zeros_like, state.params), None)
        )
        total, grads = jax.lax.fori_loop(0, batch.microbatches, body, (jnp.zeros(()), zeros))
        tokens = batch.mask_PA.sum()
        grads = jax.tree.map(lambda g: g / tokens, grads)
        state, metrics = apply_gradients(optimizer, None, (grads, None), state, tokens > 0)
        if ema is not None:
            state = state._replace(ema=average(state.params, state.ema, ema))
    return state, metrics | {"loss": total / tokens}


def total_loss(network: Network, frozen: Any, params: Any, batch: TurnBatch) -> jax.Array:
    """Negative log-likelihood of a batch's assistant tokens, summed: float32 [], nats."""

    def body(index: jax.Array, total: jax.Array) -> jax.Array:
        return total + imitation_loss(params, frozen, network, microbatch(batch, index))

    with jax.named_scope("sft/loss"):
        return jax.lax.fori_loop(0, batch.microbatches, body, jnp.zeros(()))


@dataclass(frozen=True, eq=False)
class Imitation:
    """The parts of a supervised run that its steps need and do not change.

    frozen: parameters that do not train. ema: decay of the average of the parameters per step.
    state_shardings: shardings of the state, and `replicated` one of small arrays; None: one device.
    """

    network: Network
    optimizer: optax.GradientTransformation
    frozen: Any = field(default_factory=dict)
    ema: float | None = None
    state_shardings: TrainState | None = None
    replicated: jax.sharding.Sharding | None = None

    def step(self, state: TrainState, batch: TurnBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        """`imitation_step`; the state is donated."""
        shardings = HashableShardings.of(self.state_shardings)
        program = step_program(self.network, self.optimizer, self.ema, shardings, self.replicated)
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
    shardings: HashableShardings,
    replicated: jax.sharding.Sharding | None,
) -> Callable[..., Any]:
    """`imitation_step` from the frozen parameters on."""
    step = functools.partial(imitation_step, network, optimizer, ema, shardings.tree)
    return jax.jit(step, donate_argnums=1, out_shardings=(shardings.tree, replicated))


@_shared
def loss_program(
    network: Network, replicated: jax.sharding.Sharding | None
) -> Callable[..., jax.Array]:
    """`total_loss` from the frozen parameters on."""
    return jax.jit(functools.partial(total_loss, network), out_shardings=replicated)
