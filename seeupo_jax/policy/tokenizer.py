"""Conversations as token ids: a small protocol, and SentencePiece behind it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from seeupo_jax import config
from seeupo_jax.envs.base import Message, Tool

ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
MODEL_FILE = "tokenizer.model"
CHAT_FILE = "chat.json"


class Tokenizer(Protocol):
    """What the rollout needs of a tokenizer.

    `prompt` and `observation` end with the header of the assistant's next message, so that an
    action is exactly what is sampled after them, its end token included.
    """

    vocab_size: int
    end_ids: tuple[int, ...]  # a sampled token among these ends the action

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The first context of a conversation."""
        ...

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """What follows an action's end token, up to the next action."""
        ...

    def action(self, text: str) -> list[int]:
        """A response as it would have been sampled, end token included (for demonstrations)."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """An action's text, without its end token; for the environment and for people."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files into a model folder."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece model with one control token a role: `<|user|>text<|end|><|assistant|>`.

    Control tokens are in no text: neither environment nor model can forge a role by writing one.
    """

    def __init__(self, model: bytes, chat: config.Chat):
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.model, self._chat = model, chat
        self.vocab_size = self._pieces.get_piece_size()
        self._header = {role: self._control(f"<|{role}|>") for role in ROLES}
        self._end = self._control(END)
        self.end_ids = (self._end,)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        kept = [m for m in messages if self._chat.system or m["role"] != "system"]
        listing = TOOL_LISTINGS[self._chat.tools](tools)
        if listing:
            kept = [{"role": "system", "content": listing}, *kept]
        return self.observation(kept)

    def observation(self, messages: Sequence[Message]) -> list[int]:
        tokens = []
        for message in messages:
            content = self._pieces.encode(message["content"])
            tokens += [self._header[message["role"]], *content, self._end]
        return [*tokens, self._header["assistant"]]

    def action(self, text: str) -> list[int]:
        return [*self._pieces.encode(text), self._end]

    def text(self, tokens: Sequence[int]) -> str:
        # A model may have more tokens than its tokenizer (a padded head); those have no text.
        known = (token for token in tokens if token != self._end and token < self.vocab_size)
        return self._pieces.decode(list(known))

    def save(self, folder: Path) -> None:
        (folder / MODEL_FILE).write_bytes(self.model)
        chat = {"system": self._chat.system, "tools": self._chat.tools}
        (folder / CHAT_FILE).write_text(json.dumps(chat, indent=2) + "\n")

    def _control(self, piece: str) -> int:
        token = self._pieces.piece_to_id(piece)
        if not self._pieces.is_control(token):
            raise ValueError(f"tokenizer: no control token {piece}; allowed: a model made here.")
        return token


def load_tokenizer(folder: Path) -> SentencePieceTokenizer:
    """The tokenizer of a model folder written by `save`.

    Raises:
      ValueError: a file is missing or damaged.
    """
    model, chat = folder / MODEL_FILE, folder / CHAT_FILE
    for file in (model, chat):
        if not file.is_file():
            raise ValueError(f"tokenizer: no file {file}; a model folder made here has one.")
    try:
        options = config.from_dict({"chat": json.loads(chat.read_text())}).chat
        return SentencePieceTokenizer(model.read_bytes(), options)
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(f"tokenizer: {folder} cannot be read: {error}.") from None


def train_tokenizer(
    texts: Iterable[str], words: Sequence[str], vocab_size: int, chat: config.Chat
) -> SentencePieceTokenizer:
    """Trains a byte-pair encoding on texts; every word of `words` is one token wherever it stands.

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


def _signatures(tools: Sequence[Tool]) -> str:
    lines = []
    for tool in tools:
        parameters = tool["parameters"]
        required = parameters["required"]
        names = (n if n in required else f"{n}=" for n in parameters["properties"])
        lines.append(f"{tool['name']}({', '.join(names)})")
    return "\n".join(lines)


def _schemas(tools: Sequence[Tool]) -> str:
    return "\n".join(json.dumps(tool) for tool in tools)


# How the tools are listed before the conversation.
TOOL_LISTINGS = {"none": lambda tools: "", "signatures": _signatures, "json": _schemas}
