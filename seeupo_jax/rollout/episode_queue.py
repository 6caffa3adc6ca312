"""The episodes of a process that are open, and those that wait for room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import jax

from seeupo_jax.rollout.dealing import deal, deal_beside
from seeupo_jax.rollout.engine.protocol import Engine
from seeupo_jax.rollout.episode import EpisodeRequest


class EpisodeQueue:
    """Opens next an episode of the shard with the fewest open ones, so that no shard idles.

    Args:
      shards: of this process.
      room: how many episodes of a shard may be open.

    Attributes:
      open: the shard of each open episode, by its key.
    """

    def __init__(self, shards: Iterable[int], room: int):
        self._room = room
        self._waiting: dict[int, deque[int]] = {shard: deque() for shard in shards}
        self._opened = dict.fromkeys(self._waiting, 0)
        self.open: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def loads(self) -> dict[int, int]:
        """How many episodes of each shard are open or wait."""
        return {shard: self._opened[shard] + len(keys) for shard, keys in self._waiting.items()}

    def add(self, key: int, shard: int) -> None:
        """Appends an episode."""
        self._waiting[shard].append(key)

    def next(self) -> int | None:
        """The key of the next episode, which is open from now on; None: no shard has room for one.

        Shards with equally many open episodes take turns in the order of their numbers.
        """
        ready = [shard for shard, keys in self._waiting.items() if keys]
        shard = min(ready, key=self._opened.__getitem__, default=None)
        if shard is None or self._opened[shard] >= self._room:
            return None
        key = self._waiting[shard].popleft()
        self.open[key] = shard
        self._opened[shard] += 1
        return key

    def close(self, key: int) -> None:
        """Ends an open episode."""
        self._opened[self.open.pop(key)] -= 1


def own_shards(engine: Engine) -> list[int]:
    """The shards of this process."""
    return [i for i, owner in enumerate(engine.shard_owners) if owner == jax.process_index()]


def queue_of(engine: Engine, requests: Mapping[int, EpisodeRequest]) -> EpisodeQueue:
    """The queue of this process's requests; its shards divide the room for open conversations.

    Args:
      requests: of all processes, dealt, by their keys.
    """
    own = own_shards(engine)
    queue = EpisodeQueue(own, engine.concurrency // len(own))
    for key, request in requests.items():
        if request.shard in own:
            queue.add(key, request.shard)
    return queue


def deal_requests(
    requests: Sequence[EpisodeRequest], engine: Engine, *, forks: bool
) -> list[EpisodeRequest]:
    """The requests of a collection, each with its shard.

    Args:
      forks: whether they are the roots of trees.
    """
    groups = [request.group for request in requests]
    shard_N = deal(groups, engine.shard_owners, whole=forks)
    return [replace(each, shard=i) for each, i in zip(requests, shard_N, strict=True)]


def deal_more(requests: Sequence[EpisodeRequest], queue: EpisodeQueue) -> list[EpisodeRequest]:
    """Further requests of a process for its queue, each with its shard; see `deal_beside`."""
    if not requests:
        return []
    loads = queue.loads
    shards = list(loads)
    dealt = deal_beside([request.group for request in requests], list(loads.values()))
    return [replace(each, shard=shards[i]) for each, i in zip(requests, dealt, strict=True)]
