"""What the `bfcl` environment rewards."""

from __future__ import annotations

from collections.abc import Callable

from seeupo_jax.envs.bfcl.simulated_apis import Verdict


def _official(verdict: Verdict, degenerate: bool) -> float:
    return float(verdict.valid)


def _shaped(verdict: Verdict, degenerate: bool) -> float:
    if degenerate:
        return -1.0
    return verdict.valid + 0.5 * verdict.share


def _fraction(verdict: Verdict, degenerate: bool) -> float:
    return verdict.share


# The reward of an episode so far, from its verdict and whether a message of it was degenerate.
REWARDS: dict[str, Callable[[Verdict, bool], float]] = {
    "official": _official,
    "shaped": _shaped,
    "fraction": _fraction,
}
