"""Finished conversations as the tokens that a rollout of them would have recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from seeupo_jax.envs.base import Demonstration, Message
from seeupo_jax.policy.files.messages import model_text
from seeupo_jax.policy.files.tokenizer import Tokenizer, Transcript
from seeupo_jax.types import CONTEXT, Segment

Segments = tuple[Segment, ...]


def to_segments(
    demonstration: Demonstration, tokenizer: Tokenizer, train_on: str = "all"
) -> Segments:
    """A demonstration as the tokens that a rollout of the same conversation would have.

    A message that is not trained is context, as the chat template renders it in the history.

    Args:
      train_on: `all` assistant messages without `weight` 0, or the `last` of these.

    Returns: one segment, unless the chat template rewrites history; it is empty where no message is
      trained. Each ends with its last trained message.

    Raises:
      ValueError: the chat template refuses the conversation, or leaves out a part of a message that
        is trained.
    """
    messages = tuple(map(_tagged, demonstration.messages))
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [turn for turn, place in enumerate(places) if messages[place].get("weight", 1)]
    transcript, conversation, action, end = Transcript(), None, [], 0
    for turn in turns[-1:] if train_on == "last" else turns:
        before = messages[end : places[turn]]
        if conversation is None:
            conversation = tokenizer.begin(before, demonstration.tools)
        else:
            conversation = conversation.extend(action, before)
        transcript.read(conversation.tokens)
        action, end = conversation.say(messages[places[turn]]), places[turn] + 1
        transcript.act(action, turn, [0.0] * len(action))
    return transcript.segments()


def _tagged(message: Message) -> Message:
    """An assistant's text with its tags, also where it is context."""
    if message["role"] != "assistant":
        return message
    return {**message, "content": model_text(message["content"])}


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
        """Before any is cut, one without a token to train on too."""
        return to_segments(self.conversations[index], self.tokenizer, self.train_on)
