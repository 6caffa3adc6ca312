"""Conversations as a chat template renders them, and rendered text as tokens.

No text of a message forges a control token or a header: `Renderer` splits their names by marks.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jinja2
import transformers

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.user_code import describe, in_one_line
from seeupo_jax.envs.base import HARMONY_TAGS, TAGS, TEXT_TAGS, Message, Tool
from seeupo_jax.envs.tool_formats.harmony import CALL, action_end, has_channels
from seeupo_jax.policy.files.chat.call_ids import call_fields
from seeupo_jax.policy.files.chat.channels import writes_channels
from seeupo_jax.policy.files.chat.template_probe import (
    FUNCTION,
    USUAL,
    Shape,
    conversation_of_roles,
    conversation_shape,
    lists_functions,
    make_conversation,
    omitted_role,
)
from seeupo_jax.policy.files.chat.time_limit import time_limit
from seeupo_jax.policy.files.library_tokenizer import render_template
from seeupo_jax.policy.files.messages import (
    PROBE,
    TaggedText,
    add_tool_listing,
    arguments_as_text,
    check_messages,
    drop_unread_messages,
    map_roles,
    model_text,
    template_boundaries,
)

# A private-use character that splits a control token's name where a message has it as plain text.
# A message's own such character is doubled while it is rendered.
MARK = "\U0010fffd"
_LONE_MARK = re.compile(f"(?<!{MARK}){MARK}(?!{MARK})")
# Of the first conversations, all together; real templates take milliseconds.
PROBE_SECONDS = 5.0
_ANOTHER = "another template in config.chat.template"
_OFFERED = {
    "tool": f"config.chat.roles={{'tool': 'user'}}, which sends them as the user's, or {_ANOTHER}",
    "system": "config.chat.roles={'system': 'user'}, which puts them before the user's,"
    f" config.chat.system=False, which leaves them out, or {_ANOTHER}",
    "listing": "config.chat.roles={'system': 'user'}, which puts a list of tools before the"
    f" user's, config.chat.tools=none, which leaves it out, or {_ANOTHER}",
    "user": f"config.chat.roles={{'user': 'user'}}, which joins those in a row, or {_ANOTHER}",
}


def probe_limit(seconds: float) -> AbstractContextManager[None]:
    """A limit on the time of a template's first conversations."""
    sentence = (
        f"chat template: it computes for more than {seconds:g} s on a conversation of few words;"
        " allowed: one that ends, which config.chat.template may name."
    )
    return time_limit(seconds, sentence)


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
      written: control tokens that have a text, unlike others.
      channels: whether the template writes harmony's channels.
      end_ids: ids that end an action, first the one with which the template ends a message.
      unwritten: roles whose messages the template leaves out or refuses, with a sentence of each.
      lists_tools: whether it names the tools that it is given.
      writes_calls: whether it writes the calls of an assistant's message.

    Raises:
      ValueError: the template refuses a plain conversation, leaves out a message of one, or does
        not end.
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
        self._render = functools.partial(render_template, library, chat.template_kwargs)
        self._where = where
        self._backend = library.backend_tokenizer
        added = library.added_tokens_decoder.items()
        self.control = {i: t.content for i, t in added if t.special or i in eos}
        names = {token.content for _, token in added}
        others = frozenset() if names.issuperset(HARMONY_TAGS) else frozenset(HARMONY_TAGS)
        self.channels = not others and writes_channels(template or "")
        self.tags = {i: n for i, n in self.control.items() if n in TAGS and n not in others}
        self._left_out = functools.lru_cache(maxsize=1024)(self._find_left_out)
        with probe_limit(PROBE_SECONDS):
            around, closing = self._around_messages(), self._closing_ids()
            system = self._writes((("system", 0), ("user", 0)))
            self.lists_tools = lists_functions(self._apply, system=system)
            self.writes_calls = self._writes((("user", 0), ("assistant", 1)))
            self.unwritten = {} if template is None else self._probe_roles()
        # One character at a time, so that all overlapping names are found.
        starts = (
            f"{re.escape(name[0])}(?={re.escape(name[1:])})"
            for name in (*self.control.values(), *around)
        )
        self._forged = re.compile("|".join(starts))
        calls = [i for i, name in self.tags.items() if name == CALL]  # harmony's end of a call
        self.end_ids = tuple(dict.fromkeys((*closing, *eos, *calls)))
        self.written = {i for i, n in self.tags.items() if n in TEXT_TAGS} - set(self.end_ids)
        self._hidden = {i for i, t in added if t.special and i not in self.written}
        self._anchor = self.control[self.end_ids[0]]

    def action(self, text: str) -> list[int]:
        tokens, end = self.encode(self.protect_own(text), follows=True), self.end_ids[0]
        if self.channels and has_channels(text):
            name = action_end(text)
            end = next((token for token in self.end_ids if self.control[token] == name), end)
        return [*tokens, end]

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

    def read(self, messages: Sequence[Message], listing: str = "") -> tuple[Message, ...]:
        """The messages that the model reads, under the roles that it knows, with marks in them.

        Args:
          listing: of tools, for the system message.

        Raises:
          ValueError: an unknown role, or a content that is not a text.
        """
        retained = add_tool_listing(drop_unread_messages(messages, self._chat), listing)
        check_messages(retained)
        return tuple(map(self._protect_message, map_roles(retained, self._chat.roles)))

    def render(
        self, messages: Sequence[Message], functions: list[Tool] | None, *, header: bool = True
    ) -> str:
        """The text of a conversation with marks, and the next assistant header.

        Raises:
          ValueError: a conversation that the template refuses or leaves a message out of; no
            template.
        """
        text = self._apply(messages, functions, header=header)
        role = self._left_out(conversation_shape(messages), functions is not None)
        if role is not None:
            raise ValueError(self._unwritten_sentence(role))
        return text

    def _apply(
        self, messages: Sequence[Message], functions: list[Tool] | None, *, header: bool = False
    ) -> str:
        """As `render`, whatever the template leaves out.

        Arguments of calls are objects, as most templates read them; where one raises, texts of
        JSON, as OpenAI's are.
        """
        if self._template is None:
            raise ValueError(
                f"tokenizer: {self._where} has no chat template; allowed: one, or a Jinja file in"
                " config.chat.template."
            )
        refusals: list[Exception] = []
        for form in (list[Message], arguments_as_text):
            try:
                return self._render(self._template, form(messages), functions, header=header)
            except Exception as error:  # a template may raise anything
                refusals.append(error)
        error = refusals[0]
        reason = str(error) if isinstance(error, jinja2.TemplateError) else describe(error)
        roles = [message["role"] for message in messages]
        listed = ", ".join(roles) if roles else "none"
        raise ValueError(
            f"chat template: refused the roles {listed}: {in_one_line(reason, 300).rstrip('.')};"
            f" allowed: {self._offered(roles)}."
        )

    def _lost(self, messages: Sequence[Message], has_functions: bool = False) -> str | None:
        """As `omitted_role`, of messages of `make_conversation`; ValueError: refused."""
        text = self._apply(messages, [FUNCTION] if has_functions else None)
        return omitted_role(messages, text)

    def _find_left_out(self, shape: Shape, has_functions: bool) -> str | None:
        """The role of a message that the template leaves out of conversations of a shape."""
        try:
            return self._lost(make_conversation(shape), has_functions)
        except ValueError:  # texts that are not those of the conversation, which it has rendered
            return None

    def _writes(self, shape: Shape) -> bool:
        """Whether the template takes conversations of a shape, and leaves nothing out."""
        try:
            return self._lost(make_conversation(shape)) is None
        except ValueError:
            return False

    def _probe_roles(self) -> dict[str, str]:
        """See `unwritten`; ValueError: a plain conversation is not written."""
        has_system = self._chat.system or (self._chat.tools != "none" and not self.lists_tools)
        sent = [role for role in USUAL if role != "system" or has_system]
        sentences = {role: self._refusal(USUAL[role]) for role in sent}
        if sentences["user"] is not None:
            raise ValueError(sentences["user"])
        return {role: sentence for role, sentence in sentences.items() if sentence is not None}

    def _refusal(self, conversations: Sequence[Sequence[str]]) -> str | None:
        """Why the template does not write one of these conversations, of messages of these roles,
        in a sentence; None: it writes them all."""
        for roles in conversations:
            try:
                lost = self._lost(map_roles(conversation_of_roles(roles), self._chat.roles))
            except ValueError as error:
                return str(error)
            if lost is not None:
                return self._unwritten_sentence(lost)
        return None

    def _unwritten_sentence(self, role: str) -> str:
        sent = [name for name, other in self._chat.roles.items() if other == role != name]
        by = f", as which config.chat.roles sends those of {', '.join(sent)}" if sent else ""
        return (
            f"chat template: it does not write messages of the role {role}{by}; allowed:"
            f" {self._offered([role])}."
        )

    def _offered(self, roles: Sequence[str]) -> str:
        """A suggestion for an error if a template does not write messages of these roles."""
        if "tool" in roles:
            return _OFFERED["tool"]
        if "system" in roles:
            return _OFFERED["system" if self._chat.system else "listing"]
        return _OFFERED["user"] if ("user", "user") in itertools.pairwise(roles) else _ANOTHER

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

    def call_fields(self, text: str) -> dict[str, Any] | None:
        """An action as a message with calls in fields, where the template writes ids of calls."""
        return call_fields(text, self._template or "")

    def protect(self, value: Any) -> Any:
        """A value with marks in all its texts, so that none forges a control token or a header."""
        if isinstance(value, str):
            return self._forged.sub(rf"\g<0>{MARK}", value.replace(MARK, MARK * 2))
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def _protect_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with marks, but for the tags of an assistant's text."""
        protected, text = self.protect(message), message["content"]
        if isinstance(text, TaggedText):
            protected["content"] = self._protect_tagged(text)
        return protected

    def protect_own(self, text: str) -> str:
        """The text of an action with marks; its tags are control tokens where there are such."""
        return self._protect_tagged(model_text(text))

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
        around, header = ([], "") if self._template is None else template_boundaries(self._apply)
        ids = {token for text in around for token in self.tokens(text)}
        added = ((i, token.content) for i, token in self._library.added_tokens_decoder.items())
        return [n for i, n in added if n.strip() and (i in ids or header.startswith(n))]

    def _closing_ids(self) -> list[int]:
        """The control token with which the template ends an assistant's message, if any."""
        if self._template is None:
            return []
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        _, _, tail = self._apply(messages, None).rpartition(PROBE)
        closing = [token for token, name in self.control.items() if tail.startswith(name)]
        return sorted(closing, key=lambda token: -len(self.control[token]))[:1]
