"""The penalty of overlong episodes: DAPO's soft overlong punishment."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.options import Group, Setting, above, at_least, refused, required


@dataclass(frozen=True)
class Overlong(Group):
    """Options of the penalty."""

    length: int = required("a number >= 1", lambda value: value >= 1)
    """Sampled tokens of an episode from which on the whole penalty is taken from its reward."""
    buffer: int | None = at_least(1, None)
    """Tokens below the length over which the penalty grows; none: a fifth of it."""
    penalty: float = above(0, 1.0, most=1e6)
    """The largest penalty."""

    def check(self, setting: Setting) -> None:
        advantage, entry = setting.algorithm.advantage, setting.algorithm.estimator_entry
        why = ""
        if not {"reward_N", "reward_NK", "reward_NL"} & {*entry.needs}:
            why = "which the penalty does not reach"
        elif entry.reward_range is not None:
            why = "whose rewards the penalty would take out of their range"
        if why:
            given = f"{self.length} with advantage={advantage}"
            raise refused("overlong.length", given, f"none with advantage={advantage}, {why}")
        if self.buffer is not None and self.buffer > self.length:
            given = f"{self.buffer} with length={self.length}"
            raise refused("overlong.buffer", given, f"at most {self.length}")

    def reward(self, tokens: int) -> float:
        """0 up to length - buffer tokens, then falling to -penalty (arXiv:2503.14476, Eq. 13).

        Args:
          tokens: sampled tokens of an episode.

        Returns: reward units, in [-penalty, 0].
        """
        buffer = self.length / 5 if self.buffer is None else self.buffer
        return -self.penalty * min(max((tokens - (self.length - buffer)) / buffer, 0.0), 1.0)
