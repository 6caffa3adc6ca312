"""A conversation of a chat template: rendered once, then extended turn by turn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from seeupo_jax.envs.base import THOUGHT, THOUGHT_END, Message, Tool
from seeupo_jax.envs.tool_formats.harmony import CALL, has_channels
from seeupo_jax.policy.files.chat.renderer import MARK, Renderer
from seeupo_jax.policy.files.messages import PROBE, check_rendered, model_text


@dataclass(frozen=True)
class TemplateConversation:
    """Messages, their rendered text and its tokens.

    messages, functions, text: with marks. text: as the template renders it, with the next header.
    tokens: the tokens of that text; those of actions as sampled.
    """

    renderer: Renderer
    messages: tuple[Message, ...]
    functions: list[Tool] | None
    text: str
    tokens: list[int]

    @functools.cached_property
    def _opening(self) -> str:
        """The thought that the header leaves open: `<think>` and the text after it; "": none."""
        place = self.text.rfind(THOUGHT)
        if place < 0 or THOUGHT_END in self.text[place:]:
            return ""
        before = self.renderer.render(self.messages, self.functions, header=False)
        return self.text[place:] if place >= len(before) else ""

    def say(self, message: Message) -> list[int]:
        """Returns the tokens of an assistant's message as an action, without its header.

        A message's text is unchanged; its thoughts and calls are as the template writes them. Text
        that the template adds before every message, such as an empty thought, is left out of
        messages without thoughts, unless the header leaves a thought open: the action then begins
        inside the thought and contains its end.
        """
        renderer, opening = self.renderer, self._opening
        thinks = bool(message.get("reasoning_content"))
        calls = message.get("tool_calls", ())
        if renderer.channels and (len(calls) > 1 or CALL in message["content"]):
            raise ValueError(
                "chat template: got several tool calls in one message; allowed: one, since a call"
                " ends an action of this model."
            )
        if renderer.channels and not has_channels(message["content"]):
            thinks = True  # the header does not end with the channel
        elif not calls and not thinks:
            text = message["content"].removeprefix(opening)
            if not opening or _ends_thought(renderer.protect_own(text)):
                return renderer.action(text)
        (marked,) = renderer.read([{**message, "content": model_text(message["content"])}])
        text = self._after_header(marked)
        if not opening and not thinks:
            probe = self._after_header({"role": "assistant", "content": PROBE})
            text = text.removeprefix(probe.partition(PROBE)[0])
        check_rendered(marked, opening + text)
        return renderer.action_before_end(text)

    def _after_header(self, message: Message) -> str:
        """The text of an assistant's message that the template writes after the header."""
        text = self.renderer.render((*self.messages, message), self.functions, header=False)
        written, opening = text[len(self.text) :], self._opening
        if text.startswith(self.text) and (not opening or _ends_thought(written)):
            return written
        allowed = (
            f"content that begins with {opening!r} and has {THOUGHT_END}"
            if opening
            else "reasoning_content only where config.chat.template_kwargs let the model think"
        )
        raise ValueError(
            "chat template: it begins an assistant's message otherwise than the model is asked"
            f" for it; allowed: {allowed}."
        )

    def extend(self, action: Sequence[int], messages: Sequence[Message]) -> TemplateConversation:
        """Renders the whole conversation; the tokens so far stay where its text starts with theirs.

        Else the template has rewritten history (or the model ended in a way that the template does
        not write), and the new text is tokenised as a whole.
        """
        renderer = self.renderer
        answer_text, sampled = renderer.sampled_text(action)
        answer = {"role": "assistant", "content": self._opening + answer_text}
        new = renderer.read(messages)
        messages = (*self.messages, answer, *new)
        fields = renderer.call_fields(answer_text)
        if fields is not None and not self._continues(messages, sampled):
            messages = (*self.messages, fields, *new)
        text = renderer.render(messages, self.functions)
        if sampled is None or not text.startswith(self.text + sampled):
            tokens = renderer.encode(text, follows=False)
        else:
            after = renderer.encode(text[len(self.text + sampled) :], follows=True)
            tokens = [*self.tokens, *action, *after]
        return dataclasses.replace(self, messages=messages, text=text, tokens=tokens)

    def _continues(self, messages: Sequence[Message], sampled: str | None) -> bool:
        """Whether the template writes these messages, and among them an action as sampled."""
        try:
            text = self.renderer.render(messages, self.functions)
        except ValueError:
            return False
        return sampled is not None and text.startswith(self.text + sampled)


def _ends_thought(text: str) -> bool:
    """Whether a text that begins inside a thought ends it and does not begin another there."""
    thought, end, answer = text.partition(THOUGHT_END)
    opened = THOUGHT in thought or answer.replace(MARK, "").lstrip().startswith(THOUGHT)
    return bool(end) and not opened
