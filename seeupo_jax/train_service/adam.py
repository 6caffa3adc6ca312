"""AdamW of a run, whose options come with every step."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from seeupo_jax.train_service.refusals import RequestRefused, refuse_unknown


class Adam(NamedTuple):
    """Options of one step. clip: of the gradient's global norm; up to 0: none."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float


# Tinker's names, and its defaults, with the least and the largest number that is allowed: with a
# beta of 1 or an eps of 0 in float32 a step divides by 0.
_RANGES: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {
        "learning_rate": (1e-4, 0, 1e6),
        "beta1": (0.9, 0, 0.999999),
        "beta2": (0.95, 0, 0.999999),
        "eps": (1e-12, 1e-30, 1),
        "weight_decay": (0.0, 0, 1e6),
        "grad_clip_norm": (0.0, -1e30, 1e30),
    }
)


def check_kind(name: str, config: Any) -> None:
    """RequestRefused: a field is of another optimizer."""
    kind = config.get("type") if isinstance(config, Mapping) else None
    if kind not in (None, "adamw"):
        raise RequestRefused(f"{name}: got {kind!r:.40}; allowed: adamw.")


def read_adam(body: Mapping[str, Any]) -> Adam:
    """Options of a step, of an `optim_step` in JSON; where they are missing Tinker's defaults hold.

    Raises:
      RequestRefused: of another optimizer, or one that is none, no number or out of its range.
    """
    check_kind("optimizer_params", body.get("optimizer_params"))
    params = body.get("adam_params")
    if not isinstance(params, Mapping):
        raise RequestRefused("optim_step: got no adam_params; allowed: AdamW's.")
    refuse_unknown("adam_params", params, _RANGES)
    values = []
    for name, (default, least, most) in _RANGES.items():
        value = params.get(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise RequestRefused(
                f"adam_params.{name}: got {value!r:.40}; allowed: a number from {least:g} to"
                f" {most:g}."
            )
        values.append(float(value))
    return Adam(*values)


def make_optimizer(adam: Adam) -> optax.GradientTransformation:
    """AdamW behind a clip, of options that may be traced; its state is the same for all options."""
    most = jnp.where(adam.clip > 0, adam.clip, jnp.inf)
    return optax.chain(
        optax.clip_by_global_norm(most),
        optax.adamw(
            adam.learning_rate,
            b1=adam.beta1,
            b2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        ),
    )


def new_moments(params: Any) -> Any:
    """The optimizer's state before the first step."""
    return make_optimizer(Adam(0, 0, 0, 0, 0, 0)).init(params)
