"""The sampled tokens of every trajectory, in the order in which they were sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.types import CONTEXT

Ragged = list[np.ndarray]  # one array a segment, aligned with its tokens


class SampledTokens:
    """The action tokens of every trajectory in the order in which they were sampled.

    Their segments may hold them in another one. `mask_NL` is True where a padded row has a token.
    """

    def __init__(self, rows: SegmentBatch, multiple: int):
        self._sizes, self._forced = [len(tokens) for tokens in rows.tokens], rows.forced > 0
        turn, owner = np.concatenate(rows.turn), np.repeat(rows.trajectory_S, self._sizes)
        acted = np.flatnonzero(turn != CONTEXT)
        self._place = acted[np.lexsort((acted, turn[acted], owner[acted]))]
        self._turn, self._owner = turn[self._place], owner[self._place]
        count_N = np.bincount(self._owner, minlength=rows.trajectories)
        first_N = np.cumsum(count_N) - count_N
        self._column = np.arange(len(self._place)) - first_N[self._owner]
        width = multiple * max(1, -(-int(count_N.max()) // multiple))
        self.mask_NL = np.zeros((rows.trajectories, width), bool)
        self.mask_NL[self._owner, self._column] = True

    def pad(self, ragged: Ragged) -> np.ndarray:
        """Rows [N, L] of the tokens' numbers, 0 after the last."""
        padded_NL = np.zeros(self.mask_NL.shape, np.float32)
        padded_NL[self._owner, self._column] = np.concatenate(ragged)[self._place]
        return padded_NL

    def unpad(self, padded_NL: np.ndarray) -> Ragged:
        """The numbers of such rows at their tokens, 0 at context."""
        flat = np.zeros(sum(self._sizes), np.float32)
        flat[self._place] = np.asarray(padded_NL)[self._owner, self._column]
        return np.split(flat, np.cumsum(self._sizes)[:-1])

    def at_turn_ends(self, numbers: Sequence[Sequence[float]]) -> np.ndarray:
        """Rows [N, L] with a number of each turn, as its reward, at its last token.

        Where tokens were forced, that of a turn without any other is at the last one before it.

        Args:
          numbers: of each turn of each trajectory; those of trajectories left out are not read.
        """
        number_NL = np.zeros(self.mask_NL.shape, np.float32)
        if not self._place.size:  # every token was too likely to be learned from
            return number_NL
        turns = np.stack([self._owner, self._turn], axis=1)
        last = np.flatnonzero(np.append(np.any(turns[1:] != turns[:-1], axis=1), True))
        for place, after in zip(last, [*last[1:], None], strict=True):
            owner, turn = self._owner[place], self._turn[place]
            until = turn + 1
            if self._forced:
                same = after is not None and self._owner[after] == owner
                until = self._turn[after] if same else None
            number_NL[owner, self._column[place]] = sum(numbers[owner][turn:until])
        return number_NL
