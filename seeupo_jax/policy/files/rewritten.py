"""Episodes in which every turn is a segment of its own: how many there are, and what they cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seeupo_jax.types import CONTEXT, Segment

_SHARE = 0.5  # of episodes of several turns, above which a warning is due


@dataclass
class RewrittenEpisodes:
    """Counts of episodes.

    several: episodes of several turns. rewritten: those of them whose every turn begins a segment,
    since the chat template rewrites what came before.
    tokens: in the segments of those that are rewritten; kept: about how many one segment would
    have, in which every message stayed as it was sampled.
    """

    several: int = 0
    rewritten: int = 0
    tokens: int = 0
    kept: int = 0

    def add(self, segments: Sequence[Segment]) -> None:
        turns = {int(turn) for each in segments for turn in np.unique(each.turn_L)} - {CONTEXT}
        if len(turns) < 2:
            return
        self.several += 1
        if len(segments) == len(turns):
            self.rewritten += 1
            self.tokens += sum(len(each.tokens_L) for each in segments)
            self.kept += _kept(segments)

    def warning(self, episodes: str, remedy: Callable[[], str]) -> str | None:
        """A sentence on what the segments cost, if most episodes are rewritten; None: they are not.

        Args:
          episodes: their name. remedy: what to do, in a sentence.
        """
        if self.rewritten <= _SHARE * self.several:
            return None
        return (
            f"warning: in {self.rewritten} of {self.several} {episodes} of several turns every turn"
            f" is a segment of its own: they have {self.tokens / self.rewritten:,.0f} tokens on"
            f" average, where one segment would have about {self.kept / self.rewritten:,.0f}."
            f" {remedy()}"
        )


def _kept(segments: Sequence[Segment]) -> int:
    """The tokens of all segments without those that a later one repeats of the one before it."""
    pairs = itertools.pairwise(each.tokens_L for each in segments)
    new = (len(after_L) - _repeated(before_L, after_L) for before_L, after_L in pairs)
    return len(segments[0].tokens_L) + sum(new)


def _repeated(before_L: np.ndarray, after_L: np.ndarray) -> int:
    """The length of the common beginning, and of the end of `before_L` that follows it.

    That end is the last action without its thought.
    """
    length = min(len(before_L), len(after_L))
    different_L = before_L[:length] != after_L[:length]
    common = int(different_L.argmax()) if different_L.any() else length
    left_L, next_L = before_L[common:], after_L[common:]
    for start in np.flatnonzero(left_L == next_L[:1]) if len(next_L) else ():
        end_L = left_L[start:]
        if np.array_equal(end_L, next_L[: len(end_L)]):
            return common + len(end_L)
    return common
