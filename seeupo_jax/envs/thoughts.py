"""Where the thoughts of a model's text stand."""

from __future__ import annotations

import re

from seeupo_jax.envs.base import THOUGHT, THOUGHT_END


def thoughts_end(text: str) -> int:
    """Where the thoughts at a text's start end; 0: there are none; its length: they do not end.

    They begin with `<think>`, or, where the chat template has written that, at once: then their
    `</think>` begins or ends a line, as none can within a call in JSON. Python may hold such a line
    in a string of several lines: `parse_python` takes it for the end of thoughts.
    """
    place = text.find(THOUGHT_END)
    if text.lstrip().startswith(THOUGHT):
        return len(text) if place < 0 else place + len(THOUGHT_END)
    if place < 0:
        return 0
    # Each streamed piece asks anew: only the lines from the first `</think>` on are matched.
    end = _UNOPENED_END.search(text, max(text.rfind("\n", 0, place), 0))
    return end.end() if end else 0


def thought_tags(text: str) -> tuple[int, ...]:
    """Where the tags stand of the thoughts at a text's start that end."""
    opening, end = text.find(THOUGHT), thoughts_end(text)
    if not text[:end].endswith(THOUGHT_END):
        return ()
    closing = end - len(THOUGHT_END)
    return (opening, closing) if text.lstrip().startswith(THOUGHT) else (closing,)


_UNOPENED_END = re.compile(r"(?:\A|\n)[ \t]*</think>|</think>(?=[ \t]*\n)")
