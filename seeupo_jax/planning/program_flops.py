"""FLOPs of a traced program, read off its jaxpr: matrix products only, a multiply-add as two.

Loops run as often as one execution's data say (`Trips`). What our own derivatives and kernels
recompute is counted separately, what rematerialised layers recompute is not. `flops.py` has the
same numbers by formula, without a program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend import core

from seeupo_jax.policy.kernels.derivatives import RECOMPUTE
from seeupo_jax.policy.kernels.grouped import GROUPED

REFRESH = "sweep/refresh"  # the scope of a turn step's continuations
# A device's platform -> what its branches of a program are for.
_BRANCHES = {"gpu": {"gpu", "cuda", "rocm"}, "cuda": {"gpu", "cuda"}}
_KEYS_HELD = "keys_gradient"  # the kernel whose programs hold sums of keys


class Flops(NamedTuple):
    """weights: of products with parameters. attention: of queries with keys, weights with values,
    and their derivatives. recomputed: what of both a backward pass computes a second time."""

    weights: float = 0.0
    attention: float = 0.0
    recomputed: float = 0.0

    def times(self, count: float) -> Flops:
        return Flops(*(value * count for value in self))

    def plus(self, other: Flops) -> Flops:
        return Flops(*map(sum, zip(self, other, strict=True)))

    @property
    def total(self) -> float:
        return self.weights + self.attention


@dataclass(frozen=True)
class Passes:
    """Loop counts of a kind of pass, on average over one execution.

    visits: blocks of keys that a block of queries meets. predicting: the share of the chunks of
    tokens in which anything is predicted. pairs, key_pairs: of blocks that a kernel of the platform
    visits in all rows, where its programs hold sums of queries, and of keys; None: all of its grid.
    """

    visits: float = 1.0
    predicting: float = 1.0
    pairs: float | None = None
    key_pairs: float | None = None


@dataclass(frozen=True)
class Trips:
    """Trips of loops in one execution: microbatches, and the chunks of each that are continued."""

    microbatches: float = 1.0
    rows: Passes = Passes()
    chunks: float = 1.0
    continued: Passes = Passes()


ONCE = Trips()


def count(program: core.ClosedJaxpr, trips: Trips = ONCE, platform: str | None = None) -> Flops:
    """FLOPs of one execution, of all devices together.

    A `shard_map` counts on each of its devices. A Pallas kernel that states its cost counts by it.

    Args:
      program: `jitted.trace(...).jaxpr`, of `learner/step/turn_step.py` if loops are not to count
        once.
      platform: whose branches run; None: the most expensive ones.
    """
    return _Walk(trips, platform).of(program.jaxpr, _Place())


class _Place(NamedTuple):
    """The place of an equation in a program: the number of loops of unknown length around it."""

    loops: int = 0
    continued: bool = False
    recomputed: bool = False
    kernel: bool = False


@dataclass(frozen=True)
class _Walk:
    trips: Trips
    platform: str | None

    def of(self, jaxpr: core.Jaxpr, place: _Place) -> Flops:
        total = Flops()
        for equation in jaxpr.eqns:
            total = total.plus(self._equation(equation, place))
        return total

    def _equation(self, equation: Any, place: _Place) -> Flops:
        name, params = equation.primitive.name, equation.params
        place = place._replace(recomputed=place.recomputed or _recomputes(equation))
        rules = {
            "dot_general": lambda: _product(equation, place),
            "while": lambda: self._loop(equation, place),
            "cond": lambda: self._branch(params, place),
            "pallas_call": lambda: self._kernel(params, place),
        }
        if name == "cond" and GROUPED in str(equation.source_info.name_stack):
            return _grouped(equation, place)
        if name in rules:
            return rules[name]()
        total = Flops()
        for inner in _inside(params):
            total = total.plus(self.of(inner, place))
        times = {"scan": lambda: params["length"], "shard_map": lambda: params["mesh"].size}
        return total.times(times.get(name, lambda: 1)())

    def _loop(self, equation: Any, place: _Place) -> Flops:
        """Microbatches outside, inside them continued chunks, innermost the pairs of blocks."""
        scope = str(equation.source_info.name_stack)
        body = equation.params["body_jaxpr"].jaxpr
        if place.kernel:
            return self.of(body, place)  # once: pairs of blocks are counted by `_kernel`
        if place.loops == 0:
            return self.of(body, place._replace(loops=1)).times(self.trips.microbatches)
        if REFRESH in scope and not place.continued:
            return self.of(body, place._replace(loops=2, continued=True)).times(self.trips.chunks)
        return self.of(body, place).times(self._passes(place).visits)

    def _branch(self, params: dict[str, Any], place: _Place) -> Flops:
        """The platform's own branch; or, where one does nothing, the other as often as it runs."""
        platforms = params.get("branches_platforms")
        each = [self.of(branch.jaxpr, place) for branch in params["branches"]]
        most = max(each, key=lambda flops: flops.total)
        if platforms is not None:
            if self.platform is None:
                return most
            names = _BRANCHES.get(self.platform, {self.platform})
            matching = [i for i, each_ in enumerate(platforms) if each_ and names & set(each_)]
            return each[matching[0] if matching else platforms.index(None)]
        idle = any(flops.total == 0 for flops in each) and not place.kernel
        return most.times(self._passes(place).predicting) if idle else most

    def _kernel(self, params: dict[str, Any], place: _Place) -> Flops:
        """Attention over token trees: for every head, what it does with each pair of blocks."""
        if params["cost_estimate"]:
            return Flops(attention=float(params["cost_estimate"].flops))
        pair = self.of(params["jaxpr"], place._replace(kernel=True))
        passes, grid = self._passes(place), params["grid_mapping"].grid
        name = str(params.get("name") or params.get("name_and_src_info"))  # by JAX's version
        pairs = passes.key_pairs if _KEYS_HELD in name else passes.pairs
        return pair.times(math.prod(grid) if pairs is None else grid[0] * pairs)

    def _passes(self, place: _Place) -> Passes:
        return self.trips.continued if place.continued else self.trips.rows


def _recomputes(equation: Any) -> bool:
    """Whether it stands in the scope itself, not among the derivatives of what does."""
    scopes = str(equation.source_info.name_stack).split("/")
    return not {RECOMPUTE, f"jvp({RECOMPUTE})"}.isdisjoint(scopes)


def _product(equation: Any, place: _Place) -> Flops:
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    flops = 2.0 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
    recomputed = flops if place.recomputed else 0.0
    # Heads are a batch of products; with parameters there is one product for all tokens.
    if batch or place.kernel:
        return Flops(attention=flops, recomputed=recomputed)
    return Flops(weights=flops, recomputed=recomputed)


def _grouped(equation: Any, place: _Place) -> Flops:
    """A product of rows with experts' parameters: each meets one matrix, on every platform.

    What fills up blocks of rows is not counted.
    """
    rows = equation.invars[1].aval  # the first argument: the platform is before it
    flops = 2.0 * rows.size * equation.outvars[0].aval.shape[-1]
    return Flops(weights=flops, recomputed=flops if place.recomputed else 0.0)


def _inside(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """The jaxprs that an equation runs."""
    kinds = (core.Jaxpr, core.ClosedJaxpr)
    for value in jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
