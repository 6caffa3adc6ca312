"""Which options of an algorithm go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from seeupo_jax.configuration.algorithm import Algorithm, fused_refresh_applies
from seeupo_jax.configuration.entry_points import entries_with, find_entry
from seeupo_jax.configuration.reward import Reward
from seeupo_jax.configuration.rules.unread_fields import unread_fields


def check_choices(
    algorithm: Algorithm,
    *,
    max_turns: int,
    ahead: bool = False,
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Checks that the options go together, and that all that differ from the defaults are read.

    Args:
      ahead: whether the policy before samples (config.rollout_ahead).
      recipe: fields that its recipe sets; those may be read by nothing once another option is
        changed.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    _check_order(algorithm, max_turns)
    _check_covariance(algorithm, max_turns, ahead)
    _check_overlong(algorithm)
    _check_reference(algorithm)
    _check_forks(algorithm)
    _check_dynamic_sampling(algorithm)
    for rule in _RULES:
        name = vars(algorithm)[rule.beside]
        entry = find_entry(rule.beside, name)
        if rule.fits(algorithm, entry):
            continue
        concerned = rule.concerns(entry)
        names = [f"{rule.beside}={name}"] if concerned else entries_with(rule.beside, rule.concerns)
        raise ValueError(
            f"config.algorithm.{rule.field}: got {vars(algorithm)[rule.field]!r} with"
            f" {rule.beside}={name}; allowed: {rule.allowed.format(' and '.join(names))}."
        )
    algorithm.estimator.check(algorithm)
    for name, why in unread_fields(algorithm, {} if recipe is None else recipe).items():
        raise ValueError(f"config.algorithm.{name}: {why}")


class _Rule(NamedTuple):
    """A field's condition on the estimator or the objective.

    beside: `advantage` or `objective`. concerns: entries that `allowed` names at {}; where the
      given one is among them, it alone.
    """

    field: str
    beside: str
    concerns: Callable[[Any], bool]
    allowed: str
    fits: Callable[[Algorithm, Any], bool]


def _takes_penalty(estimator: Any) -> bool:
    """Whether kl_in=reward reaches all rewards that it reads, and leaves them in their range."""
    rewards = {name for name in estimator.needs if name.startswith("reward")}
    reached = bool(rewards) and rewards <= {"reward_N", "reward_NL"}
    # Of a tree's leaf only the turns that are its own have a penalty.
    reached = reached and "node_NK" not in estimator.needs
    return reached and estimator.reward_range is None


def _reads_rewards(estimator: Any) -> bool:
    """Whether it reads the sum of an episode's rewards, and not only rewards by name."""
    return bool({"reward_N", "reward_NK", "reward_NL"} & {*estimator.needs})


_RULES = (
    _Rule(
        "overlong_length",
        "advantage",
        lambda estimator: not _reads_rewards(estimator),
        "none with {}, which the penalty does not reach",
        lambda algorithm, estimator: algorithm.overlong_length is None or _reads_rewards(estimator),
    ),
    _Rule(
        "overlong_length",
        "advantage",
        lambda estimator: estimator.reward_range is not None,
        "none with {}, whose rewards the penalty would take out of their range",
        lambda algorithm, estimator: (
            algorithm.overlong_length is None or estimator.reward_range is None
        ),
    ),
    _Rule(
        "critic",
        "advantage",
        lambda estimator: "value_NL" in estimator.needs,
        "none unless {}, which reads it",
        lambda algorithm, estimator: (
            (algorithm.critic != "none") == ("value_NL" in estimator.needs)
        ),
    ),
    _Rule(
        "scale",
        "advantage",
        lambda estimator: not estimator.scales,
        "batch or none with {}, which has no scale of its own",
        lambda algorithm, estimator: algorithm.scale != "group" or estimator.scales,
    ),
    _Rule(
        "kl_in",
        "advantage",
        lambda estimator: not _takes_penalty(estimator),
        "loss with {}",
        lambda algorithm, estimator: algorithm.kl_in == "loss" or _takes_penalty(estimator),
    ),
    _Rule(
        "forks",
        "advantage",
        lambda estimator: "node_NK" in estimator.needs,
        "none unless {}, which reads them",
        lambda algorithm, estimator: algorithm.forks == "none" or "node_NK" in estimator.needs,
    ),
    _Rule(
        "inner_epochs",
        "objective",
        lambda objective: not objective.has_ratio,
        "1 with {}, which has no ratio to correct for the steps before",
        lambda algorithm, objective: algorithm.inner_epochs == 1 or objective.has_ratio,
    ),
)


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


