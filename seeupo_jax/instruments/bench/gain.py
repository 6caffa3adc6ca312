"""The information gain of all turns from one pass, against a pass for each context.

Both score the same answers behind the same contexts, under the same weights, and must give the same
gains, or nothing is timed. Packing on the host is part of each pass.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from seeupo_jax.benchmarks import comparison, machine
from seeupo_jax.benchmarks.comparison import TOLERANCES, Timing
from seeupo_jax.benchmarks.jax_runner import JaxSweeps
from seeupo_jax.benchmarks.settings import BenchSettings
from seeupo_jax.benchmarks.workloads import prepared
from seeupo_jax.learner.batching import SegmentBatch, all_actions, lay_out, turn_batch
from seeupo_jax.learner.credit.information_gain import (
    AnswerTokens,
    Branches,
    answer_branches,
    branch_batch,
    information_gain,
)

TEMPLATE, ANSWER = 8, 16  # tokens before the answer's own, and of it
PLAIN, BRANCHES, SEPARATE = "no gains", "branches of one pass", "a pass for each context"


class _Passes:
    """The first pass of a sweep, without gains and with them in either way."""

    def __init__(self, sweeps: JaxSweeps, seed: int):
        self._learner, self._state = sweeps.learner, sweeps.state
        self._mesh, self.trajectories = sweeps.policy.mesh, sweeps.trajectories
        self.rows = SegmentBatch.of(sweeps.trajectories)
        rng, size = np.random.default_rng(seed), TEMPLATE + ANSWER
        vocabulary = sweeps.policy.network.arch.vocab_size
        tokens = rng.integers(0, vocabulary, (1 + max(t.group for t in self.trajectories), size))
        scored_L = np.arange(size) >= TEMPLATE
        self._answers = {
            t.task_id: AnswerTokens(tokens[t.group].astype(np.int32), scored_L)
            for t in self.trajectories
        }

    def plain(self) -> None:
        """The pass that a sweep begins with anyway."""
        shapes, spans = self._learner.shapes, all_actions(self.rows)
        layout = lay_out(self.rows, spans, shapes, shapes.long)
        self._score(turn_batch(self.rows, layout, shapes, {}, action=shapes.longest))

    def branches(self) -> list[np.ndarray]:
        """The same pass with the answers as branches."""
        branches = self._branches()
        batch, span_slots, _ = branch_batch(branches, all_actions(self.rows), self._learner.shapes)
        return information_gain(branches, span_slots, self._score(batch), self.trajectories)

    def separate(self) -> list[np.ndarray]:
        """That pass, and one for the contexts of each turn."""
        self.plain()
        branches, shapes = self._branches(), self._learner.shapes
        logp = np.zeros((len(branches.spans), ANSWER), np.float32)
        for turn in sorted(set(branches.turn_B)):
            places = [place for place, each in enumerate(branches.turn_B) if each == turn]
            spans = [branches.spans[place] for place in places]
            layout = lay_out(branches.rows, spans, shapes, shapes.long)
            batch = turn_batch(branches.rows, layout, shapes, {}, action=shapes.longest)
            logp[places] = self._score(batch)[: len(places), :ANSWER]
        span_slots = [(place, 0) for place in range(len(branches.spans))]
        return information_gain(branches, span_slots, logp, self.trajectories)

    def _branches(self) -> Branches:
        return answer_branches(self.rows, self.trajectories, self._answers, self._learner.shapes)

    def _score(self, batch: Any) -> np.ndarray:
        with jax.set_mesh(self._mesh):
            return np.asarray(self._learner.score(self._state.params, batch))


def run(settings: BenchSettings) -> dict[str, Any]:
    """Checks, measures and prints; the figures.

    Raises:
      ValueError: a wrong setting, or gains that differ.
    """
    dtype = machine.fast_dtype(machine.only_device())
    with prepared(settings, dtype) as inputs:
        about = comparison.about("gain", settings, inputs.arch, inputs.work)
        passes = _Passes(JaxSweeps(inputs), settings.seed)
    passes.plain()
    one, other = (np.concatenate(gains()) for gains in (passes.branches, passes.separate))
    difference = float(np.nanmax(np.abs(one - other)) / np.nanmax(np.abs(one)))
    if not difference <= TOLERANCES[dtype] or (np.isnan(one) != np.isnan(other)).any():
        raise ValueError(
            f"bench: gains of the two ways differ by {difference:.2g} of the largest; allowed in"
            f" {dtype}: {TOLERANCES[dtype]:g}. Nothing was timed."
        )
    contenders = {PLAIN: passes.plain, BRANCHES: passes.branches, SEPARATE: passes.separate}
    timings = comparison.alternate(
        {name: comparison.timed(call) for name, call in contenders.items()}, settings.repeats
    )
    turns = [trajectory.turns for trajectory in passes.trajectories]
    figures = about | {
        "largest_difference": difference,
        "gains": int((~np.isnan(one)).sum()),
        "passes": 1 + max(turns),
        "separate_over_branches": comparison.ratio(timings[SEPARATE], timings[BRANCHES]),
        "branches_over_none": comparison.ratio(timings[BRANCHES], timings[PLAIN]),
        "contenders": {name: timing.as_json() for name, timing in timings.items()},
    }
    _print(figures, timings)
    return figures


def _print(figures: dict[str, Any], timings: dict[str, Timing]) -> None:
    faster, dearer = (
        figures[name]["ratio"] for name in ("separate_over_branches", "branches_over_none")
    )
    print(
        f"{faster:.2f}x faster than {figures['passes']} passes; {dearer:.2f}x a pass without gains"
    )
    difference = figures["largest_difference"]
    print(f"{figures['gains']} gains; they differ by {difference:.1g} of the largest at most")
    for name, timing in timings.items():
        print(
            f"{name:24} {timing.median:8.3f} s ({min(timing.each):.3f} to {max(timing.each):.3f})"
        )
