"""Advantage estimators: a file for each, with its formula and its entry.

A file's `ESTIMATOR` is all that the learner, the laboratory, the checks of a configuration,
`--explain` and the documentation know of it; `config.algorithm.advantage` names the file, or a
user's own entry as `module:attribute`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from seeupo_jax.algorithms.standardize import standardize

# Level -> the array that says which advantages there are, and has their shape.
LEVELS = {"trajectory": "valid_N", "turn": "mask_NK", "token": "mask_NL"}
# What a function may ask for, by the name of its parameter; rewards, values and log-probabilities
# are 0 where there is no valid one. L: the sampled tokens of a trajectory, in their order.
ARRAYS = {
    "reward_N": "float32, of the trajectory",
    "group_N": "int32, equal for the trajectories of one task",
    "valid_N": "bool, False: left out of every statistic",
    "reward_NK": "float32, of each turn",
    "reward_rest_NK": "float32, what rounding to float32 takes from each turn's reward",
    "gain_NK": "float32, information that each turn gained, or its reward; NaN: none, as the last",
    "state_NK": "int32, equal for turns that began from one state; negative: no such turn",
    "mask_NK": "bool, whether there is such a turn",
    "implicit_NK": "float32, of each turn: `implicit_coef` x log(scorer / old) of its tokens",
    "rewards_NQ": "float32, of the trajectory, each named reward before its weight",
    "reward_weight_Q": "float32, the weight of each named reward",
    "rewards_NKQ": "float32, of each turn, each named reward before its weight",
    "turn_weight_Q": "float32, the weight of each named reward of turns",
    "running_mean_Q": "float32, of each of them over all turns of the run so far, these included",
    "running_std_Q": "float32, their standard deviation (n - 1)",
    "node_NK": "int32, equal where trajectories share a turn, after a fork; negative: no turn",
    "reward_NL": "float32, of each turn at its last token",
    "progress_NL": "float32, of each turn at its last token: what a scorer says it contributed",
    "executed_NL": "float32, of each turn at its last token: 1 if the environment executed it",
    "turn_NL": "int32, the token's turn; -1 outside the mask",
    "mask_NL": "bool, whether there is such a token",
    "value_NL": "float32, the critic's, before the token",
    "old_logp_NL": "float32, log-probability under the old policy, nats",
    "ref_logp_NL": "float32, log-probability under the reference policy, nats",
    "truncated_N": "bool, whether a limit of turns or tokens ended it (`max_turns`, `max_tokens`)",
    "metric_N": "float32, what `canon_metric` names: turns, sampled tokens or their mean entropy",
}


# Those that come from a model beside the policy, which is another one for each.
SCORED = frozenset({"implicit_NK", "progress_NL"})


class Credit(NamedTuple):
    """The advantages of a batch, and what else its estimator gives.

    advantage: in the shape of the estimator's level.
    returns: with a critic, what its values are to be, [N, L].
    clip_scale: what each turn's clip range is multiplied by, [N, K]; None: by nothing.
    part_NQ: what each named reward adds to a trajectory's advantage, or to a turn's as [N, K, Q],
      before that is standardised over the batch; None: unknown.
    """

    advantage: jax.Array
    returns: jax.Array | None = None
    clip_scale: jax.Array | None = None
    part_NQ: jax.Array | None = None


@dataclass(frozen=True, eq=False)
class Estimator:
    """A formula, and all that others have to know of it.

    function: pure, of arrays and keyword options, to float32 advantages in the shape of the level;
      with `value_NL` among what it needs to a pair of them and of the returns, [N, L]; or to a
      `Credit`.
    level: of one advantage; a key of `LEVELS`.
    needs: names of `ARRAYS`, passed by keyword. With `group_N` a reward counts only beside those of
      its group (unless the function reads a baseline that is `batch`).
    options: keyword of the function -> the field of `config.algorithm` that it is, with that
      field's bounds. A function without the field `scale` is not to scale: with scale=batch its
      advantages are standardised over the batch.
    adapts_clip: whether it returns a `Credit` with a clip scale.
    signed_weights: whether a named reward may weigh less than 0.
    asked: name of `ARRAYS` -> the field of `config.algorithm` that is True where it is needed too.
    reward_range: the least and the largest reward that the formula is for; None: any.
    keeps_zero: whether with scale=batch the advantages of 0 that groups of equal rewards have stay
      0: the mean over the batch is then 0, as where those of each group add up to 0, or is not
      subtracted. `Algorithm.zero_if_equal` reads it.
    """

    function: Callable[..., Any]
    level: str
    needs: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    adapts_clip: bool = False
    signed_weights: bool = True
    asked: Mapping[str, str] = field(default_factory=dict)
    reward_range: tuple[float, float] | None = None
    keeps_zero: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"Estimator.function: got {self.function!r}; allowed: a function.")
        if self.level not in LEVELS:
            raise ValueError(f"Estimator.level: got {self.level!r}; allowed: {', '.join(LEVELS)}.")
        for name, arrays in (("needs", self.needs), ("asked", tuple(self.asked))):
            if isinstance(arrays, str) or not set(arrays) <= set(ARRAYS):
                allowed = f"a tuple of {', '.join(ARRAYS)}"
                raise ValueError(f"Estimator.{name}: got {arrays!r}; allowed: {allowed}.")
        if SCORED.issubset(self.needs):
            raise ValueError(
                f"Estimator.needs: got {' and '.join(sorted(SCORED))}; allowed: one of them, since"
                " one model beside the policy scores turns."
            )

    @property
    def scored(self) -> bool:
        """Whether a model beside the policy, other than a critic, scores turns for it."""
        return not SCORED.isdisjoint(self.needs)

    def reads(self, choice: str) -> bool:
        """Whether a field of `config.algorithm` is among its options."""
        return choice in {*self.options.values(), *self.asked.values()}

    def programs(self, choices: Mapping[str, Any]) -> list[str]:
        """Names of what `credit` runs."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return [name, "standardize"] if self._standardizes(choices) else [name]

    def inputs(self, choices: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays that `credit` reads."""
        mask, needs = LEVELS[self.level], self._needed(choices)
        more = self._standardizes(choices) and mask not in needs
        return (*needs, mask) if more else needs

    def credit(self, arrays: Mapping[str, Any], choices: Mapping[str, Any]) -> Credit:
        """The advantages of a batch.

        Args:
          arrays: `inputs` by name; see `ARRAYS`.
          choices: fields of `config.algorithm` by name.
        """
        needed = {name: arrays[name] for name in self._needed(choices)}
        options = {keyword: choices[name] for keyword, name in self.options.items()}
        result = self._program(**needed, **options)
        credit = Credit(*result) if isinstance(result, tuple) else Credit(result)
        if self._standardizes(choices):
            mask, clip = arrays[LEVELS[self.level]], choices["advantage_clip"]
            credit = credit._replace(advantage=standardize(credit.advantage, mask, clip=clip))
        return credit

    def _needed(self, choices: Mapping[str, Any]) -> tuple[str, ...]:
        return (*self.needs, *(name for name, choice in self.asked.items() if choices[choice]))

    def _standardizes(self, choices: Mapping[str, Any]) -> bool:
        return choices["scale"] == "batch" and not self.reads("scale")

    @functools.cached_property
    def _program(self) -> Callable[..., Any]:
        """The function as one compiled program."""
        if hasattr(self.function, "lower"):  # it is one
            return self.function
        return jax.jit(self.function, static_argnames=tuple(self.options))
