"""An objective of your own: the further a ratio is from 1, the less it counts; no clipping."""

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.objectives import Objective

TEMPERATURE, TEMPERATURE_BELOW = 1.0, 1.05  # where W > 0, and elsewhere


def soft_gate(ratio: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """W 4/t sigmoid(t (s - 1)), whose slope at s = 1 is W (SAPO, arXiv:2511.20347).

    Returns: the term, to maximise, and 1.0 where its slope is below half of that at s = 1.
    """
    temperature = jnp.where(weight > 0, TEMPERATURE, TEMPERATURE_BELOW)
    gate = jax.nn.sigmoid(temperature * (ratio - 1.0))
    term = weight * gate * 4.0 / temperature
    return term, jnp.float32(4.0 * gate * (1.0 - gate) < 0.5)


OBJECTIVE = Objective(soft_gate, needs=("ratio", "weight"))