def check_ahead(algorithm: Algorithm, drawn: Mapping[str, Any]) -> None:
    """Checks that ratios can correct for trajectories that the previous policy sampled.

    The sampler's log-probability is then the old policy's. It must be of the whole softmax, as the
    trainer's is: else a ratio is not 1 where no parameter has changed.

    Args:
      drawn: top_k, top_p and grammar of config.rollout.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    needed = {
        "algorithm.old_policy": (algorithm.old_policy, algorithm.old_policy == "iteration"),
        "algorithm.tis_clip": (algorithm.tis_clip, algorithm.tis_clip is None),
        "algorithm.objective": (
            algorithm.objective,
            find_entry("objective", algorithm.objective).has_ratio,
        ),
        **{
            f"rollout.{name}": (value, value is None or (name, value) == ("top_p", 1))
            for name, value in drawn.items()
        },
    }
    for name, (value, fits) in needed.items():
        if not fits:
            ratios = entries_with("objective", lambda objective: objective.has_ratio)
            allowed = {
                "algorithm.old_policy": "iteration",
                "algorithm.objective": " or ".join(each.partition("=")[2] for each in ratios),
            }
            raise ValueError(
                f"config.rollout_ahead: got 1 with {name}={value!r}; allowed: 0 unless it is"
                f" {allowed.get(name, 'none')}, since what is sampled ahead is corrected by ratios"
                " of whole softmaxes to the policy that sampled."
            )


def _check_covariance(algorithm: Algorithm, turns: int, ahead: bool) -> None:
    if algorithm.covariance == "none":
        return
    for name, allowed in (
        ("ratio", "token"),  # of a whole action there is one log-probability, and no such token
        ("objective", "clipped"),
        ("old_policy", "iteration"),
    ):
        if (got := vars(algorithm)[name]) != allowed:
            raise ValueError(
                f"config.algorithm.covariance: got {algorithm.covariance!r} with {name}={got};"
                f" allowed: none unless {name}={allowed}, since it limits the ratios of single"
                " tokens to the policy that sampled them."
            )
    parallel = algorithm.order == "parallel"
    steps = 1 if parallel else -(-turns // algorithm.span(turns))
    steps *= algorithm.inner_epochs * algorithm.minibatches_per_turn
    if algorithm.covariance == "kl" and steps == 1 and not ahead:
        raise ValueError(
            "config.algorithm.covariance: got 'kl' with one optimizer step an iteration; allowed:"
            " none or clip, unless inner_epochs or minibatches_per_turn is above 1, since the"
            " penalty has no gradient before a step has changed the policy."
        )
    if algorithm.covariance == "clip" and algorithm.covariance_low >= algorithm.covariance_high:
        raise ValueError(
            f"config.algorithm.covariance_low: got {algorithm.covariance_low:g}; allowed: a number"
            f" < covariance_high={algorithm.covariance_high:g}."
        )


def _check_overlong(algorithm: Algorithm) -> None:
    length, buffer = algorithm.overlong_length, algorithm.overlong_buffer
    if buffer is not None and length is not None and buffer > length:
        raise ValueError(
            f"config.algorithm.overlong_buffer: got {buffer} with overlong_length={length};"
            f" allowed: at most {length}."
        )


def check_weights(algorithm: Algorithm, rewards: Sequence[Reward]) -> None:
    """Checks that the weights of `config.rewards` are such as the estimator has a meaning for.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    for number, reward in enumerate(rewards):
        if algorithm.forks == "candidates" and reward.weight:
            raise ValueError(
                f"config.rewards[{number}].weight: got {reward.weight:g} of {reward.label} with"
                " forks=candidates; allowed: 0, since the judge's scores are all that is paid."
            )
    if find_entry("advantage", algorithm.advantage).signed_weights:
        return
    for number, reward in enumerate(rewards):
        if reward.weight < 0:
            raise ValueError(
                f"config.rewards[{number}].weight: got {reward.weight:g} of {reward.label} with"
                f" advantage={algorithm.advantage}; allowed: a number >= 0."
            )


def _check_forks(algorithm: Algorithm) -> None:
    if algorithm.forks == "candidates" and not algorithm.estimator.compares_siblings:
        raise ValueError(
            "config.algorithm.forks: got 'candidates' with an estimator that compares rewards of"
            " the episode's end; allowed: none, tree or entropy, unless"
            " estimator.baseline=siblings, since candidates that are not executed have none."
        )
    # In reverse order the turns that trajectories share come last, so their ratios weigh nothing.
    if algorithm.reads_forks and algorithm.weighs and algorithm.order != "reverse":
        raise ValueError(
            f"config.algorithm.order: got {algorithm.order} with advantage={algorithm.advantage};"
            " allowed: reverse or parallel, unless weight=off, since the ratio of a turn that"
            " trajectories share weighs the later turns of one of them only."
        )


def reads_reference(algorithm: Algorithm) -> bool:
    """Whether a sweep scores actions by the reference policy."""
    needs = find_entry("advantage", algorithm.advantage).needs
    return bool(algorithm.kl_coef) or "ref_logp_NL" in needs


def _check_reference(algorithm: Algorithm) -> None:
    for name, why in {
        "kl_target": "kl_coef is multiplied, and 0 stays 0",
        "ref_every": "nothing else reads the reference policy",
    }.items():
        read = reads_reference(algorithm) if name == "ref_every" else algorithm.kl_coef
        if (got := vars(algorithm)[name]) is not None and not read:
            raise ValueError(
                f"config.algorithm.{name}: got {got:g} with kl_coef=0; allowed: none, since {why}."
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
            "config.algorithm.refresh: got 'fused'; allowed with order=reverse, weight=on,"
            " inner_epochs=1 and minibatches_per_turn=1 only: use 'auto' or 'separate'."
        )
