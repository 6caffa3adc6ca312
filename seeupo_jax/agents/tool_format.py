"""How a model writes its tool calls: from sampled text to content and calls, and back.

A call that breaks its form is no call: the whole text stays content, for the agent to answer.
Thoughts at the start are content too: `<think>...</think>`, or what the chat template has opened.
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
    """A form of tool calls.

    parse: a message's content and calls.
    render: the text that `parse` reads as these.
    shown: of a text's beginning, how many characters are content whatever follows.
    tags: of a rendered text whose content has so many characters, where the tags of calls stand.
    mark: what stands before calls, if texts of other forms have no such tag.
    """

    parse: Callable[[str], Message]
    render: Callable[[str, Sequence[ToolCall]], str]
    shown: Callable[[str], int]
    tags: Callable[[str, int], Sequence[int]] = lambda text, size: ()
    mark: str = ""


class ContentSplitter:
    """Content of a text that arrives in pieces; what may become a tool call is held back."""

    def __init__(self, tool_format: ToolFormat):
        self._shown_of = tool_format.shown
        self._text, self._shown = "", 0

    def feed(self, piece: str) -> str:
        """Takes the next piece. Returns: further content; all of it begins the parsed content."""
        self._text += piece
        begin, self._shown = self._shown, max(self._shown, self._shown_of(self._text))
        return self._text[begin : self._shown]

    def rest(self, content: str) -> str:
        """What is left to show of the parsed content, at the end."""
        return content[self._shown :]


def choose_format(name: str) -> ToolFormat:
    """A tool format by its name."""
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool_format: got {name!r}; allowed: {', '.join(TOOL_FORMATS)}.")
    return TOOL_FORMATS[name]


@lru_cache(maxsize=1)  # a process samples with one tokenizer, and reads it in one format
def template_writes(tokenizer: Tokenizer, tool_format: ToolFormat) -> bool:
    """Whether a tokenizer's chat template writes calls in a tool format, several and after text."""
    if not tokenizer.writes_calls:
        return False
    content, call = "content", ToolCall("name", {"argument": 1})
    functions = [as_function(call)] * 2
    message = {"role": "assistant", "content": content, "tool_calls": functions}
    try:
        said = tokenizer.begin([{"role": "user", "content": "?"}], ()).say(message)
    except Exception:  # a template may raise anything
        return False
    text = tokenizer.text(said)
    answer = text[thoughts_end(text) :].lstrip()  # some headers open a thought, empty here
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
    """A call as chat templates read it."""
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message(text: str, outside: str, calls: tuple[ToolCall, ...]) -> Message:
    """A text's content and calls; outside: the text without its calls."""
    named = [(call.name, call.arguments) for call in calls]
    # Half a character is JSON but no UTF-8, and could not be sent.
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


# A rendered call is a line, whose JSON holds no closing tag.
_RENDERED_TAG = re.compile(f"^{CALL}|{CALL_END}", re.MULTILINE)


def _parse_llama(text: str) -> Message:
    try:
        calls = parse_llama(text)
    except ToolCallError:
        return text, ()
    start = thoughts_end(text)
    said = text[start:]
    before = "" if said.lstrip().startswith("{") else said.partition(PYTHON_TAG)[0]
    return _message(text, text[:start] + before, calls)


def _render_llama(content: str, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return content
    objects = [
        json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
        for call in calls  # letters as they are, as Llama's template has them
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
    """Where the text ends before the mark, its possible beginning, and white space before these."""
    end = text.find(mark, start)
    if end < 0:
        prefixes = (n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n], start))
        end = len(text) - next(prefixes, 0)
    return len(text[:end].rstrip())


TOOL_FORMATS = {
    "hermes": ToolFormat(_parse_hermes, _render_hermes, _shown_hermes, _hermes_tags),
    "llama": ToolFormat(_parse_llama, _render_llama, _shown_llama, _llama_tags, PYTHON_TAG),
}
# Of a call without tools, where a text is a text, whatever it looks like.
NO_CALLS = ToolFormat(lambda text: (text, ()), lambda content, calls: content, len)
