"""Conversations as a chat template renders them, and rendered text as tokens.

No text of a message forges a control token or a header: `Renderer` splits their names by marks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import transformers

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.user_code import describe
from seeupo_jax.envs.base import TAGS, TEXT_TAGS, Message, Tool
from seeupo_jax.policy.files.messages import (
    PROBE,
    ROLES,
    TaggedText,
    arguments_as_text,
    keep_messages,
    own_text,
    text_around,
)

# A private-use character that splits a control token's name where a message has it as plain text.
# A message's own such character is doubled while it is rendered.
MARK = "\U0010fffd"
_LONE_MARK = re.compile(f"(?<!{MARK}){MARK}(?!{MARK})")


class Renderer:
    """A chat template with the tokenizer that it is written for.

    Thread-safe: it does not change after construction.

    Args:
      library: `transformers`' tokenizer.
      template: Jinja; None: it renders no conversation.
      eos: ids that end a generation, by the model's files.
      where: the model, in errors.

    Attributes:
      control: the names of control tokens by id. tags: those of `TAGS` among them.
      end_ids: ids that end an action, first the one with which the template ends a message.

    Raises:
      ValueError: the template refuses a plain conversation.
    """

    def __init__(
        self,
        library: transformers.PreTrainedTokenizerBase,
        template: str | None,
        chat: schema.Chat,
        *,
        eos: Sequence[int],
        where: str,
    ):
        self._library, self._template, self._chat = library, template, chat
        self._where = where
        self._backend = library.backend_tokenizer
        added = library.added_tokens_decoder.items()
        self.control = {i: t.content for i, t in added if t.special or i in eos}
        self.tags = {i: name for i, name in self.control.items() if name in TAGS}
        self._hidden = {i for i, t in added if t.special and t.content not in TEXT_TAGS}
        # One character at a time, so that all overlapping names are found.
        names = [*self.control.values(), *self._around_messages()]
        starts = (f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names)
        self._forged = re.compile("|".join(starts))
        self.end_ids = tuple(dict.fromkeys((*self._closing_ids(), *eos)))
        self._anchor = self.control[self.end_ids[0]]

    def action(self, text: str) -> list[int]:
        return [*self.encode(self.protect_own(text), follows=True), self.end_ids[0]]

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text; of control tokens only those of `TEXT_TAGS` have any."""
        shown = [token for token in tokens if token not in self._hidden]
        # The backend's own, since the library's may clean spaces up; unknown ids have no text.
        return self._backend.decode(shown, skip_special_tokens=False)

    def action_before_end(self, text: str) -> list[int]:
        """The tokens of rendered text that an end token follows, with the first that does.

        Args:
          text: rendered, from where an action begins.
        """
        ends = {token: text.find(self.control[token]) for token in self.end_ids}
        present = {token: place for token, place in ends.items() if place >= 0}
        if not present:  # the template writes none
            return [*self.encode(text, follows=True), self.end_ids[0]]
        end = min(present, key=present.__getitem__)
        return [*self.encode(text[: present[end]], follows=True), end]

    def read(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages that the model reads, with marks in their texts.

        Raises:
          ValueError: an unknown role, or a content that is not a text.
        """
        return self.protect_messages(keep_messages(messages, self._chat))

    def render(
        self, messages: Sequence[Message], functions: list[Tool] | None, *, header: bool = True
    ) -> str:
        """The text of a conversation with marks, and the next assistant header.

        Arguments of calls are objects, as most templates read them; where one raises, texts of
        JSON, as OpenAI's are.

        Raises:
          ValueError: a conversation that the template refuses, or no template.
        """
        if self._template is None:
            raise ValueError(
                f"tokenizer: {self._where} has no chat template; allowed: one, or a Jinja file in"
                " config.chat.template."
            )
        refusals: list[Exception] = []
        for form in (list[Message], arguments_as_text):
            try:
                return self._library.apply_chat_template(
                    form(messages),
                    tools=functions,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=header,
                    **self._chat.template_kwargs,
                )
            except Exception as error:  # a template may raise anything
                refusals.append(error)
        roles, error = ", ".join(message["role"] for message in messages), refusals[0]
        reason = error if isinstance(error, jinja2.TemplateError) else describe(error)
        raise ValueError(f"chat template: refused the roles {roles or 'none'}: {reason}")

    def encode(self, text: str, *, follows: bool) -> list[int]:
        """Tokens of rendered text; text between two marks is tokenised by itself.

        Args:
          follows: whether the text follows other text. It is then tokenised behind an end token,
            since some tokenizers treat the beginning of a text specially.
        """
        tokens: list[int] = []
        for index, part in enumerate(_LONE_MARK.split(text)):
            anchor = self._anchor if follows or index > 0 else ""
            ids = self.tokens(anchor + part.replace(MARK * 2, MARK))
            tokens += ids[1:] if anchor else ids
        return tokens

    def tokens(self, text: str) -> list[int]:
        """Of text in which names of control tokens are these."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def sampled_text(self, action: Sequence[int]) -> tuple[str, str | None]:
        """An action as rendered text: without control tokens other than those of `TAGS`; and all of
        it, its end too, which is None where it has others inside."""
        ended = bool(action) and action[-1] in self.end_ids
        body, text = action[:-1] if ended else action, ""
        for name, run in itertools.groupby(body, self.tags.get):
            tokens = list(run)
            text += self.protect(self.text(tokens)) if name is None else name * len(tokens)
        if not (self.control.keys() - self.tags.keys()).isdisjoint(body):
            return text, None
        return text, text + (self.control[action[-1]] if ended else "")

    def protect(self, value: Any) -> Any:
        """A value with marks in all its texts, so that none forges a control token or a header."""
        if isinstance(value, str):
            return self._forged.sub(rf"\g<0>{MARK}", value.replace(MARK, MARK * 2))
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def protect_messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        for message in messages:
            role, content = message["role"], message["content"]
            if role not in ROLES:
                raise ValueError(f"message: role is {role!r}; allowed: {', '.join(ROLES)}.")
            if not isinstance(content, str):
                raise ValueError(f"message: content of {role} is {content!r}; allowed: a text.")
        return tuple(map(self._protect_message, messages))

    def _protect_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with marks, but for the tags of an assistant's text."""
        protected, text = self.protect(message), message["content"]
        if isinstance(text, TaggedText):
            protected["content"] = self._protect_tagged(text)
        return protected

    def protect_own(self, text: str) -> str:
        """The text of an action with marks; its tags are control tokens where there are such."""
        return self._protect_tagged(own_text(text))

    def _protect_tagged(self, text: TaggedText) -> str:
        protected, end = "", 0
        for place in text.tags:
            for name in self.tags.values():
                if text.startswith(name, place):
                    protected += self.protect(text[end:place]) + name
                    end = place + len(name)
        return protected + self.protect(text[end:])

    def _around_messages(self) -> list[str]:
        """Names of added tokens that the template writes around messages, such as role headers."""
        around, header = ([], "") if self._template is None else text_around(self.render)
        ids = {token for text in around for token in self.tokens(text)}
        added = ((i, token.content) for i, token in self._library.added_tokens_decoder.items())
        return [n for i, n in added if n.strip() and (i in ids or header.startswith(n))]

    def _closing_ids(self) -> list[int]:
        """The control token with which the template ends an assistant's message, if any."""
        if self._template is None:
            return []
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        _, _, tail = self.render(messages, None, header=False).rpartition(PROBE)
        closing = [token for token, name in self.control.items() if tail.startswith(name)]
        return sorted(closing, key=lambda token: -len(self.control[token]))[:1]
