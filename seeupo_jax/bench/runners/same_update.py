"""Whether two sweeps from the same weights did the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Float32 differs by the order of sums; bfloat16 by about 1% of a log-probability (8 bits), which
# the ratios' exponent and Adam's quotient carry on.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
COMPARED = ("loss", "kl", "weights")


@dataclass(frozen=True)
class Outcome:
    """A sweep's steps, plain values by name, and the weights after it by their names in files."""

    steps: Sequence[Mapping[str, Any]]
    tensors: Mapping[str, np.ndarray]


def differences(one: Outcome, other: Outcome) -> dict[str, float]:
    """The greatest difference of each kind of number, against 1 or the number if that is larger.

    What does not fit together at all (other steps, other tensors, no number on one side) is
    infinitely different.
    """
    found = {name: _of_steps(one, other, name) for name in COMPARED}
    same = one.tensors.keys() == other.tensors.keys()
    each = [_greatest(one.tensors[n], other.tensors[n]) for n in one.tensors] if same else []
    return found | {"parameters": max(each, default=np.inf)}


def moved(start: Mapping[str, np.ndarray], after: Outcome) -> dict[str, float]:
    """How far a sweep itself changed what is compared: without that nothing would be shown."""
    weights = [_numbers(step["weights"]) for step in after.steps]
    return {
        "weights": max(_greatest(weights[-1], first) for first in weights),
        "parameters": max(_greatest(after.tensors[name], start[name]) for name in start),
    }


def require_same(one: Outcome, other: Outcome, names: tuple[str, str], dtype: str) -> dict:
    """The differences, all of them within what the type of the activations allows.

    Args:
      names: of the two sides, for the error.

    Raises:
      ValueError: they are not.
    """
    found, most = differences(one, other), TOLERANCES[dtype]
    wrong = [name for name, difference in found.items() if not difference <= most]
    if wrong:
        told = ", ".join(f"{name} by {found[name]:.2g}" for name in wrong)
        raise ValueError(
            f"bench: after one sweep from the same weights {names[0]} and {names[1]} differ:"
            f" {told}; allowed in {dtype}: {most:g}. Nothing was timed."
        )
    return found


def _of_steps(one: Outcome, other: Outcome, name: str) -> float:
    if [step["turns"] for step in one.steps] != [step["turns"] for step in other.steps]:
        return np.inf
    pairs = zip(one.steps, other.steps, strict=True)
    each = [_greatest(_numbers(a[name]), _numbers(b[name])) for a, b in pairs]
    return max(each, default=np.inf)


def _numbers(value: Any) -> np.ndarray:
    """Plain values as numbers; NaN for None."""
    return np.array(value, np.float64)


def _greatest(one: np.ndarray, other: np.ndarray) -> float:
    """NaN is the same as NaN, and infinitely far from a number."""
    if one.shape != other.shape:
        return np.inf
    both = np.isnan(one) & np.isnan(other)
    apart = np.abs(one - other) / np.maximum(1, np.abs(other))
    return float(np.where(both, 0, np.where(np.isnan(apart), np.inf, apart)).max(initial=0))
