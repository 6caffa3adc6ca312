"""Estimators and objectives by name: those of this package, or a user's `module:attribute`.

A name of this package is a file of `algorithms/estimators` or `algorithms/objectives`, imported on
first use: reading a configuration imports no other formula, and a new name needs only a new file.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any

from seeupo_jax.configuration.user_code import cached_by_name, import_attribute
from seeupo_jax.options import checked

# Field of `config.algorithm` -> the package of the shipped ones, and the class of an entry.
_KINDS = {
    "advantage": ("seeupo_jax.algorithms.estimators", "Estimator"),
    "objective": ("seeupo_jax.algorithms.objectives", "Objective"),
}


@functools.cache
def entry_names(field: str) -> tuple[str, ...]:
    """The shipped names for `advantage` or `objective`."""
    spec = importlib.util.find_spec(_KINDS[field][0])
    return tuple(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))


def entry_point(field: str, default: str) -> Any:
    """A configuration field of such a name, or of a user's `module:attribute`."""
    names = entry_names(field)
    allowed = f"one of {', '.join(names)}, or module:attribute"
    return checked(default, allowed, lambda value: value in names or ":" in value)


@cached_by_name
def find_entry(field: str, name: str) -> Any:
    """The `Estimator` or `Objective` that a name stands for now: a user's module may be reloaded.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    folder, kind = _KINDS[field]
    if ":" in name:
        entry_class = vars(importlib.import_module(folder))[kind]
        return import_attribute(
            name, f"config.algorithm.{field}", kind, lambda value: isinstance(value, entry_class)
        )
    if name not in entry_names(field):
        names = ", ".join(entry_names(field))
        raise ValueError(
            f"config.algorithm.{field}: got {name!r}; allowed: one of {names}, or module:attribute."
        )
    return vars(importlib.import_module(f"{folder}.{name}"))[kind.upper()]


def entries_with(field: str, fits: Callable[[Any], bool]) -> list[str]:
    """`field=NAME` of each shipped entry that fits."""
    return [f"{field}={name}" for name in entry_names(field) if fits(find_entry(field, name))]
