"""Conversations that a server has answered, found again by what a client sends of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seeupo_jax.agents.calls import HistoryMessage
from seeupo_jax.agents.lineages import history_digests
from seeupo_jax.envs.base import Tool
from seeupo_jax.policy.files.tokenizer import TokenizedConversation


@dataclass(frozen=True)
class CachedConversation:
    """A conversation up to an answer of ours.

    conversation: before the answer. action: its tokens as sampled.
    group: of the engine, which it stays in.
    """

    conversation: TokenizedConversation
    action: Sequence[int]
    group: int

    @property
    def tokens(self) -> int:
        return len(self.conversation.tokens) + len(self.action)


class CacheHit(NamedTuple):
    """A conversation that goes on, and the messages that are new in it."""

    answered: CachedConversation
    messages: tuple[HistoryMessage, ...]


class ConversationCache:
    """The latest conversations; those not used for longest are forgotten first.

    Args:
      most: tokens of all, each conversation's own counted in full.
      on_forgotten: is given what `add` had returned for a conversation that is forgotten.
    """

    def __init__(self, most: int, on_forgotten: Callable[[int], None]):
        self._most, self._on_forgotten = most, on_forgotten
        self._answered: OrderedDict[bytes, tuple[int, CachedConversation]] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._answered)

    def find(self, messages: Sequence[HistoryMessage], tools: Sequence[Tool]) -> CacheHit | None:
        """The longest conversation that a history begins with; None: it has no answer of ours."""
        digests = list(history_digests(messages, tools))
        for count in range(len(messages), 0, -1):
            digest = digests[count]
            if digest in self._answered:
                self._answered.move_to_end(digest)
                return CacheHit(self._answered[digest][1], tuple(messages[count:]))
        return None

    def add(
        self,
        key: int,
        messages: Sequence[HistoryMessage],
        tools: Sequence[Tool],
        answered: CachedConversation,
    ) -> None:
        """Remembers a conversation under the messages that its client will begin with.

        Args:
          key: what `on_forgotten` is given.
          messages: the history, and our answer as the last one.
        """
        *_, digest = history_digests(messages, tools)
        self._forget(digest)  # another sample of the same words
        self._answered[digest] = (key, answered)
        self._tokens += answered.tokens
        while self._tokens > self._most and len(self._answered) > 1:
            self._forget(next(iter(self._answered)))

    def _forget(self, digest: bytes) -> None:
        if digest in self._answered:
            key, answered = self._answered.pop(digest)
            self._tokens -= answered.tokens
            self._on_forgotten(key)
