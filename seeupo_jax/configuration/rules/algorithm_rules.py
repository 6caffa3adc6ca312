"""Which options of an algorithm go together; a section's own rules are in its class's `check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from seeupo_jax.algorithms.objectives import BOUNDS
from seeupo_jax.configuration.algorithm import Algorithm, fused_refresh_applies
from seeupo_jax.configuration.entry_points import entries_with
from seeupo_jax.configuration.reward import Reward
from seeupo_jax.options import Group, Setting


def check_choices(
    algorithm: Algorithm,
    *,
    max_turns: int,
    ahead: bool = False,
    teacher: bool = False,
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Checks that the options go together, and that all that differ from the defaults are read.

    Args:
      ahead: whether earlier policies may sample (config.rollout.max_lag).
      teacher: whether the reference policy is a teacher.
      recipe: fields that its recipe sets; those may be read by nothing once another option is
        changed.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    _check_order(algorithm, max_turns)
    # With importance weights ratios begin at 1, whoever sampled.
    setting = Setting(algorithm, max_turns, ahead and algorithm.importance is None, teacher)
    for value in vars(algorithm).values():
        if isinstance(value, Group):
            value.check(setting)
    _check_dynamic_sampling(algorithm)
    for rule in _RULES:
        entry = getattr(algorithm, rule.entry)
        if not rule.concerns(entry) or rule.fits(algorithm):
            continue
        named = f"{rule.by}={vars(algorithm)[rule.by]}"
        raise ValueError(
            f"config.algorithm.{rule.field}: got {vars(algorithm)[rule.field]!r} with {named};"
            f" allowed: {rule.allowed.format(named)}."
        )
    _check_ratio(algorithm)
    for name, why in unread_fields(algorithm, {} if recipe is None else recipe).items():
        raise ValueError(f"config.algorithm.{name}: {why}")


class _Rule(NamedTuple):
    """A field's condition on the estimator or the objective.

    by: `advantage` or `objective`. entry: the property that has its entry. concerns: entries that
      the condition is for.
    """

    field: str
    by: str
    entry: str
    concerns: Callable[[Any], bool]
    allowed: str
    fits: Callable[[Algorithm], bool]


def _refuses_penalty(estimator: Any) -> bool:
    """Whether kl_in=reward reaches not all rewards that it reads, or takes them out of range."""
    rewards = {name for name in estimator.needs if name.startswith("reward")}
    reached = bool(rewards) and rewards <= {"reward_N", "reward_NL"}
    # Of a tree's leaf only the turns that are its own have a penalty.
    reached = reached and "node_NK" not in estimator.needs
    # A baseline is of rewards without it.
    reached = reached and "baseline_N" not in estimator.needs
    return not reached or estimator.reward_range is not None


_RULES = (
    _Rule(
        "scale",
        "advantage",
        "estimator_entry",
        lambda estimator: not estimator.scales,
        "batch or none with {}, which has no scale of its own",
        lambda algorithm: algorithm.scale != "group",
    ),
    _Rule(
        "kl_in",
        "advantage",
        "estimator_entry",
        _refuses_penalty,
        "loss with {}",
        lambda algorithm: algorithm.kl_in == "loss",
    ),
    _Rule(
        "inner_epochs",
        "objective",
        "objective_entry",
        lambda objective: not objective.has_ratio,
        "1 with {}, which has no ratio to correct for the steps before",
        lambda algorithm: algorithm.inner_epochs == 1,
    ),
)


def _check_ratio(algorithm: Algorithm) -> None:
    allowed = algorithm.objective_entry.ratios
    if algorithm.ratio not in allowed:
        raise ValueError(
            f"config.algorithm.ratio: got {algorithm.ratio!r} with objective={algorithm.objective};"
            f" allowed: {' or '.join(allowed)}, the level that its term is defined for."
        )


def unread_fields(algorithm: Algorithm, recipe: Mapping[str, Any]) -> dict[str, str]:
    """Fields with a value that is neither the default nor the recipe's, and that nothing reads.

    Args:
      recipe: the fields that the algorithm's recipe sets.

    Returns: what was got and what is allowed, by field.
    """
    defaults, reasons = vars(Algorithm()), {}
    for name, given, unless in _unread(algorithm):
        value, default = vars(algorithm)[name], defaults[name]
        if value not in (default, recipe.get(name, default)):
            usual = "none" if default is None else default
            reasons[name] = (
                f"got {value} with {given}, which does not read it; allowed: {usual}, unless"
                f" {unless}."
            )
    return reasons


def _unread(algorithm: Algorithm) -> Iterator[tuple[str, str, str]]:
    """Each field that nothing reads, the option in force, and those with which it is read."""
    objective = f"objective={algorithm.objective}"
    for bound in BOUNDS:
        if bound not in algorithm.objective_entry.bounds:
            readers = entries_with("objective", lambda entry, bound=bound: bound in entry.bounds)
            yield bound, objective, " or ".join(readers)
    if algorithm.kl_in == "reward" or not algorithm.kl_coef:
        given = "kl_in=reward" if algorithm.kl_in == "reward" else "kl_coef=0"
        yield "kl_estimate", given, "the loss has a KL term"
    if not algorithm.weighs:
        given = "cumulative_ratio=False"
        if algorithm.cumulative_ratio:
            given = "order=parallel" if algorithm.order == "parallel" else "turns_per_update=none"
        unless = "turns are updated one after the other with cumulative_ratio=True"
        yield "weight_clip", given, unless
        if not algorithm.objective_entry.has_ratio:
            readers = entries_with("objective", lambda entry: entry.has_ratio)
            yield "old_policy", objective, " or ".join(readers)
    own = ":" in algorithm.advantage and algorithm.estimator_entry.scales
    if algorithm.scale != "batch" and not own:  # the package's bound advantages of scale=batch only
        yield "advantage_clip", f"scale={algorithm.scale}", "scale=batch"
    if algorithm.loss_aggregation == "token":
        unless = "loss_aggregation=action or loss_aggregation=constant"
        yield "normalize_by", "loss_aggregation=token", unless


def _check_dynamic_sampling(algorithm: Algorithm) -> None:
    if algorithm.dynamic_sampling and not algorithm.zero_if_equal:
        given = [f"advantage={algorithm.advantage}"]
        given += ["estimator.baseline=batch"] * algorithm.estimator.over_batch
        given += ["estimator.gain=reference"] * algorithm.estimator.scores_answers
        given += ["scale=batch"] * algorithm.of_group_alone
        other = ", or scale=none" * algorithm.of_group_alone
        raise ValueError(
            f"config.algorithm.dynamic_sampling: got {algorithm.dynamic_sampling} with"
            f" {' and '.join(given)}; allowed: 0{other}, since groups of equal rewards are"
            " learned from: advantages are not of a group's rewards alone."
        )


def check_weights(algorithm: Algorithm, rewards: Sequence[Reward]) -> None:
    """Checks that the weights of `config.rewards` are such as the estimator has a meaning for.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    for number, reward in enumerate(rewards):
        if algorithm.forks.kind == "candidates" and reward.weight:
            raise ValueError(
                f"config.rewards[{number}].weight: got {reward.weight:g} of {reward.label} with"
                " forks.kind=candidates; allowed: 0, since only the judge's scores are rewarded."
            )
    if algorithm.estimator_entry.signed_weights:
        return
    for number, reward in enumerate(rewards):
        if reward.weight < 0:
            raise ValueError(
                f"config.rewards[{number}].weight: got {reward.weight:g} of {reward.label} with"
                f" advantage={algorithm.advantage}; allowed: a number >= 0."
            )


