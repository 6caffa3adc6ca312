"""The plan of a sweep: the passes that an iteration takes, in their order, and over which turns.

The sweep executes it. The programs to compile, `--explain`, `aot`, the lengths of schedules, the
metrics of turns and the laboratory read it. Nothing here knows a device or a token: a pass over
turns that no trajectory has is left out as the sweep comes to it, and two kinds of passes that
depend on the tokens alone come on top: refreshes for which a step's program has no room, and
scores of actions whose tokens lie in several segments or minibatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from seeupo_jax.configuration.algorithm import Algorithm, fused_refresh_applies

# As the programs are named: `sweep/KIND`.
Kind = Literal[
    "score",  # log-probabilities under the policy that the sweep begins with
    "reference",  # those under the reference policy
    "teacher",  # those under a teacher, of its tasks' trajectories
    "value",  # values by the critic
    "scores",  # scores of turns by the scorer
    "scorer",  # one optimizer step of the scorer on them
    "old",  # log-probabilities of some turns under the policy just before their update
    "turn",  # optimizer steps on some turns: Eq. 6
    "refresh",  # cumulative ratios after these steps: Eq. 8
    "average",  # the average of the parameters
    "move reference",  # the reference policy follows the policy
]


class SweepPass(NamedTuple):
    """One pass over the iteration's tokens, or over the parameters.

    turns: it computes their tokens, and those before them; (): all turns, or no token.
    times: runs of its program: the optimizer steps of a pass over turns, each on its part
      of the trajectories; fewer where there are fewer trajectories. Of teachers, one of each; fewer
      where some have none of the tasks.
    rescored: before how many of these steps, the last ones, the part is scored under the current
      policy, as limits on tokens of high covariance need it. Before the first step of a sweep
      these are the log-probabilities that the sweep began with.
    refreshes: updated turns whose ratios the same program multiplies in first (Eq. 8); None: its
      program refreshes none.
    """

    kind: Kind
    turns: tuple[int, ...] = ()
    times: int = 1
    rescored: int = 0
    refreshes: tuple[int, ...] | None = None


class TurnUpdate(NamedTuple):
    """The passes that update the policy at some turns: a sweep can stop before each.

    turns: ascending.
    actions: the turns of each action, the last turns first; one action unless order=parallel.
    """

    turns: tuple[int, ...]
    actions: tuple[tuple[int, ...], ...]
    passes: tuple[SweepPass, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return sum(each.times for each in self.passes if each.kind == "turn")


@dataclass(frozen=True)
class SweepPlan:
    """All passes of a sweep: before its first update, of its updates, and after the last."""

    before: tuple[SweepPass, ...]
    updates: tuple[TurnUpdate, ...]
    after: tuple[SweepPass, ...]

    @property
    def passes(self) -> Iterator[SweepPass]:
        """All passes, in their order."""
        yield from self.before
        for update in self.updates:
            yield from update.passes
        yield from self.after

    def of(self, kind: Kind) -> list[SweepPass]:
        """The passes of a kind."""
        return [each for each in self.passes if each.kind == kind]

    def count(self, kind: Kind) -> int:
        """Runs of the program of a kind."""
        return sum(each.times for each in self.of(kind))


def plan_sweep(
    algorithm: Algorithm,
    turns: int,
    *,
    seed: int = 0,
    iteration: int | None = None,
    trajectories: int | None = None,
    ema: bool = False,
    score: bool = True,
    teachers: int = 0,
) -> SweepPlan:
    """The plan of a sweep over trajectories of at most so many turns.

    Args:
      turns: K; 0: no pass but those that follow every iteration.
      seed, iteration: of the random order. The iteration (from 1) also decides whether the
        reference policy moves; None: it does, where it ever does.
      trajectories: a pass has at most so many optimizer steps; None: as many as configured.
      ema: whether the parameters are averaged.
      score: whether the old policy is scored; False: `scores_old_policy` says that it need not be.
      teachers: models that teach, each some of the trajectories.

    Raises:
      ValueError: an unknown order.
    """
    order = _ordered(algorithm, turns, (seed,) if iteration is None else (seed, iteration))
    parts = algorithm.minibatches_per_turn
    parts = parts if trajectories is None else min(parts, trajectories)
    updates = []
    for number, of_turns in enumerate(order):
        previous, last = (order[number - 1] if number else ()), number == len(order) - 1
        passes = _update_passes(algorithm, of_turns, parts, previous, last=last, score=score)
        updates.append(TurnUpdate(of_turns, _actions(algorithm, of_turns), tuple(passes)))
    before = tuple(_first_passes(algorithm, score, teachers)) if turns else ()
    return SweepPlan(before, tuple(updates), tuple(_last_passes(algorithm, iteration, ema)))


def scores_old_policy(algorithm: Algorithm, turns: int) -> bool:
    """Whether sweeps over at most so many turns have to score the old policy before they begin.

    A sweep of one step on what its own policy sampled need not: the step itself computes the old
    policy's log-probabilities, all ratios are 1, and a gradient flows through the current ones
    alone. The pass stays where something reads these log-probabilities before the step.
    """
    estimator = algorithm.estimator
    inputs = {*algorithm.estimator_entry.needs, *algorithm.estimator_entry.optional_inputs}
    earlier = (
        algorithm.scorer is not None,
        not {"old_logp_NL", "ref_logp_NL", "collision_NL"}.isdisjoint(inputs),
        estimator.reads_entropy or estimator.scores_answers,
        algorithm.kl_in == "reward" and algorithm.kl_coef > 0,
        algorithm.mask_above is not None,
        algorithm.importance is not None,
        algorithm.covariance.kind != "none",
        algorithm.router_replay == "old",
        algorithm.truncated == "mask",  # what the step leaves out is scored too
    )
    return any(earlier) or optimizer_steps(algorithm, turns) != 1


def sweep_kinds(
    algorithm: Algorithm, *, ema: bool = False, score: bool = True, teachers: int = 0
) -> set[Kind]:
    """The kinds of passes that the sweeps of a run may take."""
    parts = algorithm.minibatches_per_turn
    # A sweep without the first pass has one step, the last.
    update = _update_passes(algorithm, (0,), parts, (), last=not score, score=score)
    first = _first_passes(algorithm, score, teachers)
    return {
        each.kind
        for passes in (first, update, _last_passes(algorithm, None, ema))
        for each in passes
    }


def refreshes_in_steps(algorithm: Algorithm) -> bool:
    """Whether an update's program also applies Eq. 8 to the update before it."""
    return algorithm.refresh != "separate" and fused_refresh_applies(algorithm)


