"""What a name in the configuration stands for: one of ours, or a user's `module:attribute`.

A name of ours is a file of `algorithms/estimators` or `algorithms/objectives`. It is found as a
user's module is, when it is asked for: reading a configuration imports no formula before that, and
a new file is all that a new name needs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from seeupo_jax.configuration.fields import checked, describe

# Field of `config.algorithm` -> the folder of ours, and the class of an entry.
_KINDS = {
    "advantage": ("seeupo_jax.algorithms.estimators", "Estimator"),
    "objective": ("seeupo_jax.algorithms.objectives", "Objective"),
}


@functools.cache
def entry_names(field: str) -> tuple[str, ...]:
    """The names of ours for `advantage` or `objective`."""
    found = importlib.util.find_spec(_KINDS[field][0])
    return tuple(module.name for module in pkgutil.iter_modules(found.submodule_search_locations))


def entry_point(field: str, default: str) -> Any:
    """A field of such a name, or of a user's `module:attribute`."""
    names = entry_names(field)
    allowed = f"one of {', '.join(names)}, or module:attribute"
    return checked(default, allowed, lambda value: value in names or ":" in value)


@functools.cache
def find_entry(field: str, name: str) -> Any:
    """The `Estimator` or `Objective` that a name stands for.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    folder, kind = _KINDS[field]
    if ":" in name:
        entry = vars(importlib.import_module(folder))[kind]
        fits = functools.partial(_is_a, entry)
        return import_attribute(name, f"config.algorithm.{field}", kind, fits)
    if name not in entry_names(field):
        names = ", ".join(entry_names(field))
        raise ValueError(
            f"config.algorithm.{field}: got {name!r}; allowed: one of {names}, or module:attribute."
        )
    return vars(importlib.import_module(f"{folder}.{name}"))[kind.upper()]


def _is_a(cls: type, value: Any) -> bool:
    return isinstance(value, cls)


def entries_with(field: str, fits: Callable[[Any], bool]) -> list[str]:
    """`field=NAME` of all of ours that are so."""
    return [f"{field}={name}" for name in entry_names(field) if fits(find_entry(field, name))]


def import_attribute(name: str, field: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """What lies at a user's `module:attribute`.

    Args:
      field: full name of the field that has it, in errors.
      kind: what it is to be, in a word, and `fits` whether a value is one.

    Raises:
      ValueError: there is no such module or attribute, or the module fails; one sentence.
    """
    module_name, _, attribute = name.partition(":")
    # `python -m` puts the working directory on the path, an installed command does not.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is run by this
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{field}: got {name!r}, but there is no module {missing!r}; allowed: one that is"
                " installed or lies in the working directory."
            ) from None
        raise ValueError(f"{field}: {name!r} cannot be imported: {describe(error)}.") from error
    if not fits(vars(module).get(attribute)):
        those = [key for key, value in vars(module).items() if key[:1] != "_" and fits(value)]
        raise ValueError(
            f"{field}: got {name!r}, but {module_name} has no {kind} {attribute!r}; it has"
            f" {', '.join(those) if those else 'none'}."
        )
    return vars(module)[attribute]
