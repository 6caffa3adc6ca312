"""What both sides of a benchmark do: one sweep of SeeUPO with the fields of a training run."""

from __future__ import annotations

from typing import Any

from seeupo_jax.bench.settings import Settings

# Large enough for the first sweep to change the weights M and the parameters, which are compared.
# With the usual eps Adam makes as much of a gradient that is nothing but rounding as of any other.
LEARNING_RATE, EPS = 1e-3, 1e-3


def values(settings: Settings, *, turns: int, dtype: str) -> dict[str, Any]:
    """Fields of the configuration by their full names; all others are as they are by default.

    Args:
      turns: of the longest trajectory. dtype: of activations.
    """
    return {
        "seed": settings.seed,
        "model.dtype": dtype,
        "optimizer.name": "adam",
        "optimizer.learning_rate": LEARNING_RATE,
        "optimizer.kwargs": {"eps": EPS},
        "rollout.max_turns": turns,
        "rollout.temperature": 1.0,
    }


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The same fields as `config.from_dict` takes them."""
    values: dict[str, Any] = {}
    for name, value in flat.items():
        group, _, leaf = name.rpartition(".")
        (values.setdefault(group, {}) if group else values)[leaf] = value
    return values
