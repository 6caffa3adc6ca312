"""Positions of the thoughts in a model's text."""

from __future__ import annotations

import re

from seeupo_jax.envs.base import HARMONY_TAGS, THOUGHT_END, THOUGHT_TAGS


def thoughts_end(text: str) -> int:
    """Returns the end of the thoughts at a text's start.

    0: there are none; the text's length: they are not closed. Thoughts start with `<think>` or
    `[THINK]`. If the chat template has already written `<think>`, they start immediately, and their
    `</think>` must start or end a line, which is impossible within a call in JSON. A multi-line
    string of Python may contain such a line: `parse_python` takes it for the end of the thoughts.
    Of an action in harmony's format (gpt-oss), it is the start of the first other message's body.
    """
    opening, closing = thoughts_tags(text)
    if opening:
        place = text.find(closing)
        return len(text) if place < 0 else place + len(closing)
    if text.lstrip().startswith(_CHANNEL):
        return _analysis_end(text)
    place = text.find(THOUGHT_END)
    if place < 0:
        return 0
    # Called for each streamed piece: only the lines from the first `</think>` on are matched.
    end = _UNOPENED_END.search(text, max(text.rfind("\n", 0, place), 0))
    return end.end() if end else 0


def thoughts_tags(text: str) -> tuple[str, str]:
    """The tags of the thoughts that a text begins with; ("", ""): it begins with no such tag."""
    lead = text.lstrip()
    return next((tags for tags in THOUGHT_TAGS if lead.startswith(tags[0])), ("", ""))


def marks_thoughts(text: str) -> bool:
    """Whether a text begins with what its thoughts or channels begin with."""
    return bool(thoughts_tags(text)[0]) or text.lstrip().startswith(_CHANNEL)


def _analysis_end(text: str) -> int:
    """The end of harmony's messages of thoughts, and of the next one's header."""
    end = 0
    while found := _ANALYSIS.match(text, end):
        end = text.find(_END, found.end())
        if end < 0:
            return len(text)
        end += len(_END)
    said = _SAID.match(text, end)
    return said.end() if said else end


def thought_tags(text: str) -> tuple[int, ...]:
    """Returns the positions of the tags of closed thoughts at a text's start."""
    opening, closing = thoughts_tags(text)
    end = thoughts_end(text)
    if not text[:end].endswith(closing or THOUGHT_END):
        return ()
    last = end - len(closing or THOUGHT_END)
    return (text.find(opening), last) if opening else (last,)


_UNOPENED_END = re.compile(r"(?:\A|\n)[ \t]*</think>|</think>(?=[ \t]*\n)")
_START, _CHANNEL, _, _MESSAGE, _END, _ = HARMONY_TAGS
_HEADER = rf"\s*(?:{re.escape(_START)}assistant)?{re.escape(_CHANNEL)}(?:%s){re.escape(_MESSAGE)}"
_ANALYSIS = re.compile(_HEADER % "analysis")
_SAID = re.compile(_HEADER % "commentary|final")
