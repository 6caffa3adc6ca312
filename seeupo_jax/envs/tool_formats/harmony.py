"""Harmony, gpt-oss's format: an action is one message or several, each with a channel.

<|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>commentary
to=functions.NAME <|constrain|>json<|message|>{...}<|call|>, or at the end
<|channel|>final<|message|>ANSWER<|return|>, all without line breaks

The chat template writes the first `<|start|>assistant`. `<|call|>` and `<|return|>` end an action,
whose text is without them. The recipient may also stand before the channel, as in the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from seeupo_jax.envs.base import HARMONY_TAGS, THOUGHT, THOUGHT_END, Tool
from seeupo_jax.envs.thoughts import thoughts_tags
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError
from seeupo_jax.envs.tool_formats.tool_format import (
    CallGrammar,
    Reading,
    Tag,
    ToolFormat,
    json_arguments,
    json_text,
    literal,
    read_arguments,
    text_before,
)

START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL = HARMONY_TAGS
RETURN = "<|return|>"
_ANALYSIS, _COMMENTARY, _FINAL = "analysis", "commentary", "final"
_ROLE, _TO, _TOOLS = "assistant", "to=", "functions."


class Channels(NamedTuple):
    """An action's messages up to a final one or a call.

    thoughts: of the analysis messages. ended: whether the last of them has its end.
    content: what is said to the user. answered: it includes a final message.
    rest: the text from the first call on, or after the final message.
    """

    thoughts: str
    ended: bool
    content: str
    answered: bool
    rest: str

    @property
    def text(self) -> str:
        """Thoughts and content as other models write them."""
        end = THOUGHT_END if self.ended else ""
        return (f"{THOUGHT}{self.thoughts}{end}" if self.thoughts else "") + self.content


def has_channels(text: str) -> bool:
    """Whether a text is an action in this format."""
    return text.lstrip().startswith((CHANNEL, _TO + _TOOLS))


def read_channels(text: str) -> Channels:
    """Divides an action; its calls are unread."""
    thoughts, said, start = list[str](), list[str](), 0
    while (place := text.find(MESSAGE, start)) >= 0:
        channel, recipient = _read_header(text[start:place])
        if recipient or channel not in (_ANALYSIS, _COMMENTARY, _FINAL):
            break
        body, end = _read_body(text, place + len(MESSAGE))
        (thoughts if channel == _ANALYSIS else said).append(body)
        if channel == _FINAL:
            rest = text[end:]
            rest = "" if rest.strip() in ("", END) else rest
            return Channels(_joined(thoughts), True, "".join(said), True, rest)
        start = _next_header(text, end)
    rest = text[start:] if text[start:].strip() else ""
    ended = bool(rest or said or text.endswith(END))
    return Channels(_joined(thoughts), ended, "".join(said), False, rest)


def _joined(thoughts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, thoughts))


def _read_header(header: str) -> tuple[str, str]:
    """The channel and the recipient of a message, "" if missing."""
    before, _, after = header.partition(CHANNEL)
    channel, _, more = after.partition(CONSTRAIN)[0].strip().partition(" ")
    for part in (before, more):
        _, to, recipient = part.partition(_TO)
        if to:
            return channel, recipient.strip().removesuffix(" json").strip()
    return channel, ""


def _read_body(text: str, start: int) -> tuple[str, int]:
    """A body and its end."""
    end = text.find(END, start)
    end = len(text) if end < 0 else end
    return text[start:end], end


def _next_header(text: str, end: int) -> int:
    """The start of the next message's header after the role, from the end of a body."""
    for tag in (END, START + _ROLE):
        end += len(tag) * text.startswith(tag, end)
    return end


def read_calls(text: str) -> list[tuple[ToolCall, str]]:
    """The calls with which an action ends, each with its text.

    Raises:
      ToolCallError: a message that is no call, or a malformed one.
    """
    calls, start = list[tuple[ToolCall, str]](), 0
    while start < len(text):
        place = text.find(MESSAGE, start)
        channel, recipient = _read_header(text[start : max(place, start)])
        name = recipient.removeprefix(_TOOLS)
        if channel != _COMMENTARY or name == recipient or not name:
            raise ToolCallError(
                f"a tool call must begin with {CHANNEL}{_COMMENTARY} {_TO}{_TOOLS}NAME, and"
                " nothing but another may follow it"
            )
        call, end = read_arguments(text, place + len(MESSAGE), name)
        calls.append((call, text[start:end]))
        tail = text[end:].lstrip()
        if tail.strip() not in ("", CALL) and not tail.startswith(CALL + START + _ROLE):
            raise ToolCallError("nothing may follow the last tool call")
        more = tail.removeprefix(CALL).removeprefix(START + _ROLE)
        start = len(text) - len(more) if more.strip() else len(text)
    return calls


