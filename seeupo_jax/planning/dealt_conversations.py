"""An iteration's conversations on the shards of the sampler's rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from seeupo_jax.configuration import schema
from seeupo_jax.rollout.dealing import deal
from seeupo_jax.rollout.engine.cache_memory import CachePlan


@dataclass(frozen=True)
class DealtConversations:
    """Conversations of equal groups, as `deal` deals them.

    groups, shards: their numbers.
    least, most: conversations of a shard.
    prompts: that are prefilled: of each group one in every shard that has a part of it.
    rounds: actions that each slot of the shard with most samples one after the other in a turn,
      where conversations begin together; a half-empty round counts as one.
    """

    groups: int
    shards: int
    least: int
    most: int
    prompts: int
    rounds: float

    @property
    def busiest(self) -> int:
        """Conversations of all shards, if each had as many as that with most."""
        return self.most * self.shards

    def __str__(self) -> str:
        each = f"{self.least}" if self.least == self.most else f"{self.least} or {self.most}"
        prompts = "a group's prompt is prefilled once"
        if self.prompts > self.groups:
            prompts = (
                f"prompts of {self.groups} groups are prefilled in {self.prompts} places, since"
                " groups are split"
            )
        return f"conversations on each of {self.shards} row shards: {each}; {prompts}"


def dealt_conversations(rollout: schema.Rollout, plan: CachePlan) -> DealtConversations:
    """The conversations of an iteration whose groups are all of `rollout.group_size`."""
    group_N = [group for group in range(rollout.tasks) for _ in range(rollout.group_size)]
    shard_N = deal(group_N, [0] * plan.shards)
    conversations = Counter(shard_N)
    counts = [conversations[shard] for shard in range(plan.shards)]
    waves, rest = divmod(max(counts), plan.concurrency)
    opened = [plan.concurrency] * waves + [rest] * (rest > 0)
    return DealtConversations(
        groups=rollout.tasks,
        shards=plan.shards,
        least=min(counts),
        most=max(counts),
        prompts=len({*zip(group_N, shard_N, strict=True)}),
        rounds=sum(max(1.0, each / plan.slots) for each in opened),
    )


def dealt_lines(rollout: schema.Rollout, plan: CachePlan) -> list[str]:
    """The conversations of an iteration in words; empty with one shard, which has all."""
    return [str(dealt_conversations(rollout, plan))] if plan.shards > 1 else []
