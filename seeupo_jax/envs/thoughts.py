"""Positions of the thoughts in a model's text."""

from __future__ import annotations

import re

from seeupo_jax.envs.base import THOUGHT, THOUGHT_END


def thoughts_end(text: str) -> int:
    """Returns the end of the thoughts at a text's start.

    0: there are none; the text's length: they are not closed. Thoughts start with `<think>`. If the
    chat template has already written it, they start immediately, and their `</think>` must start or
    end a line, which is impossible within a call in JSON. A multi-line string of Python may contain
    such a line: `parse_python` takes it for the end of the thoughts.
    """
    place = text.find(THOUGHT_END)
    if text.lstrip().startswith(THOUGHT):
        return len(text) if place < 0 else place + len(THOUGHT_END)
    if place < 0:
        return 0
    # Called for each streamed piece: only the lines from the first `</think>` on are matched.
    end = _UNOPENED_END.search(text, max(text.rfind("\n", 0, place), 0))
    return end.end() if end else 0


def thought_tags(text: str) -> tuple[int, ...]:
    """Returns the positions of the tags of closed thoughts at a text's start."""
    opening, end = text.find(THOUGHT), thoughts_end(text)
    if not text[:end].endswith(THOUGHT_END):
        return ()
    closing = end - len(THOUGHT_END)
    return (opening, closing) if text.lstrip().startswith(THOUGHT) else (closing,)


_UNOPENED_END = re.compile(r"(?:\A|\n)[ \t]*</think>|</think>(?=[ \t]*\n)")
