"""The tool format in which a chat template writes calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.envs.thoughts import thoughts_end
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.policy.files.chat.call_ids import as_function
from seeupo_jax.policy.files.messages import PROBE

_CALL = ToolCall("name", {"argument": 1})
_TOOL: Tool = {
    "name": "name",
    "description": "",
    "parameters": {"type": "object", "properties": {"argument": {"type": "integer"}}},
}
_ASKED = {"role": "user", "content": "?"}


class _Conversation(Protocol):
    @property
    def tokens(self) -> Sequence[int]: ...

    def say(self, message: Message) -> list[int]: ...


class TemplateTokenizer(Protocol):
    """The part of `Tokenizer` that shows what its chat template writes."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> _Conversation: ...

    def text(self, tokens: Sequence[int]) -> str: ...


def find_format(tokenizer: TemplateTokenizer) -> ToolFormat | None:
    """Returns the format in which a template writes one call; None: in none of `TOOL_FORMATS`."""
    for write in (sampled_text, past_text):
        answer = _written(tokenizer, write, "", [as_function(_CALL)])
        for tool_format in () if answer is None else TOOL_FORMATS.values():
            if tool_format.parse(answer, (_TOOL,)) == ("", (_CALL,)):
                return tool_format
    return None


def writes_format(tokenizer: TemplateTokenizer, tool_format: ToolFormat, content: str) -> bool:
    """Whether a template writes calls in a tool format, also several, after a content or none."""
    calls = (_CALL, _CALL)
    answer = _written(tokenizer, sampled_text, content, list(map(as_function, calls)))
    return answer is not None and tool_format.parse(answer, (_TOOL,)) == (content, calls)


def sampled_text(tokenizer: TemplateTokenizer, message: dict[str, Any]) -> str:
    """The text of an assistant's message as the model would sample it after a user's.

    Raises:
      Exception: of any class, by the chat template.
    """
    return tokenizer.text(tokenizer.begin([_ASKED], ()).say(message))


def past_text(tokenizer: TemplateTokenizer, message: dict[str, Any]) -> str:
    """The text of an assistant's message in a history, which some headers do not begin.

    Raises:
      Exception: of any class, by the chat template.
    """

    def written(answer: dict[str, Any]) -> str:
        return tokenizer.text(tokenizer.begin([_ASKED, answer], ()).tokens)

    before, _, after = written({"role": "assistant", "content": PROBE}).rpartition(PROBE)
    return written(message).removesuffix(after).removeprefix(before)


def _written(
    tokenizer: TemplateTokenizer,
    write: Callable[[TemplateTokenizer, dict[str, Any]], str],
    content: str,
    calls: list[dict[str, Any]],
) -> str | None:
    """A message with calls, without thoughts; None: the template refuses it."""
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    try:
        text = write(tokenizer, message)
    except Exception:  # a template may raise anything
        return None
    return text[thoughts_end(text) :].lstrip()  # some headers open thoughts, here empty
