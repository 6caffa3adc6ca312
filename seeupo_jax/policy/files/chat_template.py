"""Hugging Face tokenizers: conversations by a Jinja chat template, rendered once, then extended."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.policy.files import gguf_vocabulary, same_ids, vocabulary
from seeupo_jax.policy.files.json_file import read_object
from seeupo_jax.policy.files.messages import (
    CALL_MARKS,
    PROBE,
    ROLES,
    STOPPED_CLOCK,
    TextWithCalls,
    check_kwargs,
    check_written,
    choose_chat,
    choose_template,
    keep_messages,
    list_tools,
    save_chat,
    template_variables,
    text_around,
    with_kwargs,
    with_listing,
)
from seeupo_jax.policy.files.same_ids import CONFIG_FILE, TOKENIZER_FILE

_LOGGER = logging.getLogger(__name__)

TEMPLATE_FILE, GENERATION_FILE = "chat_template.jinja", "generation_config.json"

# A private-use character that splits a control token's name where a message has it as plain text.
# A message's own such character is doubled while it is rendered.
MARK = "\U0010fffd"
_LONE_MARK = re.compile(f"(?<!{MARK}){MARK}(?!{MARK})")
# Variables that every template gets; `config.chat.template_kwargs` may not set them.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception"}


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library with a chat template.

    Without a template (a base model's) it tokenises, but begins no conversation. Thread-safe: it
    does not change after construction.

    Args:
      library: `transformers`' tokenizer.
      chat: the options; `chat.template` replaces the library's template.
      generation: the content of generation_config.json.
      where: the model, in errors.

    Raises:
      ValueError: several chat templates, a template that is not Jinja or refuses a plain
        conversation, options that it does not read, no end token.
    """

    def __init__(
        self,
        library: PreTrainedTokenizerBase,
        chat: schema.Chat,
        *,
        generation: Mapping[str, Any],
        where: str,
    ):
        if not library.is_fast:
            raise ValueError(f"tokenizer: {where} has no {TOKENIZER_FILE}; allowed: one that has.")
        self._library, self._chat, self._generation = library, chat, dict(generation)
        self._where = where
        self._backend = library.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = 1 + max(library.get_vocab().values())
        eos = _eos_ids(library, generation, where)
        added = library.added_tokens_decoder.items()
        self._control = {i: t.content for i, t in added if t.special or i in eos}
        self._template = choose_template(library.chat_template, chat, where)
        reads = template_variables(self._template or "")
        check_kwargs(chat, reads - _GIVEN - library.special_tokens_map.keys())
        self._call_marks = {i: name for i, name in self._control.items() if name in CALL_MARKS}
        self._lists_tools = "tools" in reads
        self.writes_calls = chat.tools == "auto" and "tool_calls" in (self._template or "")
        if "strftime_now" in reads:
            self._template = STOPPED_CLOCK + self._template
        library.chat_template = with_kwargs(self._template, chat)
        # One character at a time, so that all overlapping names are found.
        names = [*self._control.values(), *self._around_messages()]
        starts = (f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names)
        self._forged = re.compile("|".join(starts))
        self.end_ids = tuple(dict.fromkeys((*self._closing_ids(), *eos)))
        self._anchor = self._control[self.end_ids[0]]

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TemplateConversation:
        if self._chat.tools == "auto" and self._lists_tools and tools:
            listing, functions = "", [{"type": "function", "function": tool} for tool in tools]
        else:
            listing, functions = list_tools(tools, self._chat.tools), None
        retained = with_listing(keep_messages(messages, self._chat), listing)
        parted, functions = self._part_all(retained), self._part(functions)
        return self.converse(parted, functions, self.render(parted, functions))

    def converse(
        self, messages: tuple[Message, ...], functions: list[Tool] | None, text: str
    ) -> TemplateConversation:
        """A conversation whose text is tokenised anew."""
        tokens = self.encode(text, follows=False)
        return TemplateConversation(self, messages, functions, text, tokens)

    def action(self, text: str) -> list[int]:
        return [*self.encode(self._part(text), follows=True), self.end_ids[0]]

    def action_before_end(self, text: str) -> list[int]:
        """The tokens of rendered text that an end token follows, with the first that does.

        Args:
          text: rendered, from where an action begins.
        """
        ends = {token: text.find(self._control[token]) for token in self.end_ids}
        present = {token: place for token, place in ends.items() if place >= 0}
        if not present:  # the template writes none
            return [*self.encode(text, follows=True), self.end_ids[0]]
        end = min(present, key=present.__getitem__)
        return [*self.encode(text[: present[end]], follows=True), end]

    def text(self, tokens: Sequence[int]) -> str:
        body = tokens[:-1] if tokens and tokens[-1] in self.end_ids else tokens
        # The backend's own, since the library's may clean spaces up; unknown ids have no text.
        return self._backend.decode(list(body), skip_special_tokens=True)

    def token_bytes(self) -> list[bytes]:
        decode = vocabulary.name_decoder(self._backend.decoder, self._where)
        pieces = [b""] * self.vocab_size
        for name, token in self._library.get_vocab().items():
            pieces[token] = decode(name)
        for token, name in self._control.items():
            pieces[token] = vocabulary.CONTROL + name.encode()
        return pieces

    def save(self, folder: Path) -> None:
        same_ids.save_library(self._library, folder)
        try:
            same_ids.compare(folder, self._texts(), self._plain, self._decode_all)
        except ValueError as error:
            for name in (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE):
                (folder / name).unlink(missing_ok=True)
            _LOGGER.warning("%s: no tokenizer is written.", error)
            return
        file = folder / GENERATION_FILE
        values = (
            (read_object(file) if file.is_file() else {})
            | self._generation
            | {"eos_token_id": list(self.end_ids)}
        )
        file.write_text(json.dumps(values, indent=2) + "\n")
        save_chat(folder, self._chat)

    def _decode_all(self, tokens: Sequence[int]) -> str:
        """As the library's: with the names of control tokens, which some texts have."""
        return self._backend.decode(list(tokens), skip_special_tokens=False)

    def _plain(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _texts(self) -> list[str]:
        """The text of each token, without tokens of incomplete characters."""
        texts = self._backend.decode_batch([[token] for token in range(self.vocab_size)])
        return [text for text in texts if text and "\ufffd" not in text]

    def part(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages that the model reads, with marks in their texts.

        Raises:
          ValueError: an unknown role, or a content that is not a text.
        """
        return self._part_all(keep_messages(messages, self._chat))

    def render(
        self, messages: Sequence[Message], functions: list[Tool] | None, *, header: bool = True
    ) -> str:
        """The text of a conversation with marks, and the next assistant header.

        Raises:
          ValueError: a conversation that the template refuses, or no template.
        """
        if self._template is None:
            raise ValueError(
                f"tokenizer: {self._where} has no chat template; allowed: one, or a Jinja file in"
                " config.chat.template."
            )
        try:
            return self._library.apply_chat_template(
                list(messages),
                tools=functions,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=header,
                **self._chat.template_kwargs,
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"chat template: refused the roles {roles}: {error}") from None

    def encode(self, text: str, *, follows: bool) -> list[int]:
        """Tokens of rendered text; text between two marks is tokenised by itself.

        Args:
          follows: whether the text follows other text. It is then tokenised behind an end token,
            since some tokenizers treat the beginning of a text specially.
        """
        tokens: list[int] = []
        for index, part in enumerate(_LONE_MARK.split(text)):
            anchor = self._anchor if follows or index > 0 else ""
            ids = self._plain(anchor + part.replace(MARK * 2, MARK))
            tokens += ids[1:] if anchor else ids
        return tokens

    def sampled_text(self, action: Sequence[int]) -> tuple[str, str | None]:
        """An action as rendered text: without control tokens other than those of `CALL_MARKS`; and
        all of it, its end too, which is None where it has others inside."""
        ended = bool(action) and action[-1] in self.end_ids
        body, text = action[:-1] if ended else action, ""
        for name, run in itertools.groupby(body, self._call_marks.get):
            tokens = list(run)
            said = self._backend.decode(tokens, skip_special_tokens=True)
            text += self._part(said) if name is None else name * len(tokens)
        if not (self._control.keys() - self._call_marks.keys()).isdisjoint(body):
            return text, None
        return text, text + (self._control[action[-1]] if ended else "")

    def _part_all(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        for message in messages:
            role, content = message["role"], message["content"]
            if role not in ROLES:
                raise ValueError(f"message: role is {role!r}; allowed: {', '.join(ROLES)}.")
            if not isinstance(content, str):
                raise ValueError(f"message: content of {role} is {content!r}; allowed: a text.")
        return tuple(map(self._part_message, messages))

    def _part_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with marks, but for the control token with which its calls begin."""
        parted, text = self._part(message), message["content"]
        for name in self._call_marks.values() if isinstance(text, TextWithCalls) else ():
            if text.startswith(name, text.calls_at):
                said, calls = text[: text.calls_at], text[text.calls_at + len(name) :]
                parted["content"] = self._part(said) + name + self._part(calls)
        return parted

    def _part(self, value: Any) -> Any:
        """A value with marks in all its texts, so that none forges a control token or a header."""
        if isinstance(value, str):
            return self._forged.sub(rf"\g<0>{MARK}", value.replace(MARK, MARK * 2))
        if isinstance(value, Mapping):
            return {self._part(key): self._part(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._part(item) for item in value]
        return value

    def _around_messages(self) -> list[str]:
        """Names of added tokens that the template writes around messages, such as role headers."""
        around, header = ([], "") if self._template is None else text_around(self.render)
        ids = {token for text in around for token in self._plain(text)}
        added = ((i, token.content) for i, token in self._library.added_tokens_decoder.items())
        return [n for i, n in added if n.strip() and (i in ids or header.startswith(n))]

    def _closing_ids(self) -> list[int]:
        """The control token with which the template ends an assistant's message, if any."""
        if self._template is None:
            return []
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        _, _, tail = self.render(messages, None, header=False).rpartition(PROBE)
        closing = [token for token, name in self._control.items() if tail.startswith(name)]
        return sorted(closing, key=lambda token: -len(self._control[token]))[:1]


@dataclass(frozen=True)
class TemplateConversation:
    """Messages, their rendered text and its tokens.

    messages, functions, text: with marks. text: as the template renders it, with the next header.
    tokens: the tokens of that text; those of actions as sampled.
    """

    tokenizer: HuggingFaceTokenizer
    messages: tuple[Message, ...]
    functions: list[Tool] | None
    text: str
    tokens: list[int]

    def say(self, message: Message) -> list[int]:
        """The text of a message is said as it is; its thoughts and calls as the template has them.

        What the template writes before the text of any message, such as an empty thought, is no
        part of one without thoughts.
        """
        tokenizer = self.tokenizer
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            return tokenizer.action(message["content"])
        (marked,) = tokenizer.part([message])
        said = self._after_header(marked)
        if not message.get("reasoning_content"):
            probe = self._after_header({"role": "assistant", "content": PROBE})
            said = said.removeprefix(probe.partition(PROBE)[0])
        check_written(marked, said)
        return tokenizer.action_before_end(said)

    def _after_header(self, message: Message) -> str:
        """What the template writes of an assistant's message behind the header that asks for it."""
        text = self.tokenizer.render((*self.messages, message), self.functions, header=False)
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
        tokenizer = self.tokenizer
        said, sampled = tokenizer.sampled_text(action)
        answer = {"role": "assistant", "content": said}
        messages = (*self.messages, answer, *tokenizer.part(messages))
        text = tokenizer.render(messages, self.functions)
        if sampled is None or not text.startswith(self.text + sampled):
            return tokenizer.converse(messages, self.functions, text)
        after = tokenizer.encode(text[len(self.text + sampled) :], follows=True)
        tokens = [*self.tokens, *action, *after]
        return dataclasses.replace(self, messages=messages, text=text, tokens=tokens)


def load(folder: Path, chat: schema.Chat | None) -> HuggingFaceTokenizer:
    """The tokenizer of a folder in Hugging Face's layout; reads files only.

    Raises:
      ValueError: a damaged file, or as `HuggingFaceTokenizer` says.
    """
    options = choose_chat(folder, chat)
    try:
        library = same_ids.read_library(folder)
    except Exception as error:  # the library raises errors of any class for a damaged file
        raise ValueError(f"tokenizer: {folder} cannot be read: {error}.") from error
    file = folder / GENERATION_FILE
    generation = read_object(file) if file.is_file() else {}
    return HuggingFaceTokenizer(library, options, generation=generation, where=str(folder))


def gguf_tokenizer(fields: Mapping[str, Any], chat: schema.Chat | None) -> HuggingFaceTokenizer:
    """The tokenizer that a GGUF file's metadata holds.

    Args:
      fields: the metadata by key, such as `tokenizer.ggml.tokens`.

    Raises:
      ValueError: missing metadata, or an unsupported kind of vocabulary.
    """
    options = schema.Chat() if chat is None else chat
    library = gguf_vocabulary.build(fields)
    generation = {"eos_token_id": gguf_vocabulary.end_ids(fields)}
    return HuggingFaceTokenizer(library, options, generation=generation, where="the GGUF file")


def _eos_ids(
    library: PreTrainedTokenizerBase, generation: Mapping[str, Any], where: str
) -> list[int]:
    """Ids that end a generation, by the model's files."""
    stated = generation.get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if library.eos_token_id is not None:
        ids = [*ids, library.eos_token_id]
    if not ids:
        raise ValueError(
            f"tokenizer: {where} names no end token; allowed: an eos_token in"
            f" tokenizer_config.json, or an eos_token_id in {GENERATION_FILE}."
        )
    for token in ids:
        if not isinstance(token, int) or token not in library.added_tokens_decoder:
            raise ValueError(
                f"tokenizer: {where}: eos_token_id is {token!r}; allowed: an added token."
            )
    return ids
