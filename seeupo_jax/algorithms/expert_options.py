"""The options of balanced experts."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.options import within


@dataclass(frozen=True)
class ExpertBalance:
    """Options of the routers' training, beside what the loss of the policy teaches them."""

    balance_coef: float = within(0, 100, 0.0)
    """Coefficient of the load-balancing loss; 0: none."""
    z_coef: float = within(0, 100, 0.0)
    """Coefficient of the router z-loss; 0: none."""
    bias_rate: float = within(0, 1, 0.0)
    """Step of the selection biases of experts after each optimizer step; 0: they stay."""

    @property
    def active(self) -> bool:
        """Whether any of it is on."""
        return any(vars(self).values())


NO_BALANCE = ExpertBalance()
