"""How the text of an answer becomes a message: its thoughts, its content and its calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.envs.base import THOUGHT_TAGS, Tool
from seeupo_jax.envs.thoughts import thoughts_tags
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat, text_before
from seeupo_jax.policy.files.template_knowledge import (
    AUTO,
    knows_thoughts,
    opens_thoughts,
    resolve_format,
)
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.rollout.engine.protocol import Constraint


class Answer(NamedTuple):
    """A message. thoughts: "" where they are part of the content, or there are none."""

    thoughts: str
    content: str
    calls: tuple[ToolCall, ...]


class Shown(NamedTuple):
    """Thoughts and content of a message that is not complete, or the next parts of them."""

    thoughts: str
    content: str


@dataclass(frozen=True)
class AnswerForm:
    """The form of a policy's answers.

    tool_format: how calls are written.
    thoughts_apart: whether clients get thoughts in a field of their own; else they are content.
    """

    tool_format: ToolFormat
    thoughts_apart: bool = False

    def with_tools(self, tools: Sequence[Tool]) -> AnswerForm:
        """The form of the answer to a call: without tools no text is a call."""
        return (
            self if tools else dataclasses.replace(self, tool_format=self.tool_format.without_calls)
        )

    def after_thoughts(
        self, constraint: Constraint | None, tokenizer: Tokenizer, context: Sequence[int]
    ) -> Constraint | None:
        """The constraint of an answer, which does not hold for its thoughts.

        Args:
          context: the tokens before the answer, which may have opened its thoughts.
        """
        if constraint is None:
            return None
        thoughts = "may" if self.thoughts_apart else "none"
        if opens_thoughts(tokenizer, context):
            thoughts = "open"
        return dataclasses.replace(constraint, thoughts=thoughts)

    def parse(self, text: str, tools: Sequence[Tool] = (), *, cut: bool = False) -> Answer:
        """Divides a whole text. With a malformed call all of it is content, or thoughts.

        Args:
          tools: those that may be called; their schemas give untyped values a type.
          cut: as in `ToolFormat.parse`.
        """
        content, calls = self.tool_format.parse(text, tools, cut=cut)
        if not self.thoughts_apart:
            return Answer("", content, calls)
        return Answer(*_divide(content), calls)

    def shown(self, text: str) -> Shown:
        """What an incomplete text certainly contains; both are prefixes of what `parse` returns."""
        certain = self.tool_format.shown(text)
        if not self.thoughts_apart:
            return Shown("", certain)
        lead = certain.lstrip()
        if any(opening.startswith(lead) for opening, _ in THOUGHT_TAGS):
            return Shown("", "")  # it may become a thought
        return _divide(certain, complete=False)


PLAIN_TEXT = AnswerForm(TOOL_FORMATS["hermes"].without_calls)


def resolve_form(agent: Agent, tokenizer: Tokenizer) -> AnswerForm:
    """Returns the form of a policy's answers, as `config.agent` and its tokenizer have it.

    Raises:
      ValueError: as `resolve_format`.
    """
    apart = agent.thoughts == "field" or (agent.thoughts == AUTO and knows_thoughts(tokenizer))
    return AnswerForm(resolve_format(agent.tool_format, tokenizer), apart)


class AnswerSplitter:
    """The message of a text that arrives in pieces; a possible tool call is held back."""

    def __init__(self, form: AnswerForm):
        self._form = form
        self._text = ""
        self._sent = Shown("", "")

    def feed(self, piece: str) -> Shown:
        """Adds the next piece. Returns further thoughts and content."""
        self._text += piece
        return self._send(self._form.shown(self._text))

    def rest(self, answer: Shown) -> Shown:
        """The rest of the parsed thoughts and content, at the end."""
        return self._send(answer)

    def _send(self, shown: Shown) -> Shown:
        before = self._sent
        self._sent = Shown(*(max(pair, key=len) for pair in zip(before, shown, strict=True)))
        return Shown(shown.thoughts[len(before.thoughts) :], shown.content[len(before.content) :])


def _divide(text: str, *, complete: bool = True) -> Shown:
    """Divides a text at the end of the thoughts that a tag begins, without space around it."""
    opening, closing = thoughts_tags(text)
    if not opening:
        return Shown("", text)
    thoughts, end, content = text.lstrip().removeprefix(opening).partition(closing)
    if not end and not complete:
        thoughts = thoughts[: text_before(thoughts, closing, 0)]
    return Shown(thoughts.strip(), content.lstrip())
