"""Messages of templates that write channels, which gpt-oss's harmony format has.

Such a template takes thoughts, content and a call as fields, one call in a message. It refuses the
text of an action, which is what conversations go on with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from seeupo_jax.envs.base import Message
from seeupo_jax.envs.tool_calls import ToolCallError
from seeupo_jax.envs.tool_formats.harmony import (
    CALL,
    CHANNEL,
    START,
    Channels,
    action_end,
    divide_thoughts,
    has_channels,
    read_calls,
    read_channels,
)

_OWN = "@OWN@"  # in the training template: the place of a model's own


def writes_channels(template: str) -> bool:
    """Whether a chat template writes channels."""
    return CHANNEL in template and START in template


def keep_channels(own: str) -> str:
    """The training template of a template that writes channels."""
    file = resources.files("seeupo_jax") / "assets" / "chat_templates" / "harmony.jinja"
    return file.read_text("utf-8").replace(_OWN, own)


def to_channels(messages: Sequence[Message]) -> list[Any]:
    """The messages with the fields that a template of channels reads.

    An assistant's message has `content`, `thinking` and `tool_calls`, and if it is an action's text
    also `raw`, this text with its end. Of several calls each is a message of its own, before its
    result. A tool's message that follows no call is the user's.
    """
    made, waiting = list[Any](), list[Any]()
    for message in messages:
        if message["role"] == "tool":
            if waiting and made[-1]["role"] == "tool":
                made.append(waiting.pop(0))
            answers = made and (made[-1].get("tool_calls") or made[-1]["role"] == "tool")
            made.append(message if answers else {**message, "role": "user"})
            continue
        made += waiting
        first, *waiting = _parts(message) if message["role"] == "assistant" else (message,)
        made.append(first)
    return made + waiting


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An assistant's message, one for each call."""
    content, calls = message["content"], message.get("tool_calls") or ()
    if has_channels(content) and not calls:
        yield from _raw_parts(content)
        return
    thoughts, said = divide_thoughts(content)
    thoughts = message.get("reasoning_content") or message.get("thinking") or thoughts
    for call in calls[:1]:
        # The template takes text before a call for thoughts.
        yield _message("", "\n\n".join(filter(None, (thoughts, said)))) | {"tool_calls": [call]}
    for call in calls[1:]:
        yield _message("", "") | {"tool_calls": [call]}
    if not calls:
        yield _message(said, thoughts)


def _raw_parts(text: str) -> Iterator[dict[str, Any]]:
    channels = read_channels(text)
    try:
        calls = read_calls("" if channels.answered else channels.rest)
    except ToolCallError:
        calls = []
    if not calls:
        said = channels.content + channels.rest
        yield _message(said, channels.thoughts) | {"raw": text + action_end(text)}
        return
    before = text[: len(text) - len(channels.rest)]
    for call, written in calls:
        function = {"name": call.name, "arguments": call.arguments}
        made = _message("", _all_thoughts(channels) if before else "")
        yield made | {"tool_calls": [{"function": function}], "raw": before + written + CALL}
        before = ""


def _all_thoughts(channels: Channels) -> str:
    return "\n\n".join(filter(None, (channels.thoughts, channels.content)))


def _message(content: str, thoughts: str) -> dict[str, Any]:
    thinking = {"thinking": thoughts} if thoughts else {}
    return {"role": "assistant", "content": content, **thinking}
