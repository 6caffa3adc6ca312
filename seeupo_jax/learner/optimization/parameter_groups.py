"""Groups of parameters by their paths: which train in which way, and which do not train."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from seeupo_jax.configuration.optimizer_schema import ParameterGroup
from seeupo_jax.configuration.user_code import shown
from seeupo_jax.policy.network import Network, join_params, split_trainable

REST = "rest"  # the label of parameters that no group has


def path_name(path: Sequence[Any]) -> str:
    """A parameter's path in words, such as `layers/0/q/kernel`.

    Args:
      path: keys of the tree of parameters, as `jax.tree_util` has them.
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def of_all_layers(name: str) -> str:
    """A path's name as a glob of the same parameter in all layers, such as `layers/*/q/kernel`."""
    return re.sub(r"(?<=layers/)\d+(?=/)", "*", name)


def group_of(groups: Sequence[ParameterGroup], name: str) -> int | None:
    """Index of the first group whose pattern matches a path's name; None: none does."""
    return next((i for i, g in enumerate(groups) if fnmatchcase(name, g.pattern)), None)


def labels(groups: Sequence[ParameterGroup], params: Any) -> Any:
    """A tree like the parameters of the index of each one's group, as text, or `REST`."""

    def label(path: Any, _: Any) -> str:
        index = group_of(groups, path_name(path))
        return REST if index is None else str(index)

    return jax.tree_util.tree_map_with_path(label, params)


def split_trained(
    groups: Sequence[ParameterGroup], network: Network, params: Any
) -> tuple[Any, Any]:
    """Splits all parameters into those that train and those that do not.

    Frozen is what is no adapter, where there are adapters, and what groups freeze.

    Raises:
      ValueError: as of `split_frozen`.
    """
    params, base = split_trainable(network, params)
    if not groups:
        return params, base
    params, frozen = split_frozen(groups, params)
    return params, join_params(frozen, base)


def split_frozen(groups: Sequence[ParameterGroup], params: Any) -> tuple[Any, Any]:
    """Splits what could train into what does, and what groups freeze.

    Args:
      params: a nested dict of arrays or shape structs.

    Raises:
      ValueError: a pattern that matches nothing, or nothing that groups before it have not; groups
        that freeze all there is.
    """
    names = [path_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    _check_patterns(groups, names)
    frozen, trained = {}, {}
    for path, leaf in flatten_dict(params).items():
        index = group_of(groups, "/".join(map(str, path)))
        freezes = index is not None and groups[index].frozen
        (frozen if freezes else trained)[path] = leaf
    if not trained:
        raise ValueError(
            f"config.optimizer.groups: got {len(groups)} that freeze all {len(names)} parameters;"
            " allowed: groups that leave some to train."
        )
    return unflatten_dict(trained), unflatten_dict(frozen)


def _check_patterns(groups: Sequence[ParameterGroup], names: Sequence[str]) -> None:
    """Every group has a parameter."""
    first = {group_of(groups, name) for name in names}
    for index, group in enumerate(groups):
        if index in first:
            continue
        field = f"config.optimizer.groups[{index}].pattern: got {shown(group.pattern)}"
        matches = [name for name in names if fnmatchcase(name, group.pattern)]
        if matches:
            raise ValueError(
                f"{field}, all of whose {len(matches)} parameters groups before it have; allowed: a"
                " pattern with others, or this group before those."
            )
        kinds = sorted({of_all_layers(name) for name in names})
        near = difflib.get_close_matches(group.pattern, kinds, n=3, cutoff=0.3)
        raise ValueError(
            f"{field}, which matches no parameter; allowed: a glob of paths such as"
            f" {', '.join(near if near else kinds[:3])}; --explain prints all."
        )
