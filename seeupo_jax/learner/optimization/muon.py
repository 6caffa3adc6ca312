"""Muon, whose orthogonal updates are for some of a policy's parameters, and AdamW for the others.

Its authors train the matrices of hidden layers with it, and the rest (embedding, output table,
norms, biases) with AdamW: https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

# A row for each word, or for each channel: no linear maps between hidden states.
_TABLES = {"embedding", "head", "conv1d"}
# Arguments of `optax.adamw`, as `optax.contrib.muon` names them.
_ADAMW = {
    "b1": "adam_b1",
    "b2": "adam_b2",
    "eps": "eps",
    "eps_root": "adam_eps_root",
    "weight_decay": "adam_weight_decay",
    "mu_dtype": "mu_dtype",
}
_MATRIX = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def matrix_axes(params: Any) -> Any:
    """The axes of each parameter that are a matrix; None: Adam's. For `optax.contrib.muon`.

    With `model.scan_layers` an array holds the parameters of all layers, and one of a mixture of
    experts those of all experts: these axes come first, and each matrix is orthogonalised by
    itself. By default optax takes every array of two axes for a matrix and no other: the norms of
    stacked layers, and not their matrices.

    Args:
      params: a tree like a policy's parameters; what is masked stays.
    """

    def axes(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        names = [getattr(key, "key", None) for key in path]
        after = names[names.index("layers") + 1 :] if "layers" in names else []
        stacked = bool(after) and not isinstance(after[0], int)
        is_matrix = leaf.ndim - stacked >= 2 and not _TABLES & set(names)
        return _MATRIX if is_matrix else None

    return jax.tree_util.tree_map_with_path(axes, params)


def muon(
    kwargs: Mapping[str, Any], learning_rate: float, rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """`optax.contrib.muon` for the matrices of layers, and plain AdamW for the rest.

    optax's own AdamW has Muon's Nesterov momentum, which makes its first step 1.47 times as long;
    Muon's authors train the rest without (KellerJordan/Muon, `MuonWithAuxAdam`).

    Args:
      kwargs: of `optax.contrib.muon`, as configured; an `adam_learning_rate` among them follows the
        schedule, too.
      learning_rate: as configured. rate: what it is at a step.
    """
    axes = kwargs.get("muon_weight_dimension_numbers") or matrix_axes
    options = dict(kwargs) | {"muon_weight_dimension_numbers": axes}
    given = {name: options[key] for name, key in _ADAMW.items() if key in options}
    adam, adam_rate = options.get("adam_learning_rate"), rate
    if adam is not None:
        adam_rate = adam
        if callable(rate):
            adam_rate = _in_proportion(rate, adam / learning_rate)

    def labels(params: Any) -> Any:
        def of_subtree(axes: Any, params: Any) -> Any:
            return jax.tree.map(lambda _: "adam" if axes is None else "muon", params)

        of_params = axes(params) if callable(axes) else axes
        return jax.tree.map(of_subtree, of_params, params, is_leaf=_is_axes)

    parts = {
        "muon": optax.contrib.muon(rate, **options),
        "adam": optax.adamw(adam_rate, **{"weight_decay": 0.0} | given),
    }
    return optax.partition(parts, labels)


def _is_axes(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


def _in_proportion(rate: optax.Schedule, factor: float) -> optax.Schedule:
    return lambda step: rate(step) * factor
