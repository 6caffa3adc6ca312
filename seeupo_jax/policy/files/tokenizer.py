"""Conversations as token ids: the protocol, what a rollout records, and a folder's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.policy.files import chat_template, fast_tokenizer, sentence_pieces
from seeupo_jax.policy.files.sentence_pieces import MODEL_FILE, UNREAD_FILE, train_tokenizer
from seeupo_jax.types import CONTEXT, Segment

__all__ = ["Conversation", "Tokenizer", "Transcript", "load_tokenizer", "train_tokenizer"]


class Conversation(Protocol):
    """An episode as the model reads it; it does not change, `extend` makes the next one."""

    @property
    def tokens(self) -> Sequence[int]:
        """All that stands before the next action, the header of the assistant's message included.

        An action is exactly what is sampled after them, its end token included.
        """
        ...

    def extend(self, action: Sequence[int], messages: Sequence[Message]) -> Conversation:
        """The conversation after an action and the messages that answer it.

        Its tokens begin with the present ones and the action, unless the chat template rewrites
        what has been said (a model's reasoning is often taken out of its earlier messages).

        Args:
          action: the tokens as sampled; without an end token where they were cut short.
        """
        ...


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; the model may have more (a padded head)."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """A sampled token among these ends the action."""
        ...

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """A conversation up to the first action."""
        ...

    def action(self, text: str) -> list[int]:
        """A response as it would have been sampled, end token included (for demonstrations)."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """An action's text, without its end token; for the environment and for people."""
        ...

    def token_bytes(self) -> list[bytes]:
        """What each token adds to a text, by id; joined they are its UTF-8.

        A control token's is its name behind a byte 255; empty for an id that stands for no text of
        its own. A text's first space is here even where `text` strips it (Llama 2).

        Raises:
          ValueError: a tokenizer whose tokens' bytes are not known.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files into a model folder."""
        ...


class Transcript:
    """What a model read and said in one episode, as segments in the making.

    A context that does not begin with all that was read and said so far has been rewritten: the
    segment ends with its last action, and a new one begins, in which earlier turns are context.
    """

    def __init__(self) -> None:
        self._finished: list[Segment] = []
        self._tokens: list[int] = []
        self._turn: list[int] = []
        self._logp: list[float] = []

    def shared(self, context: Sequence[int]) -> int:
        """How many of the segment's tokens a context begins with, its last token never counted."""
        limit = min(len(self._tokens), len(context) - 1)
        if list(context[:limit]) == self._tokens[:limit]:
            return limit
        return next(i for i in range(limit) if context[i] != self._tokens[i])

    def read(self, context: Sequence[int]) -> None:
        """Makes `context` all that stands before the next action."""
        known = self.shared(context)
        if known < len(self._tokens):
            self._finished.append(self._segment())
            self._tokens, self._turn, self._logp = [], [], []
            known = 0
        count = len(context) - known
        self._record(context[known:], [CONTEXT] * count, [0.0] * count)

    def act(self, tokens: Sequence[int], turn: int, logp: Sequence[float]) -> None:
        """Adds a turn's action and the sampler's log-probabilities."""
        self._record(tokens, [turn] * len(tokens), logp)

    def segments(self) -> tuple[Segment, ...]:
        """At least one; it is empty where nothing was read."""
        return (*self._finished, self._segment())

    def _record(self, tokens: Sequence[int], turn: Sequence[int], logp: Sequence[float]) -> None:
        self._tokens += tokens
        self._turn += turn
        self._logp += logp

    def _segment(self) -> Segment:
        return Segment(
            np.array(self._tokens, np.int32),
            np.array(self._turn, np.int32),
            np.array(self._logp, np.float32),
        )


# The file that says which tokenizer a model folder has -> its loader; the first that is there.
LOADERS = {
    chat_template.TOKENIZER_FILE: chat_template.load,
    chat_template.CONFIG_FILE: chat_template.load,  # beside a SentencePiece model, as Llama 2 has
    UNREAD_FILE: sentence_pieces.load,
    MODEL_FILE: sentence_pieces.load,
}


def load_tokenizer(folder: Path, chat: schema.Chat | None = None) -> Tokenizer | None:
    """The tokenizer of a model folder: Hugging Face's, SentencePiece or not, or one made here.

    Args:
      chat: how conversations become tokens; None, or the defaults: as the folder's own `chat.json`
        says, where it has one.

    Returns: None where the folder has none of the files that hold one.

    Raises:
      ValueError: a file is missing or damaged; options that the tokenizer cannot honour.
    """
    if fast_tokenizer.made_from(folder) is not None:
        return sentence_pieces.load(folder, chat)
    for file, load in LOADERS.items():
        if (folder / file).is_file():
            return load(folder, chat)
    return None
