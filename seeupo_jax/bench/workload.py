"""Conversations to measure with: all is given but the actions' tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """One conversation of a workload: observation t stands between the actions t and t + 1.

    prompt: what stands before the first action.
    lengths: tokens of each turn's action, at least one turn and one token.
    observations: one fewer than there are turns, none of them empty.
    """

    prompt: Tokens
    lengths: tuple[int, ...]
    observations: tuple[Tokens, ...]

    @property
    def tokens(self) -> int:
        """All tokens, those of the last action included."""
        return len(self.prompt) + sum(self.lengths) + sum(map(len, self.observations))


@dataclass(frozen=True)
class Workload:
    """Conversations whose prompts and observations are given and whose actions are sampled.

    Every sampler is to give an action the length that is written here, whatever it samples, so that
    all of them do the same work.

    prompts: token ids, one a group.
    lengths: [group][member][turn], tokens of an action.
    observations: [group][member][turn], the token ids that follow an action; the last has none.
    vocab_size: above every token id; the model's may be larger.

    Raises:
      ValueError: parts whose numbers do not fit together.
    """

    name: str
    prompts: tuple[Tokens, ...]
    lengths: tuple[tuple[tuple[int, ...], ...], ...]
    observations: tuple[tuple[tuple[Tokens, ...], ...], ...]
    vocab_size: int

    def __post_init__(self) -> None:
        members = {len(group) for part in (self.lengths, self.observations) for group in part}
        groups = {len(self.prompts), len(self.lengths), len(self.observations)}
        if len(groups) != 1 or len(members) != 1:
            raise ValueError(
                f"workload {self.name}: got parts of {sorted(groups)} groups with"
                f" {sorted(members)} members; allowed: one number of each."
            )
        for c in self.conversations:
            texts = (c.prompt, *c.observations)
            if len(c.lengths) != 1 + len(c.observations) or min(c.lengths) < 1 or not all(texts):
                raise ValueError(
                    f"workload {self.name}: got actions of {c.lengths} tokens and texts of"
                    f" {tuple(map(len, texts))}; allowed: as many of each, none of them empty."
                )

    @cached_property
    def conversations(self) -> tuple[Conversation, ...]:
        """All of them, those of a group side by side."""
        return tuple(
            Conversation(prompt, length, observation)
            for prompt, lengths, observations in zip(
                self.prompts, self.lengths, self.observations, strict=True
            )
            for length, observation in zip(lengths, observations, strict=True)
        )

    @property
    def group_size(self) -> int:
        """Conversations that begin with the same prompt."""
        return len(self.lengths[0])

    @property
    def turns(self) -> int:
        """Of the conversation that has most."""
        return max(len(c.lengths) for c in self.conversations)

    @property
    def action_tokens(self) -> int:
        """Of the longest action."""
        return max(max(c.lengths) for c in self.conversations)

    @property
    def max_context(self) -> int:
        """Tokens of the longest conversation."""
        return max(c.tokens for c in self.conversations)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once for its whole group."""
        return sum(map(len, self.prompts))

    @property
    def sampled(self) -> int:
        """Tokens of all actions."""
        return sum(sum(c.lengths) for c in self.conversations)

    @property
    def observed(self) -> int:
        """Tokens of all observations."""
        return sum(len(tokens) for c in self.conversations for tokens in c.observations)

    @property
    def tokens(self) -> int:
        """Of all conversations, a group's prompt once for each member."""
        return sum(c.tokens for c in self.conversations)

    @property
    def least_computed(self) -> int:
        """Token positions that any sampler must run through the network.

        A prompt once a group, every action and observation once; but not a conversation's last
        token, after which nothing is sampled.
        """
        return self.prompt_tokens + self.observed + self.sampled - len(self.conversations)
