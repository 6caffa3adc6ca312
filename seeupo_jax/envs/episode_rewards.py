"""Rewards of episodes that are scored by the share of requirements met; degenerate messages."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

MAX_PIECE = 256  # characters of a repeated piece
MIN_REPEATS = 8
MIN_REPEATED = 400  # characters of all repeats together
MAX_CHARS = 32_768  # at the end of a message, in which repetition is searched

# Markers that only a chat template may write: <|im_start|> and similar ones with either kind of
# bar, the tags around a tool's answer, Gemma's turns, the instructions of Llama 2 and Mistral.
_CONTROL = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]{1,64}[|\uff5c]>|</?tool_response>|<(?:start|end)_of_turn>|\[/?INST\]"
)


# An episode's reward, from the share of its requirements that are met (1: success) and whether one
# of its messages was degenerate.
REWARDS: dict[str, Callable[[float, bool], float]] = {
    "official": lambda share, degenerate: float(share == 1),
    "fraction": lambda share, degenerate: share,
    "shaped": lambda share, degenerate: -1.0 if degenerate else (share == 1) + 0.5 * share,
}


class EpisodeReward:
    """An episode's reward in steps, whose sum is correct wherever the episode is truncated.

    degenerate: whether any message so far was degenerate.

    Args:
      kind: one of `REWARDS`.
    """

    def __init__(self, kind: str):
        self._episode_reward, self._earned = REWARDS[kind], 0.0
        self.degenerate = False

    def read(self, message: str) -> None:
        """Checks a message of the policy for degeneracy."""
        self.degenerate = self.degenerate or is_degenerate(message)

    def step_reward(self, share: float) -> float:
        """Returns the reward of a step after which this share of the requirements is met."""
        before, self._earned = self._earned, self._episode_reward(share, self.degenerate)
        return self._earned - before


def is_degenerate(text: str) -> bool:
    """Whether a message repeats itself or contains a control token's name as text.

    It repeats itself if a piece of at most `MAX_PIECE` characters occurs at least `MIN_REPEATS`
    times in direct succession, over at least `MIN_REPEATED` of the last `MAX_CHARS` characters.
    """
    return _CONTROL.search(text) is not None or _repeats(text[-MAX_CHARS:])


def _repeats(text: str) -> bool:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    for period in range(1, min(MAX_PIECE, len(codes) // MIN_REPEATS) + 1):
        needed = max(MIN_REPEATS * period, MIN_REPEATED) - period
        same = codes[period:] == codes[:-period]
        if np.count_nonzero(same) >= needed and _longest_run(same) >= needed:
            return True
    return False


def _longest_run(flags: np.ndarray) -> int:
    """Returns the length of the longest run of true values."""
    ends = np.flatnonzero(~flags)
    return int(np.diff(ends, prepend=-1, append=len(flags)).max()) - 1
