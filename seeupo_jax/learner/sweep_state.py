"""The state of a sweep between two updates: the argument and the result of `update_turn`."""

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
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.types import TrainState, TurnBatch

INITIAL = ("trainer_logp", "entropy")  # the names in `SweepData.initial`

PerToken = Mapping[str, Sequence[np.ndarray]]


@dataclass(frozen=True)
class SweepData:
    """The data that all steps of a sweep share.

    rows: the segments that it learns from, with rejected tokens as context.
    valid: the number of their trajectories.
    initial: log-probability and entropy of every token at the start of the sweep, one array a
      segment, aligned with its tokens; NaN at context, and where it was not computed.
    initial_metrics: metrics of the passes before the first update.
    sampled: `rows` before tokens were rejected.
    """

    rows: SegmentBatch
    valid: int
    initial: PerToken
    initial_metrics: Mapping[str, float]
    sampled: SegmentBatch


class TokenCounts(NamedTuple):
    """Tokens of passes.

    tokens: of all spans. computed: with tokens that spans share counted once. padded: with padding.
    """

    tokens: int = 0
    computed: int = 0
    padded: int = 0


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of a sweep; the device may still be computing it.

    turns: the updated turns.
    advantage: of every token, one array a segment of the sweep's `SegmentBatch`.
    cumulative_ratio_N: float32 [N]; the step's weights are M = advantage x this.
    metrics: float32 scalars by name; the loss, the gradient's norm, and sums over `actions`.
    """

    turns: tuple[int, ...]
    advantage: Sequence[np.ndarray]
    cumulative_ratio_N: jax.Array
    metrics: Mapping[str, Any]


class StepScores(NamedTuple):
    """Log-probabilities and entropies [P, A] of the tokens of a sweep's one step, before it.

    entropy_PA: None: not computed.
    """

    spans: Sequence[ActionSpan]
    logp_PA: jax.Array
    entropy_PA: jax.Array | None


class SweepState(NamedTuple):
    """A sweep between two updates.

    train: the training state, which the next step donates.
    cumulative_ratio_N: float32 [N], the product of the ratios of the updated turns (Eq. 8):
      M = advantage x this; donated as well.
    per_token: fields of every token that the steps read, by the names of `TurnBatch`.
    done: finished updates of the plan.
    steps: the optimizer steps so far.
    refresh_next: spans of the last step, whose ratios a fused next step multiplies in.
    pending_logp: with old_policy=turn, spans whose old log-probabilities [P, A] are on the device
      only; `fetch_pending` moves them to `per_token`.
    counts: tokens of the steps and of the refreshes so far.
    step_scores: of the step, where no pass before it scored the old policy; None: one did.
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
    step_scores: StepScores | None = None

    def after_step(
        self,
        turns: tuple[int, ...],
        train: TrainState,
        cumulative_ratio_N: jax.Array,
        metrics: Mapping[str, Any],
    ) -> SweepState:
        """The state after an optimizer step with the weights of `cumulative_ratio_N`."""
        # Copied, on the device: the next program overwrites the donated ratios.
        step = OptimizerStep(
            turns, self.per_token["advantage"], jnp.copy(cumulative_ratio_N), metrics
        )
        return self._replace(
            train=train, cumulative_ratio_N=cumulative_ratio_N, steps=(*self.steps, step)
        )

    def batch(self, learner: Learner, layout: Layout) -> tuple[SweepState, TurnBatch]:
        """The state with a layout's tokens counted, and the layout as a padded batch."""
        shapes = learner.shapes
        room = {"action": shapes.action, "copies": learner.adapters_per_update}
        batch = turn_batch(self.data.rows, layout, shapes, self.per_token, **room)
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
