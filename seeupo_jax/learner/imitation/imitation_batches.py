"""Batches of conversations in a seeded order, packed into rows as token trees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seeupo_jax.learner.batching import SegmentBatch, Shapes, all_actions, lay_out, turn_batch
from seeupo_jax.learner.imitation.action_segments import Segments
from seeupo_jax.policy.architecture import Routing
from seeupo_jax.types import Segment, TurnBatch


class ImitationBatch(NamedTuple):
    """A step's conversations in rows.

    rows: for the device. trained: tokens of assistant messages. tokens: all of the conversations.
    computed: the same, those that several begin with once. padded: with the rows' padding.
    """

    rows: TurnBatch
    trained: int
    tokens: int
    computed: int
    padded: int


@dataclass(frozen=True)
class Batches:
    """Endless batches of conversations in a seeded order, the same whenever they are iterated.

    A batch has `batch_size` conversations; what several of them begin with is computed once.

    conversations: as segments, each with a token to train on.
    block: so many batches (or as many as an epoch has) are sorted by length before they are cut,
      and the batches are shuffled. A batch then has conversations of similar lengths, which may be
      of one kind (episodes that failed early), and so may the last steps. 1: no sorting.
    routing: of the policy's routers; None: it has none.
    """

    conversations: Sequence[Segments]
    shapes: Shapes
    batch_size: int
    seed: int
    block: int = 1
    routing: Routing | None = None

    def __iter__(self) -> Iterator[ImitationBatch]:
        return self.after(0)

    def after(self, batches: int) -> Iterator[ImitationBatch]:
        """The batches after so many."""
        import grain  # what only measures a loss goes without it

        source = grain.MapDataset.source(range(len(self.conversations)))
        order = source.shuffle(seed=self.seed).repeat()
        size = min(self.block, max(1, len(self.conversations) // self.batch_size))
        for block in itertools.count(batches // size):
            start = block * size * self.batch_size
            indices = range(start, start + size * self.batch_size)
            shown = [self.conversations[order[i]] for i in indices]
            shown.sort(key=lambda segments: max((len(s.tokens_L) for s in segments), default=0))
            places = np.random.default_rng((self.seed, block)).permutation(size)
            for place in places[max(0, batches - block * size) :]:
                first = place * self.batch_size
                batch = shown[first : first + self.batch_size]
                yield pack(batch, self.shapes, self.routing)

    def in_order(self) -> Iterator[ImitationBatch]:
        """All conversations once, as they come."""
        for start in range(0, len(self.conversations), self.batch_size):
            end = min(start + self.batch_size, len(self.conversations))
            batch = [self.conversations[i] for i in range(start, end)]
            yield pack(batch, self.shapes, self.routing)


def pack(
    conversations: Sequence[Segments], shapes: Shapes, routing: Routing | None = None
) -> ImitationBatch:
    """Rows of the segments of some conversations; ValueError: none has a token to train on.

    Args:
      routing: as of `Batches`.
    """
    segments = [segment for each in conversations for segment in each]
    rows = _rows(segments, routing)
    spans = all_actions(rows)
    if not spans:
        raise ValueError(
            f"sft: all {len(conversations)} conversations of a batch begin with more than"
            f" {shapes.longest} tokens; allowed: prompts below config.rollout.max_context."
        )
    layout = lay_out(rows, spans, shapes)
    batch = turn_batch(rows, layout, shapes, {}, action=shapes.lengths[-1])
    return ImitationBatch(
        batch,
        sum(span.position_A.size for span in spans),
        sum(span.end for span in spans),
        layout.tokens,
        int(batch.microbatches) * shapes.rows * layout.length,
    )


def _rows(segments: Sequence[Segment], routing: Routing | None) -> SegmentBatch:
    """Segments side by side, as of one group: what any begin with alike is shared."""
    return SegmentBatch(
        tuple(s.tokens_L for s in segments),
        tuple(s.turn_L for s in segments),
        tuple(s.logp_L for s in segments),
        np.arange(len(segments), dtype=np.int32),
        np.zeros(len(segments), np.int32),
        len(segments),
        1 + max((int(s.turn_L.max()) for s in segments), default=-1),
        routing=routing,
    )
