"""A cache of answered conversations, found by the history that a client sends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seeupo_jax.agents.calls import HistoryMessage
from seeupo_jax.agents.lineages import history_digests, same_thoughts
from seeupo_jax.envs.base import Tool
from seeupo_jax.policy.files.tokenizer import TokenizedConversation


@dataclass(frozen=True)
class CachedConversation:
    """A conversation up to a sampled answer.

    conversation: before the answer. action: the sampled tokens of the answer.
    group: the engine's group of the conversation, which does not change.
    thoughts: of the answer, if they are no content.
    """

    conversation: TokenizedConversation
    action: Sequence[int]
    group: int
    thoughts: str = ""

    @property
    def tokens(self) -> int:
        return len(self.conversation.tokens) + len(self.action)


class CacheHit(NamedTuple):
    """A cached conversation, and the messages that follow it in a history."""

    answered: CachedConversation
    messages: tuple[HistoryMessage, ...]


class ConversationCache:
    """The latest conversations; the least recently used is evicted first.

    Args:
      most: limit of the tokens of all conversations, each counted in full.
      on_evicted: receives the key of an evicted conversation.
      volatile: as of `Lineages`.
    """

    def __init__(self, most: int, on_evicted: Callable[[int], None], volatile: Sequence[str] = ()):
        self._most, self._on_evicted, self._volatile = most, on_evicted, tuple(volatile)
        self._answered: OrderedDict[bytes, tuple[int, CachedConversation]] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._answered)

    def find(self, messages: Sequence[HistoryMessage], tools: Sequence[Tool]) -> CacheHit | None:
        """Finds the longest cached conversation with which a history starts; None: none does."""
        digests = list(history_digests(messages, tools, volatile=self._volatile))
        for count in range(len(messages), 0, -1):
            digest = digests[count]
            if digest not in self._answered:
                continue
            answered = self._answered[digest][1]
            if same_thoughts(messages[count - 1].thoughts, answered.thoughts):
                self._answered.move_to_end(digest)
                return CacheHit(answered, tuple(messages[count:]))
        return None

    def add(
        self,
        key: int,
        messages: Sequence[HistoryMessage],
        tools: Sequence[Tool],
        answered: CachedConversation,
    ) -> None:
        """Caches a conversation under the history with which its client will continue it.

        Args:
          key: passed to `on_evicted`.
          messages: the history, with the sampled answer as its last message.
        """
        *_, digest = history_digests(messages, tools, volatile=self._volatile)
        self._evict(digest)  # another sample of the same text
        self._answered[digest] = (key, answered)
        self._tokens += answered.tokens
        while self._tokens > self._most and len(self._answered) > 1:
            self._evict(next(iter(self._answered)))

    def _evict(self, digest: bytes) -> None:
        if digest in self._answered:
            key, answered = self._answered.pop(digest)
            self._tokens -= answered.tokens
            self._on_evicted(key)
