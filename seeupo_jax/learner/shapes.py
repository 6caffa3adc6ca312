"""The few shapes of rows and batches that a sweep's programs are compiled for."""

from __future__ import annotations

from dataclasses import dataclass


def row_lengths(longest: int, *, block: int) -> tuple[int, ...]:
    """Row lengths to choose from, each a program to compile: multiples of an eighth of `longest`.

    Above the half, where most of a sweep is computed, also of a sixteenth if `block` divides it.
    """
    unit = 128 if longest >= 1024 else 16
    eighth = unit * -(-longest // (8 * unit))
    if eighth % (2 * block):
        return tuple(eighth * i for i in range(1, 9))
    return tuple(eighth * i // 2 for i in (2, 4, 6, *range(8, 17)))


@dataclass(frozen=True)
class Shapes:
    """The short list of shapes that batches are padded to: each is one compiled program.

    lengths: rising row lengths. action: action tokens of a span, at the most. rows: of a
    microbatch. trajectories: of an iteration. turns, context: of a trajectory, and its tokens, at
    the most; no context: those of the longest row. share: whether what the members of a group have
    in common is computed once. truncate: whether a row ends with its span's last token.
    refreshed: tokens of a chunk of the fused refresh; None: those of the shortest row.
    """

    lengths: tuple[int, ...]
    action: int
    rows: int
    trajectories: int
    turns: int = 1
    share: bool = True
    context: int | None = None
    truncate: bool = True
    refreshed: int | None = None

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of the fused refresh."""
        return self.lengths[0] if self.refreshed is None else self.refreshed

    @property
    def longest(self) -> int:
        """Tokens of a trajectory, at the most."""
        return self.lengths[-1] if self.context is None else self.context

    def microbatches(self, length: int, needed: int = 0) -> int:
        """M of a batch of `needed` rows of a length: room for an iteration's, or a multiple of it.

        Segments can outnumber trajectories; whole multiples keep the list of shapes short.
        """
        # Any two rows hold more together than one could: else they would be one.
        filled = 2 * self.trajectories * self.longest // length + 1
        room = -(-min(self.trajectories, filled) // self.rows)
        return room * max(1, -(-needed // (room * self.rows)))

    def spans(self, needed: int = 0) -> int:
        """P of a batch of so many spans: one of each trajectory, or a multiple of it."""
        return self.trajectories * max(1, -(-needed // self.trajectories))

    def allowed(self, tokens: int) -> tuple[int, ...]:
        """The listed lengths that hold so many tokens; ValueError: none does."""
        if tokens > self.lengths[-1]:
            raise ValueError(
                f"a row has {tokens} tokens; allowed: at most {self.lengths[-1]}, the longest of"
                " config.batching.buckets or else rollout.max_context."
            )
        return tuple(length for length in self.lengths if length >= tokens)

    @property
    def long(self) -> tuple[int, ...]:
        """Every other length from the middle on, and the last: for passes that run once a sweep."""
        return tuple(dict.fromkeys((*self.lengths[len(self.lengths) // 2 :: 2], self.lengths[-1])))
