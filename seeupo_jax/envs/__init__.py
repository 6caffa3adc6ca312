"""Environments: text worlds on the host; nothing here imports jax."""

from __future__ import annotations

from typing import Any

from seeupo_jax.envs.base import (
    Demonstration,
    Demonstrator,
    Environment,
    Message,
    StepResult,
    Tool,
    TransientError,
)


def _order_desk(**options: Any) -> Environment:
    from seeupo_jax.envs.order_desk import OrderDesk

    return OrderDesk(**options)


def _bfcl(**options: Any) -> Environment:
    from seeupo_jax.envs.bfcl import Bfcl

    return Bfcl(**options)


ENVIRONMENTS = {"order_desk": _order_desk, "bfcl": _bfcl}


def make(name: str, **options: Any) -> Environment:
    """An environment by name.

    Raises:
      ValueError: an unknown name or option.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"env.name: got {name!r}; allowed: {', '.join(ENVIRONMENTS)}.")
    try:
        return ENVIRONMENTS[name](**options)
    except TypeError as error:
        raise ValueError(f"env.options: {name} refused {options}: {error}.") from None


__all__ = [
    "ENVIRONMENTS",
    "Demonstration",
    "Demonstrator",
    "Environment",
    "Message",
    "StepResult",
    "Tool",
    "TransientError",
    "make",
]
