"""What a run must not do to the work of the one before it in the same folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.trajectories.json_lines import plain


def check_same_sweep(config: Config, iteration: int, saved: Mapping[str, Any], folder: str) -> None:
    """A sweep that was stopped must end by the rule that it began with.

    Its order's steps are counted, and its advantages and weights were computed, for that rule.

    Args:
      iteration: of the sweep. saved: the configuration that it was stopped with.
      folder: where it is saved.

    Raises:
      ValueError: another algorithm, optimizer, or learning rate in this iteration.
    """
    now, usual = (plain(to_dict(each), finite=False) for each in (config, Config()))
    pairs = {
        f"{part}.{name}": (value, saved[part].get(name, usual[part][name]))
        for part in ("algorithm", "optimizer")
        for name, value in now[part].items()
    }
    changed = [(field, *values) for field, values in pairs.items() if values[0] != values[1]]
    if not changed:  # then iterations are all that a schedule depends on
        planned = config.iterations, saved["iterations"]
        shares = {Schedule(config.optimizer, each).share(iteration) for each in planned}
        changed = [("iterations", *planned)] if len(shares) > 1 else []
    if changed:
        field, value, was = changed[0]
        raise ValueError(
            f"config.{field}: got {value!r}; allowed: {was!r}, with which the run was stopped in"
            f" the sweep of iteration {iteration}. Let that iteration end first, or remove"
            f" {folder}: the run then continues from its newest checkpoint."
        )