def action_end(text: str) -> str:
    """The token that ends an action, as gpt-oss writes it."""
    head = text.rpartition(MESSAGE)[0].rpartition(START)[2]
    return CALL if _read_header(head)[1] else RETURN


def _read(text: str, tools: Sequence[Tool], cut: bool = False) -> Reading:
    if not has_channels(text):
        return Reading(text, ())
    channels = read_channels(text)
    if channels.answered and channels.rest:
        raise ToolCallError("nothing may follow the final message")
    calls = read_calls(channels.rest)
    return Reading(channels.text, tuple(call for call, _ in calls))


def _plain(text: str) -> str:
    if not has_channels(text):
        return text
    channels = read_channels(text)
    return channels.text + channels.rest


def _shown(text: str) -> str:
    lead = text.lstrip()
    if not has_channels(text):
        return "" if any(each.startswith(lead) for each in (CHANNEL, _TO + _TOOLS)) else text
    channels = read_channels(text)
    if not channels.answered:
        # Text before a call may be followed by more thoughts.
        channels = channels._replace(content="", ended=False)
    return channels.text[: text_before(channels.text, END, 0)]


def divide_thoughts(content: str) -> tuple[str, str]:
    """Thoughts in tags at a content's start, and the rest of it."""
    opening, closing = thoughts_tags(content)
    if not opening or closing not in content:
        return "", content
    thoughts, _, rest = content.lstrip().removeprefix(opening).partition(closing)
    return thoughts.strip(), rest.lstrip()


def _write(content: str, calls: Sequence[ToolCall]) -> Iterable[str]:
    thoughts, content = divide_thoughts(content)
    if thoughts:
        yield from _message(_ANALYSIS, thoughts, END)
    if not calls:
        yield from _message(_FINAL, content)
    elif content:
        yield from _message(_COMMENTARY, content, END)
    for index, call in enumerate(calls):
        header = f"{_COMMENTARY} {_TO}{_TOOLS}{call.name} "
        last = index == len(calls) - 1
        yield from _message(header, json_text(call.arguments), "" if last else CALL, "json")


def _message(header: str, body: str, end: str = "", content_type: str = "") -> Iterable[str]:
    """A message, and with its end the header of the next."""
    yield Tag(CHANNEL)
    yield header
    if content_type:
        yield Tag(CONSTRAIN)
        yield content_type
    yield Tag(MESSAGE)
    yield body
    if end:
        yield Tag(end)
        yield Tag(START)
        yield _ROLE


def _call(name: str, schema: Mapping[str, Any]) -> str:
    to = f"{_TO}{_TOOLS}{name}"
    # A literal may not begin with another that is allowed in its place.
    channel, types = f'"{CHANNEL}" "{_COMMENTARY}"', f'(" json" | " {CONSTRAIN}json")'
    after = f"{channel} {literal(f' {to} {CONSTRAIN}json')}"
    before = f"{literal(f' {to}')} {channel} {types}"
    return f'({after} | {before}) "{MESSAGE}" {json_arguments(schema)}'


_TAGS = "|".join(map(re.escape, HARMONY_TAGS))
_FRAME = f"""start: before* (final{{calls}})
before: "{CHANNEL}" ("{_ANALYSIS}" | "{_COMMENTARY}") "{MESSAGE}" body "{START}{_ROLE}"
body[lazy]: /(?s:.*)/ "{END}"
final: "{CHANNEL}" "{_FINAL}" "{MESSAGE}" ANSWER
ANSWER: /(?s:.*)/ & ~/(?s:.*)({_TAGS})(?s:.*)/
"""

HARMONY = ToolFormat(
    "harmony",
    _read,
    _write,
    _shown,
    plain=_plain,
    grammar=CallGrammar(f"{CHANNEL}{_COMMENTARY} {_TO}{_TOOLS}", _call, '""', frame=_FRAME),
)
