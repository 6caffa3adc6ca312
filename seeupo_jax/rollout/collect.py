"""Policy and episodes together: tasks in, trajectories out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax.parallel.distributed import gather
from seeupo_jax.rollout.collection import Collection
from seeupo_jax.rollout.engine.protocol import Engine
from seeupo_jax.rollout.episode import EpisodeRequest
from seeupo_jax.rollout.episode_queue import deal_requests, queue_of
from seeupo_jax.rollout.player import CollectionOptions, Prefetched, RolloutWorker
from seeupo_jax.trajectories.forks import new_turns
from seeupo_jax.types import UNKNOWN_VERSION, Segment, Trajectory


@dataclass(frozen=True)
class Collected:
    """The trajectories of a collection, and its cost.

    wall_s: seconds in all. environment_s: seconds of waiting for environments alone; reset_s: of
      these, those with an environment that had not begun. reward_s: seconds of waiting for reward
      functions alone.
    sampled_tokens, context_tokens: each token once; a rewritten context counts in each segment.
    usage: the engine's counts.
    rounds: of sampling; all counts are sums over them.
    seconds: device seconds by name, if the engine reports them.
    left_out: trajectories of these rounds that are not used; groups are numbered as in their round.
    """

    trajectories: tuple[Trajectory, ...]
    wall_s: float
    environment_s: float
    sampled_tokens: int
    context_tokens: int
    usage: Mapping[str, int] = field(default_factory=dict)
    rounds: int = 1
    left_out: tuple[Trajectory, ...] = ()
    reset_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    reward_s: float = 0.0

    @property
    def sampled(self) -> tuple[Trajectory, ...]:
        """The trajectories of all rounds."""
        return self.trajectories + self.left_out


def group_requests(
    task_ids: Sequence[str], group_size: int, iteration: int
) -> list[EpisodeRequest]:
    """`group_size` requests a task for an iteration; the group is the task's index.

    Members of a task that comes again count on, so that its groups have random numbers of their
    own: they begin in the same state and are sampled independently.
    """
    requests, occurrences = [], Counter[str]()
    for group, task_id in enumerate(task_ids):
        first = group_size * occurrences[task_id]
        occurrences[task_id] += 1
        requests += [
            EpisodeRequest(task_id, group, first + member, iteration=iteration)
            for member in range(group_size)
        ]
    return requests


def prefetch(
    worker: RolloutWorker,
    requests: Sequence[EpisodeRequest],
    options: CollectionOptions,
    max_idle_s: float,
) -> Prefetched | None:
    """Begins the first episodes of the next collection, whose `options` these are, without waiting.

    None where the host's episodes cannot begin before their collection; see `Host.prefetch`.
    """
    engine = worker.engine
    requests = deal_requests(requests, engine, forks=options.forks is not None)
    queue = queue_of(engine, dict(enumerate(requests)))
    first = [requests[key] for key in iter(queue.next, None)]
    return worker.host.prefetch(worker, first, options, max_idle_s)


def collect(
    worker: RolloutWorker,
    params: Any,
    requests: Sequence[EpisodeRequest],
    options: CollectionOptions,
    *,
    prefetched: Prefetched | None = None,
    on_finished: Callable[[EpisodeRequest, Trajectory], None] = lambda *_: None,
) -> Collected:
    """Samples one trajectory per request, as many at a time as the engine and the host allow.

    With `options.forks` the requests are the roots of trees, and each branch adds a trajectory.
    With several processes each plays the conversations that are dealt to its shards; all return all
    trajectories.

    Args:
      prefetched: the result of `prefetch` for these requests and options, if it was called.
      on_finished: receives every trajectory of this process as soon as it is finished.

    Raises:
      Stopped: a process was asked to stop.
    """
    began, engine = time.perf_counter(), worker.engine
    engine.begin(
        params,
        seed=options.seed,
        temperature=options.temperature,
        version=UNKNOWN_VERSION if options.policy_version is None else options.policy_version,
    )
    collection = Collection(worker, requests, options, on_finished)
    if prefetched is not None:
        collection.adopt(prefetched)
    with worker.watch.on(collection.activity):
        collection.run()
    return _gather(collection, engine, began)


def count_tokens(trajectories: Iterable[Trajectory]) -> tuple[int, int]:
    """The sampled tokens and the others, those that branches share once."""
    turns = [turn_L for trajectory in trajectories for turn_L in new_turns(trajectory)]
    sampled = sum(int((turn_L >= 0).sum()) for turn_L in turns)
    return sampled, sum(map(len, turns)) - sampled


def _gather(collection: Collection, engine: Engine, began: float) -> Collected:
    """Gathers the trajectories and costs of all processes, timed since `began`."""
    finished: dict[int, Trajectory] = {}
    usage: Counter[str] = Counter()
    waits = []
    waited = (collection.environment_s, collection.reset_s, collection.reward_s)
    forks = {} if collection.forks is None else collection.forks.usage()
    local = (collection.finished, waited, {**engine.usage(), **forks})
    for trajectories, seconds, used in gather(local, Trajectory, Segment):
        finished |= trajectories
        usage.update(used)
        waits.append(seconds)
    ordered = tuple(finished[key] for key in sorted(finished))
    sampled, context = count_tokens(ordered)
    wall_s = time.perf_counter() - began
    environment_s, reset_s, reward_s = map(max, zip(*waits, strict=True))
    return Collected(
        ordered,
        wall_s,
        environment_s,
        sampled,
        context,
        usage,
        reset_s=reset_s,
        seconds=engine.seconds(),
        reward_s=reward_s,
    )
