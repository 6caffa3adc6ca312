"""Conversations to measure samplers with: all is given but the actions' tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from seeupo_jax.envs.order_desk_demonstrator import demonstrate
from seeupo_jax.learner.warm_start import to_segments
from seeupo_jax.policy.tokenizer import Tokenizer
from seeupo_jax.policy.weights import read_tokenizer
from seeupo_jax.types import Segment

ORDER_DESK = "package:order_desk"  # whose tokenizer and chat options `order_desk` counts with
SKILL = 0.4  # of its demonstrator, whose slips make the members of a group differ

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
    def least_computed(self) -> int:
        """Token positions that any sampler must run through the network.

        A prompt once a group, every action and observation once; but not a conversation's last
        token, after which nothing is sampled.
        """
        return self.prompt_tokens + self.observed + self.sampled - len(self.conversations)


def bfcl(
    scale: float,
    groups: int,
    vocab_size: int,
    seed: int,
    *,
    group_size: int = 8,
    turns: int = 8,
) -> Workload:
    """The shape of BFCL multi-turn: a long prompt, many turns, all conversations alike.

    A prompt of 3,700 tokens and, a turn, 60 tokens of action and 120 of observation, all scaled;
    ids are random.

    Args:
      scale: of every length, above 0; 1 is the real shape.
      groups, group_size, turns, vocab_size: at least 1.

    Raises:
      ValueError: a number that is too small.
    """
    sizes = {"groups": groups, "group_size": group_size, "turns": turns, "vocab_size": vocab_size}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"bfcl {name}: got {size}; allowed: a number >= 1.")
    if scale <= 0:
        raise ValueError(f"bfcl scale: got {scale}; allowed: a number > 0.")
    prompt, action, observation = (max(1, round(scale * n)) for n in (3700, 60, 120))
    rng = np.random.default_rng(seed)

    def random_tokens(length: int) -> Tokens:
        return tuple(rng.integers(0, vocab_size, length).tolist())

    return Workload(
        name="bfcl",
        prompts=tuple(random_tokens(prompt) for _ in range(groups)),
        lengths=(((action,) * turns,) * group_size,) * groups,
        observations=tuple(
            tuple(
                tuple(random_tokens(observation) for _ in range(turns - 1))
                for _ in range(group_size)
            )
            for _ in range(groups)
        ),
        vocab_size=vocab_size,
    )


def order_desk(groups: int, *, group_size: int = 8, seed: int = 0) -> Workload:
    """Conversations at the real order desk, as its demonstrator has them.

    A group is a case of the training split, a member one try of a demonstrator who slips; tokens
    are those of the policy that ships with the package. Numbers of turns and all lengths differ.

    Args:
      groups, group_size: at least 1.
      seed: of the slips.

    Raises:
      ValueError: a number that is too small.
    """
    for name, size in {"groups": groups, "group_size": group_size}.items():
        if size < 1:
            raise ValueError(f"order_desk {name}: got {size}; allowed: a number >= 1.")
    tokenizer = read_tokenizer(ORDER_DESK)
    played = [
        [_play(tokenizer, f"train/{group}", seed * group_size + m) for m in range(group_size)]
        for group in range(groups)
    ]
    return Workload(
        name="order_desk",
        prompts=tuple(members[0].prompt for members in played),
        lengths=tuple(tuple(c.lengths for c in members) for members in played),
        observations=tuple(tuple(c.observations for c in members) for members in played),
        vocab_size=tokenizer.vocab_size,
    )


def _play(tokenizer: Tokenizer, task_id: str, seed: int) -> Conversation:
    demonstration, _ = demonstrate(task_id, skill=SKILL, seed=seed)
    (segment,) = to_segments(demonstration, tokenizer)  # its history is never rewritten
    return _cut(segment)


def _cut(segment: Segment) -> Conversation:
    """A segment, which ends with an action, as what was given and how much was sampled."""
    changes = np.flatnonzero(np.diff(segment.turn_L)) + 1
    parts = [tuple(part.tolist()) for part in np.split(segment.tokens_L, changes)]
    prompt, *observations = parts[::2]
    return Conversation(prompt, tuple(map(len, parts[1::2])), tuple(observations))
