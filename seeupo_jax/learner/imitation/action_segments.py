"""Finished conversations as the tokens that a rollout of them would have recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from seeupo_jax.envs.base import Demonstration
from seeupo_jax.policy.files.tokenizer import Tokenizer, Transcript
from seeupo_jax.types import CONTEXT, Segment

Segments = tuple[Segment, ...]


def to_segments(demonstration: Demonstration, tokenizer: Tokenizer) -> Segments:
    """A demonstration as the tokens that a rollout of the same conversation would have.

    A message with `weight` 0 is context, as if it were not the policy's.

    Returns: one segment, unless the chat template rewrites history.

    Raises:
      ValueError: the chat template refuses the conversation, or leaves out a part of it.
    """
    messages = demonstration.messages
    roles = [message["role"] for message in messages]
    start = roles.index("assistant")
    conversation = tokenizer.begin(messages[:start], demonstration.tools)
    transcript, turn = Transcript(), 0
    while start < len(messages):
        transcript.read(conversation.tokens)
        action = conversation.say(messages[start])
        label = turn if messages[start].get("weight", 1) else CONTEXT
        transcript.act(action, label, [0.0] * len(action))
        end = start + 1
        while end < len(messages) and roles[end] != "assistant":
            end += 1
        if end < len(messages):
            conversation = conversation.extend(action, messages[start + 1 : end])
        turn, start = turn + 1, end
    return transcript.segments()


@dataclass(frozen=True)
class Tokenized(Sequence[Segments]):
    """Conversations as segments, tokenised whenever one is asked for.

    train_on: `all` assistant messages, or the `last` of each conversation.
    limit: tokens of a segment at most; what comes behind is cut. None: nothing is.
    """

    conversations: Sequence[Demonstration]
    tokenizer: Tokenizer
    train_on: str = "all"
    limit: int | None = None
    counts: Counter[str] = field(default_factory=Counter[str])  # `cut`: how often one was

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Segments:
        segments = self.all_segments(index)
        if self.limit is not None:
            self.counts["cut"] += any(len(s.tokens_L) > self.limit for s in segments)
            segments = tuple(segment.until(self.limit) for segment in segments)
        return tuple(s for s in segments if (s.turn_L != CONTEXT).any())

    def all_segments(self, index: int) -> Segments:
        """Before any is cut, those without a token to train on too."""
        segments = to_segments(self.conversations[index], self.tokenizer)
        if self.train_on == "all":
            return segments
        last = max(int(segment.turn_L.max()) for segment in segments)
        return tuple(_only(segment, last) for segment in segments)


def _only(segment: Segment, turn: int) -> Segment:
    """The segment with one turn's tokens as actions, all others as context."""
    turn_L = np.where(segment.turn_L == turn, segment.turn_L, CONTEXT)
    return Segment(segment.tokens_L, turn_L, segment.logp_L)
