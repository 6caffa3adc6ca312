"""Conversations as token ids: protocols, the transcript of an episode, a folder's tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.policy.files import (
    fast_tokenizer,
    huggingface_tokenizer,
    library_tokenizer,
    sentencepiece_tokenizer,
)
from seeupo_jax.policy.files.sentencepiece_tokenizer import MODEL_FILE, UNREAD_FILE, train_tokenizer
from seeupo_jax.types import CONTEXT, UNKNOWN_VERSION, Segment

__all__ = [
    "TokenizedConversation",
    "Tokenizer",
    "Transcript",
    "load_tokenizer",
    "train_tokenizer",
    "unassigned_ids",
]


class TokenizedConversation(Protocol):
    """An episode as the model reads it; immutable, `extend` makes the next one."""

    @property
    def tokens(self) -> Sequence[int]:
        """The context of the next action, with the header of the assistant's message.

        An action is exactly what is sampled after it, its end token included.
        """
        ...

    def say(self, message: Message) -> list[int]:
        """An assistant's message as the model would have to sample it next, end token included.

        Args:
          message: with `content`, and `reasoning_content` and `tool_calls` (of functions, whose
            arguments are objects) only where the tokenizer writes calls.

        Raises:
          ValueError: the chat template leaves out a part of it.
        """
        ...

    def extend(self, action: Sequence[int], messages: Sequence[Message]) -> TokenizedConversation:
        """The conversation after an action and the messages that answer it.

        Its tokens begin with the present ones and the action, unless the chat template rewrites
        history (the reasoning in earlier messages is often removed).

        Args:
          action: the tokens as sampled; without an end token where they were cut short.
        """
        ...


class Tokenizer(Protocol):
    """The tokenizer's interface for training."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; the model may have more (a padded head)."""
        ...

    @property
    def ids(self) -> Collection[int]:
        """The ids of its tokens; below `vocab_size` some may be missing."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """A sampled token among these ends the action."""
        ...

    @property
    def writes_calls(self) -> bool:
        """Whether a conversation says `tool_calls` and `reasoning_content` of a message itself."""
        ...

    @property
    def tool_listing(self) -> str | None:
        """The form of `TOOL_LISTINGS` in which a message lists tools; None: the template does."""
        ...

    @property
    def unwritten(self) -> Mapping[str, str]:
        """Roles whose messages the model would not read, each with a sentence on what is allowed.

        A conversation that has such a message is refused with that sentence.
        """
        ...

    def why_rewritten(self) -> str:
        """Why conversations may become several segments, and what keeps them one, in a sentence."""
        ...

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenizedConversation:
        """A conversation up to the first action."""
        ...

    def encode(self, text: str) -> list[int]:
        """A plain text, as the model's own library reads it: names of control tokens are these.

        A token that the model has at the beginning of every text is included.
        """
        ...

    def action(self, text: str) -> list[int]:
        """A response as it would have been sampled, end token included (for demonstrations)."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """An action's text, without its end token; for the environment and for people."""
        ...

    def token_bytes(self) -> list[bytes]:
        """The UTF-8 bytes that each token adds to a text, by id.

        A control token's are its name behind a byte 255; an id without text has none. A text's
        first space is included even where `text` strips it (Llama 2).

        Raises:
          ValueError: a tokenizer whose tokens' bytes are unknown.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files into a model folder."""
        ...


