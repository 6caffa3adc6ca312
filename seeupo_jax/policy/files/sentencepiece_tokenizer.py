"""A SentencePiece tokenizer trained here, with one control token per role."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.policy.files import fast_tokenizer
from seeupo_jax.policy.files.folder_files import check_content
from seeupo_jax.policy.files.messages import (
    CHAT_FILE,
    ROLES,
    drop_unread_messages,
    format_tools,
    resolve_chat,
    save_chat,
)
from seeupo_jax.policy.files.vocabulary import CONTROL, byte_fallback

_LOGGER = logging.getLogger(__name__)

END = "<|end|>"
MODEL_FILE = "tokenizer.model"
# For models of which `transformers` would read other ids: a name that it does not know.
UNREAD_FILE = "sentencepiece.model"


class SentencePieceTokenizer:
    """A SentencePiece model with one control token per role: `<|user|>text<|end|><|assistant|>`.

    No text is tokenised as a control token: neither environment nor model can forge a role. History
    is never rewritten: a conversation is one segment.

    Raises:
      ValueError: a model without the control tokens; chat options that only a template can honour.
    """

    def __init__(self, model: bytes, chat: schema.Chat):
        for name in ("template", "template_kwargs", "roles"):
            if value := vars(chat)[name]:
                raise ValueError(
                    f"config.chat.{name}: got {value!r}; allowed: none, since a SentencePiece model"
                    " made here has no chat template"
                )
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.model, self._chat = model, chat
        self.vocab_size = self._pieces.get_piece_size()
        self.ids = range(self.vocab_size)
        self._header = {role: self._control(f"<|{role}|>") for role in ROLES}
        self._end = self._control(END)
        self.end_ids = (self._end,)
        self.writes_calls = False
        self.tool_listing = chat.tools
        self.unwritten: Mapping[str, str] = {}

    def why_rewritten(self) -> str:
        return "This tokenizer keeps every message as it was sampled."

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> _Conversation:
        listing = format_tools(tools, self._chat.tools)
        listed = self._message("system", listing) if listing else []
        return _Conversation(self, [*listed, *self.observation(messages)])

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """Messages and the header of the assistant's next one."""
        tokens = []
        for message in drop_unread_messages(messages, self._chat):
            tokens += self._message(message["role"], message["content"])
        return [*tokens, self._header["assistant"]]

    def encode(self, text: str) -> list[int]:
        return self._pieces.encode(text)

    def action(self, text: str) -> list[int]:
        return [*self._pieces.encode(text), self._end]

    def text(self, tokens: Sequence[int]) -> str:
        # A model may have more tokens than its tokenizer (a padded head); those have no text.
        decodable = (token for token in tokens if token != self._end and token < self.vocab_size)
        return self._pieces.decode(list(decodable))

    def token_bytes(self) -> list[bytes]:
        return [self._bytes(token) for token in range(self.vocab_size)]

    def save(self, folder: Path) -> None:
        headers = {role: f"<|{role}|>" for role in ROLES}
        template = fast_tokenizer.chat_template(
            headers, END, system=self._chat.system, tools=self._chat.tools
        )
        (folder / UNREAD_FILE).unlink(missing_ok=True)
        (folder / MODEL_FILE).write_bytes(self.model)
        save_chat(folder, self._chat)
        try:
            fast_tokenizer.save(folder, self.model, MODEL_FILE, template, END)
        except ValueError as error:
            (folder / MODEL_FILE).rename(folder / UNREAD_FILE)
            _LOGGER.warning(
                "%s: no tokenizer for transformers is written, only %s, which this package reads.",
                error,
                folder / UNREAD_FILE,
            )

    def _message(self, role: str, content: str) -> list[int]:
        return [self._header[role], *self._pieces.encode(content), self._end]

    def _bytes(self, token: int) -> bytes:
        name = self._pieces.id_to_piece(token)
        if self._pieces.is_control(token):
            return CONTROL + name.encode()
        return b"" if self._pieces.is_unknown(token) else byte_fallback(name)

    def _control(self, piece: str) -> int:
        token = self._pieces.piece_to_id(piece)
        if not self._pieces.is_control(token):
            raise ValueError(f"tokenizer: no control token {piece}; allowed: a model made here.")
        return token


@dataclass(frozen=True)
class _Conversation:
    tokenizer: SentencePieceTokenizer
    tokens: list[int]

    def say(self, message: Message) -> list[int]:
        return self.tokenizer.action(message["content"])

    def extend(self, action: Sequence[int], messages: Sequence[Message]) -> _Conversation:
        answer = self.tokenizer.observation(messages)
        return _Conversation(self.tokenizer, [*self.tokens, *action, *answer])


def load(folder: Path, chat: schema.Chat | None) -> SentencePieceTokenizer:
    """The tokenizer of a model folder written by `save`.

    Raises:
      ValueError: a file is missing or damaged.
    """
    unread = folder / UNREAD_FILE
    file = unread if unread.is_file() else folder / MODEL_FILE
    for needed in (file, folder / CHAT_FILE):
        if not needed.is_file():
            raise ValueError(
                f"tokenizer: no file {needed}; allowed: {file.name} with {CHAT_FILE} (a"
                " SentencePiece model made here), or Hugging Face's tokenizer.json."
            )
    options = resolve_chat(folder, chat)
    check_content(file)
    try:
        return SentencePieceTokenizer(file.read_bytes(), options)
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(f"tokenizer: {folder} cannot be read: {error}.") from None


def train_tokenizer(
    texts: Iterable[str], words: Sequence[str], vocab_size: int, chat: schema.Chat
) -> SentencePieceTokenizer:
    """Trains a byte-pair encoding on texts; every word of `words` is always one token.

    Pieces may span spaces, so the fixed parts of a JSON call become few tokens; digits stay single;
    bytes are the fallback, so every text survives a round trip (only "▁" comes back as a space).

    Raises:
      ValueError: `vocab_size` too small for the words, or too large for the texts.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            control_symbols=[*(f"<|{role}|>" for role in ROLES), END],
            user_defined_symbols=[word.replace(" ", "▁") for word in words],
            byte_fallback=True,
            split_by_whitespace=False,
            split_by_unicode_script=False,
            split_digits=True,
            character_coverage=1.0,
            max_sentencepiece_length=64,
            max_sentence_length=65536,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            bos_id=-1,
            eos_id=-1,
            num_threads=1,  # the same pieces on every machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"config.model.vocab_size: got {vocab_size}, with {len(words)} words kept whole and 256"
            f" bytes; SentencePiece refused: {error}."
        ) from None
    return SentencePieceTokenizer(model.getvalue(), chat)
