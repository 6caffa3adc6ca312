"""Objectives of an action: a file for each, with its term and its entry.

A file's `OBJECTIVE` is all that others know of it; `config.algorithm.objective` names the file, or
a user's own entry as `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

# What a term may ask for, by the name of its parameter: arrays [N], or [N, L] with ratio=token.
ARRAYS = {
    "ratio": "s, of the probability now to that under the old policy",
    # Linear, because an action may lie in several rows, each of which sees a part of it.
    "logp": "log-probability now, nats, at the level of the ratio; the term is linear in it",
    "weight": "M, advantage x cumulative ratio; constant",
    "old_logp": "log-probability under the old policy, nats, at the same level; constant",
}
BOUNDS = ("clip_low", "clip_high", "clip_dual", "tau_pos", "tau_neg")
RATIOS = ("geometric", "product", "token")  # levels of a ratio


@dataclass(frozen=True, eq=False)
class Objective:
    """A term, and all that others have to know of it.

    function: pure, of arrays and keyword bounds, to a pair in the shape of the weight: the term, to
      maximise, and 1.0 where a bound decided it (0.0 elsewhere), for metrics.
    needs: names of `ARRAYS`, passed by keyword. With `ratio` the term is corrected for steps since
      the action was sampled: `inner_epochs` and `max_lag` are allowed.
    bounds: fields of `config.algorithm` that it reads, of `BOUNDS`; None: unbounded. In a step they
      are scalar arrays, since a program serves all numbers; with an estimator that adapts the clip
      range, clip_low and clip_high are arrays in the ratio's shape.
    limit: from log-ratios of single tokens [N, L], the action's weight [N, 1] and the bounds to the
      log-ratios that count, before the action's mean is taken; twice the same as once. A token
      whose log-ratio it changes is one that a bound decided. None: all count as they are.
    ratios: levels of the ratio that the term has a meaning for, of `RATIOS`. With `old_logp` of
      an action in several segments only the ratio is right at other levels than `token`.
    """

    function: Callable[..., tuple[jax.Array, jax.Array]]
    needs: tuple[str, ...]
    bounds: tuple[str, ...] = ()
    limit: Callable[..., jax.Array] | None = None
    ratios: tuple[str, ...] = RATIOS

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"Objective.function: got {self.function!r}; allowed: a function.")
        named = {"needs": tuple(ARRAYS), "bounds": BOUNDS, "ratios": RATIOS}
        for name, allowed in named.items():
            got = getattr(self, name)
            if isinstance(got, str) or not set(got) <= set(allowed):
                raise ValueError(
                    f"Objective.{name}: got {got!r}; allowed: a tuple of {', '.join(allowed)}."
                )

    @property
    def has_ratio(self) -> bool:
        """Whether steps on an action may follow others since it was sampled."""
        return "ratio" in self.needs
