"""What teachers say of sampled tokens, and the term that they add to advantages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from seeupo_jax.algorithms.distillation import UNTAUGHT, reverse_kl_advantage
from seeupo_jax.configuration.teacher_schema import Teacher
from seeupo_jax.learner.batching import (
    ActionSpan,
    SegmentBatch,
    all_actions,
    lay_out,
    scatter,
    turn_batch,
)
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.credit.sampled_tokens import Ragged
from seeupo_jax.learner.teacher import Asked, taught_by
from seeupo_jax.types import CONTEXT, TrainState


class TeacherScores(NamedTuple):
    """What teachers say of every token, one array a segment, aligned with its tokens.

    logp: of the sampled token, nats; NaN at context, and in trajectories that have no teacher.
    top, top_logp: with `top_k`, int32 [L, K] and float32 [L, K + 1], as of `TurnBatch`; `UNTAUGHT`
      where `logp` is NaN.
    """

    logp: Ragged
    top: Ragged | None = None
    top_logp: Ragged | None = None

    @classmethod
    def unknown(cls, sizes: Iterable[int], top_k: int | None) -> TeacherScores:
        """Those of segments of so many tokens that no teacher has scored."""
        sizes = list(sizes)
        logp = [np.full(size, np.nan, np.float32) for size in sizes]
        if top_k is None:
            return cls(logp)
        top = [np.zeros((size, top_k), np.int32) for size in sizes]
        return cls(logp, top, [np.full((size, top_k + 1), UNTAUGHT, np.float32) for size in sizes])

    @property
    def given(self) -> list[Ragged]:
        """Those that there are."""
        return [x for x in self if x is not None]

    @property
    def of_loss(self) -> dict[str, Ragged]:
        """Those that the loss reads, by the names of `TurnBatch` without axes."""
        named = {"teacher_top": self.top, "teacher_top_logp": self.top_logp}
        return {name: x for name, x in named.items() if x is not None}


def score_by_teachers(
    learner: Learner,
    train: TrainState,
    ref_params: Any,
    rows: SegmentBatch,
    labels: Sequence[Mapping[str, str]] | None,
) -> TeacherScores:
    """Every sampled token's scores by its trajectory's teacher.

    Args:
      labels: of each trajectory's task; None: none has any.
    """
    of_trajectory = taught_by(learner.teachers, labels, rows.trajectories)
    scores = TeacherScores.unknown(map(len, rows.tokens), learner.top_k)
    pairs = zip(learner.teachers, learner.teacher_programs, strict=True)
    for number, (teacher, program) in enumerate(pairs):
        read = teacher.hinted(rows)
        spans = [
            span
            for span in all_actions(read)
            if of_trajectory[rows.trajectory_S[span.segment]] == number
        ]
        if not spans:
            continue
        own = TeacherScores.unknown(map(len, read.tokens), learner.top_k)
        if teacher.ask is not None:
            _ask(teacher.ask, read, spans, own.logp)
        else:
            layout = lay_out(read, spans, learner.shapes, learner.shapes.long)
            batch = turn_batch(read, layout, learner.shapes, {}, action=learner.shapes.longest)
            params = teacher.parameters(train, ref_params)
            scored = jax.tree.leaves(program(params, batch))
            for numbers, scored_PA in zip(own.given, scored, strict=True):
                scatter(numbers, spans, np.asarray(scored_PA))
        for segment in {span.segment for span in spans}:
            place = teacher.place(rows.tokens[segment])
            hint = slice(place, place + len(teacher.hint))
            for target, source in zip(scores.given, own.given, strict=True):
                target[segment] = np.delete(source[segment], hint, axis=0)
    return scores


def _ask(ask: Asked, rows: SegmentBatch, spans: Sequence[ActionSpan], logp: Ragged) -> None:
    """Writes to `logp` what a teacher that is asked says of the spans' tokens."""
    answers = ask([rows.tokens[span.segment][: span.end] for span in spans])
    for span, logp_L in zip(spans, answers, strict=True):
        logp[span.segment][span.position_A] = logp_L[span.position_A - 1]


def add_teaching(
    arrays: CreditArrays, teacher: Teacher, logp: Ragged, teacher_logp: Ragged, advantage: Ragged
) -> Ragged:
    """Advantages of every token with `distillation.reverse_kl_advantage` added; as they were in
    trajectories without a teacher, and where the loss has the teachers' term.

    Args:
      logp: under the policy that the sweep begins with. teacher_logp: as of `TeacherScores`.
    """
    if teacher.top_k is not None:
        return advantage
    time = arrays.time
    teacher_NL = time.pad(teacher_logp)
    mask_NL = time.mask_NL & ~np.isnan(teacher_NL)
    options = {"coef": teacher.coef, "discount": teacher.discount}
    term_NL = reverse_kl_advantage(time.pad(logp), teacher_NL, mask_NL, **options)
    pairs = zip(advantage, time.unpad(np.asarray(term_NL)), strict=True)
    return [advantage_L + term_L for advantage_L, term_L in pairs]


def teacher_kl(rows: SegmentBatch, logp: Ragged, teacher_logp: Ragged) -> dict[str, float]:
    """Mean of log π - log π_teacher over the sampled tokens that a teacher has scored."""
    triples = zip(logp, teacher_logp, rows.turn, strict=True)
    gap = np.concatenate([(own - other)[turn_L != CONTEXT] for own, other, turn_L in triples])
    scored = gap[~np.isnan(gap)]
    mean = scored.mean(dtype=np.float64) if scored.size else np.nan
    return {"sweep/teacher_kl": float(mean)}