class Transcript:
    """The segments of an episode so far.

    A context that does not begin with all tokens so far has been rewritten: the segment ends with
    its last action, and a new one begins, in which earlier turns are context.
    """

    def __init__(self) -> None:
        self._finished: list[Segment] = []
        self._tokens: list[int] = []
        self._turn: list[int] = []
        self._logp: list[float] = []
        self._version: list[int] | None = None  # None: no action's is known
        self._experts: list[np.ndarray] = []  # of its first tokens

    def copy(self) -> Transcript:
        """An independent copy, which continues from here."""
        copied = Transcript()
        copied._finished = list(self._finished)
        copied._record(self._tokens, self._turn, self._logp)
        copied._version = None if self._version is None else list(self._version)
        copied._experts = list(self._experts)
        return copied

    def shared(self, context: Sequence[int]) -> int:
        """The length of the common prefix of the segment and a context, without its last token."""
        limit = max(0, min(len(self._tokens), len(context) - 1))
        if list(context[:limit]) == self._tokens[:limit]:
            return limit
        return next(i for i in range(limit) if context[i] != self._tokens[i])

    def read(self, context: Sequence[int]) -> None:
        """Sets the context of the next action."""
        shared = self.shared(context)
        if shared < len(self._tokens):
            self._finished.append(self._segment())
            self._tokens, self._turn, self._logp, self._experts = [], [], [], []
            self._version = None
            shared = 0
        count = len(context) - shared
        self._record(context[shared:], [CONTEXT] * count, [0.0] * count)

    def act(
        self,
        tokens: Sequence[int],
        turn: int,
        logp: Sequence[float],
        expert_LG: np.ndarray | None = None,
        version_L: Sequence[int] = (),
    ) -> None:
        """Adds a turn's action and the sampler's log-probabilities.

        Args:
          version_L: as of `Action`; empty: not known.
          expert_LG: as `Action.experts`, from the segment's first token on. Of tokens that earlier
            actions were sampled behind those of the first are kept.
        """
        self._record(tokens, [turn] * len(tokens), logp, version_L)
        if expert_LG is not None:
            self._experts.append(expert_LG[sum(map(len, self._experts)) :].copy())

    def segments(self) -> tuple[Segment, ...]:
        """At least one; it is empty where nothing was read."""
        return (*self._finished, self._segment())

    def _record(
        self,
        tokens: Sequence[int],
        turn: Sequence[int],
        logp: Sequence[float],
        version: Sequence[int] = (),
    ) -> None:
        if version and self._version is None:
            self._version = [UNKNOWN_VERSION] * len(self._tokens)
        if self._version is not None:
            self._version += version or [UNKNOWN_VERSION] * len(tokens)
        self._tokens += tokens
        self._turn += turn
        self._logp += logp

    def _segment(self) -> Segment:
        return Segment(
            np.array(self._tokens, np.int32),
            np.array(self._turn, np.int32),
            np.array(self._logp, np.float32),
            self._expert_LG(),
            version_L=None if self._version is None else np.array(self._version, np.int32),
        )

    def _expert_LG(self) -> np.ndarray | None:
        """Filled up with the greatest number of its type where nothing was recorded."""
        if not self._experts:
            return None
        recorded_LG = np.concatenate(self._experts)
        missing = len(self._tokens) - len(recorded_LG), recorded_LG.shape[1]
        none_LG = np.full(missing, np.iinfo(recorded_LG.dtype).max, recorded_LG.dtype)
        return np.concatenate([recorded_LG, none_LG])


def unassigned_ids(tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Bounds of the ids of a model's vocabulary that no token has: `Architecture.unassigned`.

    Without a tokenizer every id may have one.
    """
    if tokenizer is None:
        return ()
    assigned_V = np.zeros(vocab_size, bool)
    assigned_V[[token for token in tokenizer.ids if token < vocab_size]] = True
    changes = np.diff(assigned_V, prepend=True, append=True)
    return tuple(np.flatnonzero(changes).tolist())


# File of a model folder -> the loader of its tokenizer; the first that exists.
LOADERS = {
    library_tokenizer.TOKENIZER_FILE: huggingface_tokenizer.load,
    # Of a folder with a SentencePiece model and no tokenizer.json, as Llama 2 has.
    library_tokenizer.CONFIG_FILE: huggingface_tokenizer.load,
    UNREAD_FILE: sentencepiece_tokenizer.load,
    MODEL_FILE: sentencepiece_tokenizer.load,
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
    files = [*folder.iterdir(), *([Path(chat.template)] if chat and chat.template else [])]
    stats = ((str(file), file.stat()) for file in files if file.is_file())
    stamps = tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))
    return _load(_Source(folder.absolute(), stamps, repr(chat), chat))


@dataclass(frozen=True)
class _Source:
    """The files and options that a tokenizer is made from; equal if they are unchanged."""

    folder: Path
    stamps: tuple[tuple[str, int, int], ...]  # of each file: when it was written, bytes
    options: str
    chat: schema.Chat | None = field(compare=False)


# The last one is kept: a start asks for it at each of its checks. No tokenizer changes once made.
@functools.lru_cache(maxsize=1)
def _load(source: _Source) -> Tokenizer | None:
    folder = source.folder
    if fast_tokenizer.sentencepiece_file(folder) is not None:
        return sentencepiece_tokenizer.load(folder, source.chat)
    for file, load in LOADERS.items():
        if (folder / file).is_file():
            return load(folder, source.chat)
    return None