def _check_order(algorithm: Algorithm, turns: int) -> None:
    if algorithm.order == "custom" and sorted(algorithm.custom_order) != list(range(turns)):
        raise ValueError(
            f"config.algorithm.custom_order: got {algorithm.custom_order}; allowed for"
            f" order=custom: every turn from 0 to {turns - 1} once (rollout.max_turns={turns})."
        )
    if algorithm.order != "custom" and algorithm.custom_order:
        raise ValueError(
            f"config.algorithm.custom_order: got {algorithm.custom_order} with"
            f" order={algorithm.order}; allowed: () unless order=custom."
        )
    if algorithm.order == "custom" and algorithm.turns_per_update != 1:
        raise ValueError(
            f"config.algorithm.turns_per_update: got {algorithm.turns_per_update} with"
            " order=custom; allowed: 1."
        )
    if algorithm.moments == "turn" and (
        algorithm.order == "parallel" or algorithm.turns_per_update != 1
    ):
        raise ValueError(
            f"config.algorithm.moments: got 'turn' with order={algorithm.order} and"
            f" turns_per_update={algorithm.turns_per_update}; allowed: shared, unless each step is"
            " on one turn."
        )
    if algorithm.refresh == "fused" and not fused_refresh_applies(algorithm):
        raise ValueError(
            "config.algorithm.refresh: got 'fused'; allowed with order=reverse,"
            " cumulative_ratio=True, inner_epochs=1 and minibatches_per_turn=1 only: use 'auto' or"
            " 'separate'."
        )
    # In reverse order the turns that trajectories share come last, so their ratios weigh nothing.
    if algorithm.reads_forks and algorithm.weighs and algorithm.order != "reverse":
        raise ValueError(
            f"config.algorithm.order: got {algorithm.order} with advantage={algorithm.advantage};"
            " allowed: reverse or parallel, unless cumulative_ratio=False, since the ratio of a"
            " turn that trajectories share weighs the later turns of one of them only."
        )
