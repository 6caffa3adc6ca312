"""Which messages are degenerate: repetition without end, and marks that only templates write."""

from __future__ import annotations

import re

import numpy as np

MAX_PIECE = 256  # characters of a text that is repeated
MIN_REPEATS = 8  # of it, one after the other,
MIN_REPEATED = 400  # characters that they have together
MAX_CHARS = 32_768  # from the end of a message, where repetition is looked for

# Marks that only a chat template may write: <|im_start|> and its like in both kinds of bars, the
# tags around a tool's answer, the turns of Gemma, the instructions of Llama 2 and Mistral.
_CONTROL = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]{1,64}[|\uff5c]>|</?tool_response>|<(?:start|end)_of_turn>|\[/?INST\]"
)


def is_degenerate(text: str) -> bool:
    """Whether a message repeats itself or holds a control token's name as text.

    A message repeats itself where a piece of at most `MAX_PIECE` characters stands `MIN_REPEATS`
    times or more one directly after the other, in at least `MIN_REPEATED` characters of the last
    `MAX_CHARS`.
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
    """How many true values follow each other at most."""
    ends = np.flatnonzero(~flags)
    return int(np.diff(ends, prepend=-1, append=len(flags)).max()) - 1
