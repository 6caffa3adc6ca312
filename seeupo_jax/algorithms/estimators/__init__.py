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

from seeupo_jax.algorithms.estimator_options import INPUT_OPTIONS, Options
from seeupo_jax.algorithms.standardize import standardize
from seeupo_jax.options import names_of

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
    "collision_NL": "float32, sum of the squared probabilities of all tokens, under the old policy",
    "truncated_N": "bool, whether a limit of turns or tokens ended it (`max_turns`, `max_tokens`)",
    "baseline_N": "float32, moving average of the rewards of its role in the run before it",
    "metric_N": "float32, the option `metric`: turns, sampled tokens or their mean entropy",
}


# Inputs that an auxiliary model computes, each a model of its own.
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
      with `value_NL` among its needs to a pair of them and of the returns, [N, L]; or to a
      `Credit`.
    level: of one advantage; a key of `LEVELS`.
    needs: names of `ARRAYS`, passed by keyword. With `group_N` rewards are compared within groups
      (unless the options say `over_batch`).
    options: the dataclass of `config.algorithm.estimator`, which extends `Options` and the classes
      of its inputs in `INPUT_OPTIONS`; its other fields are keywords of the function. None: the
      options of its inputs.
    scales: whether the function has the keywords `scale` and `clip`, which are
      `config.algorithm.scale` and `advantage_clip`. If not, its advantages are standardised over
      the batch with scale=batch, and scale=group is refused.
    adapts_clip: whether it returns a `Credit` with a clip scale.
    signed_weights: whether a named reward may weigh less than 0.
    optional_inputs: name of `ARRAYS` -> the option that is True where the function gets it too.
    reward_range: the least and the largest reward that the formula is for; None: any.
    keeps_zero: whether with scale=batch the advantages of 0 that groups of equal rewards have stay
      0: the mean over the batch is then 0, as where those of each group add up to 0, or is not
      subtracted. `Algorithm.zero_if_equal` reads it.
    """

    function: Callable[..., Any]
    level: str
    needs: tuple[str, ...]
    options: type[Options] | None = None
    scales: bool = False
    adapts_clip: bool = False
    signed_weights: bool = True
    optional_inputs: Mapping[str, str] = field(default_factory=dict)
    reward_range: tuple[float, float] | None = None
    keeps_zero: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"Estimator.function: got {self.function!r}; allowed: a function.")
        if self.level not in LEVELS:
            raise ValueError(f"Estimator.level: got {self.level!r}; allowed: {', '.join(LEVELS)}.")
        for name in ("needs", "optional_inputs"):
            got = vars(self)[name]
            if isinstance(got, str) or not set(got) <= set(ARRAYS):
                allowed = f"a tuple of {', '.join(ARRAYS)}"
                raise ValueError(f"Estimator.{name}: got {got!r}; allowed: {allowed}.")
        if SCORED.issubset(self.needs):
            raise ValueError(
                f"Estimator.needs: got {' and '.join(sorted(SCORED))}; allowed: one of them, since"
                " only one model is trained to score turns."
            )
        self._check_options()

    def _check_options(self) -> None:
        inputs = {name: INPUT_OPTIONS[name] for name in self.inputs_with_options}
        if self.options is None:
            classes = [*inputs.values(), Options]
            object.__setattr__(self, "options", classes[0])
        options: Any = self.options
        if not (isinstance(options, type) and issubclass(options, Options)):
            raise ValueError(
                f"Estimator.options: got {options!r}; allowed: a frozen dataclass that extends"
                " algorithms.estimator_options.Options."
            )
        for name, needed in inputs.items():
            if not issubclass(options, needed):
                raise ValueError(
                    f"Estimator.options: got {options.__name__} of an estimator that needs {name};"
                    f" allowed: a dataclass that extends {needed.__name__}, whose options it reads."
                )
        for option in self.optional_inputs.values():
            if option not in names_of(options):
                raise ValueError(
                    f"Estimator.optional_inputs: got the option {option!r}; allowed: fields of"
                    f" {options.__name__}, which are {', '.join(names_of(options)) or 'none'}."
                )

    @property
    def inputs_with_options(self) -> list[str]:
        """Those of its inputs that have options of their own."""
        return [name for name in (*self.needs, *self.optional_inputs) if name in INPUT_OPTIONS]

    @property
    def scored(self) -> bool:
        """Whether a model other than the policy and a critic scores turns for it."""
        return not SCORED.isdisjoint(self.needs)

    @property
    def keywords(self) -> tuple[str, ...]:
        """Its options that are keywords of the function."""
        of_inputs = {*self.optional_inputs.values()}
        for name in self.inputs_with_options:
            of_inputs |= {*names_of(INPUT_OPTIONS[name])}
        return tuple(name for name in names_of(self.options) if name not in of_inputs)

    def programs(self, scale: str) -> list[str]:
        """Names of what `credit` runs."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return [name, "standardize"] if self._standardizes(scale) else [name]

    def inputs(self, options: Options, scale: str) -> tuple[str, ...]:
        """Names of the arrays that `credit` reads."""
        mask, needs = LEVELS[self.level], self._needed(options)
        more = self._standardizes(scale) and mask not in needs
        return (*needs, mask) if more else needs

    def credit(
        self, arrays: Mapping[str, Any], options: Options, *, scale: str, clip: float | None
    ) -> Credit:
        """The advantages of a batch.

        Args:
          arrays: `inputs` by name; see `ARRAYS`.
          scale, clip: `config.algorithm.scale` and `advantage_clip`.
        """
        keywords = {name: getattr(options, name) for name in self.keywords}
        if self.scales:
            keywords |= {"scale": scale, "clip": clip}
        result = self._program(**{name: arrays[name] for name in self._needed(options)}, **keywords)
        credit = Credit(*result) if isinstance(result, tuple) else Credit(result)
        if self._standardizes(scale):
            mask = arrays[LEVELS[self.level]]
            credit = credit._replace(advantage=standardize(credit.advantage, mask, clip=clip))
        return credit

    def _needed(self, options: Options) -> tuple[str, ...]:
        asked = [name for name, option in self.optional_inputs.items() if getattr(options, option)]
        return (*self.needs, *asked)

    def _standardizes(self, scale: str) -> bool:
        return scale == "batch" and not self.scales

    @functools.cached_property
    def _program(self) -> Callable[..., Any]:
        """The function as one compiled program."""
        if hasattr(self.function, "lower"):  # it is one
            return self.function
        scaling = ("scale", "clip") if self.scales else ()
        return jax.jit(self.function, static_argnames=(*self.keywords, *scaling))
