"""A sweep between two of its steps: a state that goes into `update_turn` and comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.learner.batching import (
    ActionSpan,
    Layout,
    SegmentBatch,
    scatter,
    turn_batch,
)
from seeupo_jax.learner.program_cache import Learner
from seeupo_jax.types import TrainState, TurnBatch

INITIAL = ("trainer_logp", "entropy")  # of `SweepData.initial`

PerToken = Mapping[str, Sequence[np.ndarray]]


@dataclass(frozen=True)
class SweepData:
    """The data that all steps of a sweep share.

    rows: the segments that it learns from.
    valid: the number of trajectories that they are of.
    initial: log-probability and entropy of every token as the sweep began, one array a segment,
      aligned with its tokens; NaN at context, and where it was not computed.
    initial_metrics: of what the sweep began with.
    """

    rows: SegmentBatch
    valid: int
    initial: PerToken
    initial_metrics: Mapping[str, float]


class TokenCounts(NamedTuple):
    """Tokens that steps went through: each row for itself; what rows share once; with padding."""

    tokens: int = 0
    computed: int = 0
    padded: int = 0


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of a sweep; the device may still be computing it.

    turns: that it updated.
    advantage: of every token, one array a segment of the sweep's `SegmentBatch`.
    cumulative_ratio_N: float32 [N]; the step weighed a trajectory by M = advantage x this.
    metrics: float32 scalars by name; the loss, the gradient's norm, and sums over `actions`.
    """

    turns: tuple[int, ...]
    advantage: Sequence[np.ndarray]
    cumulative_ratio_N: jax.Array
    metrics: Mapping[str, Any]


class SweepState(NamedTuple):
    """A sweep between two of its steps.

    train: the training state, which the next step is given for good.
    cumulative_ratio_N: float32 [N], the product of the ratios of the turns that are updated
      (Eq. 8): M = advantage x this; given for good as well.
    per_token: what the steps read of every token, by the names of `TurnBatch`.
    done: steps of the order.
    steps: the optimizer steps so far.
    refresh_next: spans that the last step updated, whose ratios the next step multiplies in.
    pending_logp: with old_policy=turn, spans whose old log-probabilities [P, A] are on the device
      only; `per_token` has them after `fetch_pending`.
    counts: of the steps and of the refreshes so far.
    """

    data: SweepData
    train: TrainState
    cumulative_ratio_N: jax.Array
    per_token: PerToken
    done: int = 0
    steps: tuple[OptimizerStep, ...] = ()
    refresh_next: Sequence[ActionSpan] = ()
    pending_logp: tuple[Sequence[ActionSpan], jax.Array] | None = None
    counts: TokenCounts = TokenCounts()

    def after_step(
        self,
        turns: tuple[int, ...],
        train: TrainState,
        cumulative_ratio_N: jax.Array,
        metrics: Mapping[str, Any],
    ) -> SweepState:
        """After an optimizer step that weighed by `cumulative_ratio_N`."""
        # Copied, on the device: what comes next overwrites the ratios where they lie.
        step = OptimizerStep(
            turns, self.per_token["advantage"], jnp.copy(cumulative_ratio_N), metrics
        )
        return self._replace(
            train=train, cumulative_ratio_N=cumulative_ratio_N, steps=(*self.steps, step)
        )

    def batch(self, learner: Learner, layout: Layout) -> tuple[SweepState, TurnBatch]:
        """Spans that were laid out as a padded batch, and the state that has counted them."""
        shapes = learner.shapes
        batch = turn_batch(self.data.rows, layout, shapes, self.per_token, action=shapes.action)
        _, R, L = batch.tokens_MRL.shape
        counts = TokenCounts(
            self.counts.tokens + sum(span.end for span in layout.spans),
            self.counts.computed + layout.tokens,
            self.counts.padded + int(batch.microbatches) * R * L,
        )
        return self._replace(counts=counts), batch

    def with_logp(
        self, name: str, spans: Sequence[ActionSpan], logp_PA: np.ndarray | jax.Array
    ) -> SweepState:
        """The state with new log-probabilities of a name at these spans."""
        replaced = list(self.per_token[name])
        for segment in {span.segment for span in spans}:
            replaced[segment] = replaced[segment].copy()
        scatter(replaced, spans, np.asarray(logp_PA))
        return self._replace(per_token={**self.per_token, name: replaced})

    def fetch_pending(self) -> SweepState:
        """The state with pending log-probabilities in `per_token`; this waits for the device."""
        if self.pending_logp is None:
            return self
        return self.with_logp("old_logp", *self.pending_logp)._replace(pending_logp=None)
