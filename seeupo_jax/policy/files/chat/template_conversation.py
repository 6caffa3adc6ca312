"""A conversation of a chat template: rendered once, then extended turn by turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.policy.files.chat.renderer import Renderer
from seeupo_jax.policy.files.messages import PROBE, check_written


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

    def say(self, message: Message) -> list[int]:
        """The text of a message is said as it is; its thoughts and calls as the template has them.

        What the template writes before the text of any message, such as an empty thought, is no
        part of one without thoughts.
        """
        renderer = self.renderer
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            return renderer.action(message["content"])
        (marked,) = renderer.read([message])
        said = self._after_header(marked)
        if not message.get("reasoning_content"):
            probe = self._after_header({"role": "assistant", "content": PROBE})
            said = said.removeprefix(probe.partition(PROBE)[0])
        check_written(marked, said)
        return renderer.action_before_end(said)

    def _after_header(self, message: Message) -> str:
        """What the template writes of an assistant's message behind the header that asks for it."""
        text = self.renderer.render((*self.messages, message), self.functions, header=False)
        if not text.startswith(self.text):
            raise ValueError(
                "chat template: it begins an assistant's message otherwise than the model is asked"
                " for it; allowed: reasoning_content only where config.chat.template_kwargs let the"
                " model think."
            )
        return text[len(self.text) :]

    def extend(self, action: Sequence[int], messages: Sequence[Message]) -> TemplateConversation:
        """Renders the whole conversation; the tokens so far stay where its text starts with theirs.

        Else the template has rewritten history (or the model ended in a way that the template does
        not write), and the new text is tokenised as a whole.
        """
        renderer = self.renderer
        said, sampled = renderer.sampled_text(action)
        answer = {"role": "assistant", "content": said}
        messages = (*self.messages, answer, *renderer.read(messages))
        text = renderer.render(messages, self.functions)
        if sampled is None or not text.startswith(self.text + sampled):
            tokens = renderer.encode(text, follows=False)
        else:
            after = renderer.encode(text[len(self.text + sampled) :], follows=True)
            tokens = [*self.tokens, *action, *after]
        return dataclasses.replace(self, messages=messages, text=text, tokens=tokens)
