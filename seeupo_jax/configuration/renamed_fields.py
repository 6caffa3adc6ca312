"""Names that fields had before, for one sentence of error that gives the new one."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

from seeupo_jax.options import OPTIONAL, SECTION, names_of

# Those that do not end in the name of the option that they are now.
_RENAMED = {
    "covariance_kl": "covariance.coef",
    "gae_lambda": "estimator.lam",
    "loss_mean": "loss_aggregation",
    "tis_clip": "importance.clip",
    "value_clip": "critic.clip",
    "value_coef": "critic.coef",
    "weight": "cumulative_ratio",
}
# Fields that are gone, and what replaces them.
REPLACED = {
    "rollout_ahead": "config.rollout.max_lag=1 with config.rollout.devices or with processes of"
    " --role=rollout (config.rollout.port) replaces it",
}


def new_name(cls: type, key: str) -> str | None:
    """The full name, below a dataclass with sections, of a field that it had as `key`.

    An option had its own name, or that with a prefix: `canon_mu` is `estimator.mu`. Of options in
    several sections, the prefix tells: `fork_every` is in `forks`.
    """
    if key in _RENAMED and _RENAMED[key].partition(".")[0] in names_of(cls):
        return _RENAMED[key]
    options = {*_options(cls)}
    found = [pair for pair in options if key == pair[1] or key.endswith(f"_{pair[1]}")]
    longest = max((len(option) for _, option in found), default=0)
    found = [pair for pair in found if len(pair[1]) == longest]
    if len(found) > 1:
        found = [pair for pair in found if pair[0].startswith(key.partition("_")[0])]
    return ".".join(found[0]) if len(found) == 1 else None


def _options(cls: type) -> Iterator[tuple[str, str]]:
    """Names of the sections of a dataclass, each with the name of an option of it."""
    for field in dataclasses.fields(cls):
        classes: list[type] = []
        if section := field.metadata.get(SECTION):
            classes = [section.find(name) for name in section.names()]
        elif OPTIONAL in field.metadata:
            hint = typing.get_type_hints(cls)[field.name]
            classes = [each for each in typing.get_args(hint) if each is not type(None)]
        for each in classes:
            yield from ((field.name, option) for option in names_of(each) if option != "kind")
