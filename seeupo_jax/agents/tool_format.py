"""Formats of a model's tool calls: parses sampled text to content and calls, and writes them.

A malformed call is no call: the whole text is content, which the agent answers. Thoughts at the
start are content too: `<think>...</think>`, also if the chat template has written `<think>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from seeupo_jax.configuration.user_code import encodes
from seeupo_jax.envs.base import CALL, CALL_END, PYTHON_TAG
from seeupo_jax.envs.thoughts import thoughts_end
from seeupo_jax.envs.tool_calls import (
    ToolCall,
    ToolCallError,
    hermes_blocks,
    parse_llama,
    render_hermes,
)
from seeupo_jax.policy.files.tokenizer import Tokenizer

Message = tuple[str, tuple[ToolCall, ...]]


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    parse: parses a message's content and calls.
    render: writes the text that `parse` parses to these.
    shown: the number of characters of an incomplete text that are certainly content.
    tags: the positions of the calls' tags in a rendered text, given the length of its content.
    mark: the tag before calls, if other formats do not use it.
    """

    parse: Callable[[str], Message]
    render: Callable[[str, Sequence[ToolCall]], str]
    shown: Callable[[str], int]
    tags: Callable[[str, int], Sequence[int]] = lambda text, size: ()
    mark: str = ""


class ContentSplitter:
    """The content of a text that arrives in pieces; a possible tool call is held back."""

    def __init__(self, tool_format: ToolFormat):
        self._shown_of = tool_format.shown
        self._text, self._shown = "", 0

    def feed(self, piece: str) -> str:
        """Adds the next piece. Returns further content, as a prefix of the parsed content."""
        self._text += piece
        begin, self._shown = self._shown, max(self._shown, self._shown_of(self._text))
        return self._text[begin : self._shown]

    def rest(self, content: str) -> str:
        """The rest of the parsed content, at the end."""
        return content[self._shown :]


def choose_format(name: str) -> ToolFormat:
    """Returns a tool format by its name."""
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool_format: got {name!r}; allowed: {', '.join(TOOL_FORMATS)}.")
    return TOOL_FORMATS[name]


@lru_cache(maxsize=1)  # a process samples with one tokenizer, and reads it in one format
def template_writes(tokenizer: Tokenizer, tool_format: ToolFormat) -> bool:
    """Whether a chat template writes calls in a tool format, also several and after text."""
    if not tokenizer.writes_calls:
        return False
    content, call = "content", ToolCall("name", {"argument": 1})
    functions = [as_function(call)] * 2
    message = {"role": "assistant", "content": content, "tool_calls": functions}
    try:
        tokens = tokenizer.begin([{"role": "user", "content": "?"}], ()).say(message)
    except Exception:  # a template may raise anything
        return False
    text = tokenizer.text(tokens)
    answer = text[thoughts_end(text) :].lstrip()  # some headers open thoughts, here empty
    return tool_format.parse(answer) == (content, (call, call))


@lru_cache(maxsize=1)
def lists_tools(tokenizer: Tokenizer) -> bool:
    """Whether a conversation's tools are among its tokens."""
    asked = [{"role": "user", "content": "?"}]
    tool = {"name": "name", "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        return tokenizer.begin(asked, (tool,)).tokens != tokenizer.begin(asked, ()).tokens
    except Exception:  # a template may raise anything
        return False


def as_function(call: ToolCall) -> dict[str, object]:
    """A call in the form of chat templates."""
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message(text: str, outside: str, calls: tuple[ToolCall, ...]) -> Message:
    """Returns a text's content and calls; outside: the text without its calls."""
    named = [(call.name, call.arguments) for call in calls]
    # A lone surrogate is valid JSON but not UTF-8, and could not be sent.
    if not calls or not encodes(json.dumps(named, ensure_ascii=False)):
        return text, ()
    return outside.rstrip(), calls


def _parse_hermes(text: str) -> Message:
    try:
        blocks = hermes_blocks(text)
    except ToolCallError:
        return text, ()
    starts = [*(block.start for block in blocks), len(text)]
    ends = [0, *(block.end for block in blocks)]
    outside = (text[end:start] for end, start in zip(ends, starts, strict=True))
    return _message(text, "".join(outside), tuple(block.call for block in blocks))


def _render_hermes(content: str, calls: Sequence[ToolCall]) -> str:
    blocks = [render_hermes(call.name, **call.arguments) for call in calls]
    return "\n".join([content, *blocks] if content else blocks)


def _shown_hermes(text: str) -> int:
    return _text_before(text, CALL, thoughts_end(text))


def _hermes_tags(text: str, size: int) -> list[int]:
    return [size + match.start() for match in _RENDERED_TAG.finditer(text[size:])]


# A rendered call is one line, whose JSON contains no closing tag.
_RENDERED_TAG = re.compile(f"^{CALL}|{CALL_END}", re.MULTILINE)


def _parse_llama(text: str) -> Message:
    try:
        calls = parse_llama(text)
    except ToolCallError:
        return text, ()
    start = thoughts_end(text)
    rest = text[start:]
    before = "" if rest.lstrip().startswith("{") else rest.partition(PYTHON_TAG)[0]
    return _message(text, text[:start] + before, calls)


def _render_llama(content: str, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return content
    objects = [
        json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
        for call in calls  # letters are not escaped, as in Llama's template
    ]
    return content + (PYTHON_TAG if content else "") + "; ".join(objects)


def _llama_tags(text: str, size: int) -> tuple[int, ...]:
    return (size,) if text.startswith(PYTHON_TAG, size) else ()


def _shown_llama(text: str) -> int:
    start = thoughts_end(text)
    if text[start:].lstrip()[:1] in ("", "{"):
        return _text_before(text, "{", start)
    return _text_before(text, PYTHON_TAG, start)


def _text_before(text: str, mark: str, start: int) -> int:
    """The end of the text before the mark, or before its possible start, and white space."""
    end = text.find(mark, start)
    if end < 0:
        prefixes = (n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n], start))
        end = len(text) - next(prefixes, 0)
    return len(text[:end].rstrip())


TOOL_FORMATS = {
    "hermes": ToolFormat(_parse_hermes, _render_hermes, _shown_hermes, _hermes_tags),
    "llama": ToolFormat(_parse_llama, _render_llama, _shown_llama, _llama_tags, PYTHON_TAG),
}
# For a call without tools: any text is content.
NO_CALLS = ToolFormat(lambda text: (text, ()), lambda content, calls: content, len)
