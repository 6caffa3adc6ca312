"""Which of a policy's parameters Muon's orthogonal updates are for.

Its authors train the matrices of hidden layers with it, and the rest (embedding, output table,
norms, biases) with AdamW: https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

_TABLES = {"embedding", "head"}  # a row for each word: no linear map between hidden states
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


def muon_options(
    kwargs: Mapping[str, Any], learning_rate: float, rate: optax.ScalarOrSchedule
) -> dict[str, Any]:
    """Keyword arguments of `optax.contrib.muon` for a policy.

    Args:
      kwargs: as configured; an `adam_learning_rate` among them follows the schedule, too.
      learning_rate: as configured. rate: what it is at a step.
    """
    options = {"muon_weight_dimension_numbers": matrix_axes} | dict(kwargs)
    adam = options.get("adam_learning_rate")
    if adam is not None and callable(rate):
        options["adam_learning_rate"] = lambda step: rate(step) * (adam / learning_rate)
    return options