# Both are counted without the plan, which takes memory for every turn: a configuration may allow a
# billion.


def optimizer_steps(algorithm: Algorithm, turns: int) -> int:
    """Optimizer steps of a sweep over so many turns."""
    parts = algorithm.minibatches_per_turn
    passes = _update_passes(algorithm, (), parts, (), last=True, score=True)
    steps = sum(each.times for each in passes if each.kind == "turn")
    return len(_ends(turns, _together(algorithm, turns))) * steps


def actions_per_update(algorithm: Algorithm, turns: int) -> int:
    """Actions of an update over so many turns, each with a ratio of its own."""
    return len(_ends(turns, algorithm.span(turns))) if algorithm.order == "parallel" else 1


def _first_passes(algorithm: Algorithm, score: bool, teachers: int) -> Iterator[SweepPass]:
    if score:
        yield SweepPass("score")
    if algorithm.reads_reference:
        yield SweepPass("reference")
    if teachers:
        yield SweepPass("teacher", times=teachers)
    if algorithm.critic.kind != "none":
        yield SweepPass("value")
    if algorithm.scorer is not None:
        for _ in range(algorithm.scorer_steps):
            yield SweepPass("scores")
            yield SweepPass("scorer")


def _update_passes(
    algorithm: Algorithm,
    turns: tuple[int, ...],
    parts: int,
    previous: tuple[int, ...],
    *,
    last: bool,
    score: bool,
) -> Iterator[SweepPass]:
    """The passes of an update.

    Args:
      parts: optimizer steps of a pass over the turns.
      previous: turns of the update before; (): it is the first.
      last: whether no update follows that would be weighted.
      score: whether the old policy is scored at all.
    """
    fused, unlimited = refreshes_in_steps(algorithm), algorithm.covariance.kind == "none"
    if algorithm.old_policy == "turn" and not fused and score:
        yield SweepPass("old", turns)
    for epoch in range(algorithm.inner_epochs):
        first = epoch == 0 and not previous
        rescored = 0 if unlimited else parts - first
        yield SweepPass("turn", turns, parts, rescored, previous if fused else None)
    if algorithm.weighs and not fused and not last:
        yield SweepPass("refresh", turns)


def _last_passes(algorithm: Algorithm, iteration: int | None, ema: bool) -> Iterator[SweepPass]:
    if ema:
        yield SweepPass("average")
    updates = algorithm.reference
    if updates is not None and (iteration is None or iteration % updates.every == 0):
        yield SweepPass("move reference")


def _together(algorithm: Algorithm, turns: int) -> int:
    """Turns that are updated together, at most."""
    return turns if algorithm.order == "parallel" else algorithm.span(turns)


def _ends(turns: int, together: int) -> range:
    """One past the last of every so many turns, counted from the last turn."""
    return range(turns, 0, -max(together, 1))


def _before(end: int, together: int) -> tuple[int, ...]:
    return tuple(range(max(0, end - together), end))


def _ordered(algorithm: Algorithm, turns: int, seed: Sequence[int]) -> list[tuple[int, ...]]:
    """The turns of each update, in the order that the algorithm updates them in."""
    together = _together(algorithm, turns)
    ends = _ends(turns, together)
    orders: dict[str, Callable[[], Sequence[int]]] = {
        "reverse": lambda: ends,  # SeeUPO
        "forward": lambda: ends[::-1],
        "random": lambda: [ends[i] for i in np.random.default_rng(seed).permutation(len(ends))],
        # Without the turns that no trajectory has.
        "custom": lambda: [turn + 1 for turn in algorithm.custom_order if turn < turns],
        "parallel": lambda: ends,  # one
    }
    if algorithm.order not in orders:
        raise ValueError(f"order: got {algorithm.order!r}; allowed: {', '.join(orders)}.")
    return [_before(end, together) for end in orders[algorithm.order]()]


def _actions(algorithm: Algorithm, update: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The turns of each action of an update, the last turns first."""
    if algorithm.order != "parallel":
        return (update,)
    span = algorithm.span(len(update))
    return tuple(_before(end, span) for end in _ends(len(update), span))


def action_numbers(algorithm: Algorithm, turns: int, turn_L: np.ndarray) -> np.ndarray:
    """The place in `TurnUpdate.actions` of each token's turn; any number at context."""
    return (turns - 1 - turn_L) // max(algorithm.span(turns), 1)
