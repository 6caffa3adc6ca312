"""Fields of an algorithm that are set and that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import entries_with, find_entry

# Fields that only some estimators or objectives read, and whether an entry does.
_OF_ENTRIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "clip_low": ("objective", lambda objective: "clip_low" in objective.bounds),
    "clip_high": ("objective", lambda objective: "clip_high" in objective.bounds),
    "clip_dual": ("objective", lambda objective: "clip_dual" in objective.bounds),
}
# Fields that only a choice reads -> its field, and the values of it; none: numbers above 0.
_OF_CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("fork_factors", "fork_every"), ("forks", ("tree",))),
    **dict.fromkeys(
        ("fork_roots", "fork_probability", "fork_entropy_coef", "fork_entropy_tokens"),
        ("forks", ("entropy",)),
    ),
    **dict.fromkeys(("fork_candidates", "fork_temperature"), ("forks", ("candidates",))),
    "fork_tokens": ("forks", ("tree", "entropy", "candidates")),
    **dict.fromkeys(
        ("value_coef", "value_clip", "critic_learning_rate"), ("critic", ("head", "model"))
    ),
    "covariance_kl": ("covariance", ("kl",)),
    "covariance_share": ("covariance", ("clip", "kl")),
    **dict.fromkeys(("covariance_low", "covariance_high"), ("covariance", ("clip",))),
    "kl_horizon": ("kl_target", ()),
    "ref_decay": ("ref_every", ()),
    **dict.fromkeys(("overlong_buffer", "overlong_penalty"), ("overlong_length", ())),
    "advantage_clip": ("scale", ("batch",)),
    "tis_level": ("tis_clip", ()),
    "pool_mean": ("loss_mean", ("action", "constant")),
}


def unread_fields(algorithm: Algorithm, recipe: Mapping[str, Any]) -> dict[str, str]:
    """Fields with a value that is neither the default nor the recipe's, and that nothing reads.

    Args:
      recipe: the fields that the algorithm's recipe sets.

    Returns: what was got and what is allowed, by field.
    """
    defaults, reasons = vars(Algorithm()), {}
    for name, value in vars(algorithm).items():
        default = defaults[name]
        if value in (default, recipe.get(name, default)) or _is_option(algorithm, name):
            continue
        if unread := _unread(algorithm, name):
            usual = "none" if default is None else default
            reasons[name] = (
                f"got {value} with {unread[0]}, which does not read it; allowed: {usual}, unless"
                f" {unread[1]}."
            )
    return reasons


def _is_option(algorithm: Algorithm, name: str) -> bool:
    """Whether the estimator reads a field; the package's bound advantages of scale=batch only."""
    ours = ":" not in algorithm.advantage
    if ours and name == "advantage_clip":
        return False
    return name == "advantage_clip" and find_entry("advantage", algorithm.advantage).scales


def _unread(algorithm: Algorithm, name: str) -> tuple[str, str] | None:
    """The choice that does not read a field, and those that do; None: it is read."""
    if name == "weight_clip":
        return _unread_weights(algorithm)
    if name == "old_policy":
        return _unread_ratios(algorithm)
    if name == "tis_level" and algorithm.ratio == "token":
        return "ratio=token", "ratio=geometric or ratio=product"
    if name in _OF_CHOICES:
        choice, values = _OF_CHOICES[name]
        got = vars(algorithm)[choice]
        if not (got in values if values else got):
            others = " or ".join(f"{choice}={value}" for value in values)
            return f"{choice}={'none' if got is None else got}", others or f"{choice} is above 0"
    if name not in _OF_ENTRIES:
        return None
    beside, reads = _OF_ENTRIES[name]
    entry = vars(algorithm)[beside]
    if reads(find_entry(beside, entry)):
        return None
    return f"{beside}={entry}", " or ".join(entries_with(beside, reads))


def _unread_weights(algorithm: Algorithm) -> tuple[str, str] | None:
    """As `_unread`, of what bounds the ratios of turns already updated."""
    if algorithm.weighs:
        return None
    given = "weight=off"
    if algorithm.weight == "on":
        given = "order=parallel" if algorithm.order == "parallel" else "turns_per_update=none"
    return given, "turns are updated one after the other with weight=on"


def _unread_ratios(algorithm: Algorithm) -> tuple[str, str] | None:
    """As `_unread`, of the denominator of ratios, in the objective and in Eq. 8."""
    if algorithm.weighs or find_entry("objective", algorithm.objective).has_ratio:
        return None
    names = entries_with("objective", lambda objective: objective.has_ratio)
    return f"objective={algorithm.objective}", " or ".join(names)
