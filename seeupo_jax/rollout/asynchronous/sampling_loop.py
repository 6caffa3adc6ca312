"""The loop of a process or thread that samples for a trainer: it plays tickets, swaps policies."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.rollout.asynchronous.work import (
    FinishedMember,
    PublishedPolicy,
    Ticket,
    WorkSource,
)
from seeupo_jax.rollout.collection import Collection
from seeupo_jax.rollout.engine.protocol import Engine
from seeupo_jax.rollout.episode import EpisodeRequest
from seeupo_jax.rollout.feed import FEED_POLL_S
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker
from seeupo_jax.rollout.resample import collection_number
from seeupo_jax.types import Trajectory

# Of delivered usage: seconds of waiting, as of `Collected`; all else is the engine's.
WAITS = ("environment_s", "reset_s", "reward_s")
# Of delivered usage: seconds between deliveries; of these, those without anything to play.
WALL_S, IDLE_S = "wall_s", "idle_s"


class SampledPolicy(NamedTuple):
    """The policy that a loop samples with: sweeps behind it, and when it came, `monotonic`."""

    version: int
    since: float


class SamplingLoop:
    """Plays the tickets of a source with its newest policy until the run is over.

    A ticket begins when a conversation may be opened and when the policy is one that may sample it:
    one that at most `max_lag` sweeps follow before the ticket's iteration is trained on. A newer
    policy replaces the one in use between two dispatches. Where no conversation is open then, the
    engine begins anew with it, so with `max_lag` 0 each iteration is played as by `collect`.

    Args:
      worker: plays all conversations; nothing else uses its engine and host meanwhile. Its `stop`
        ends the loop.
      source: of the tickets and policies; its methods are called between dispatches.
      seed: of the run. max_lag: as of `rollout.max_lag`.
      prepare: called once with the first policy's parameters, as to compile programs.

    Attributes:
      policy: that is in use; None before the first. Any thread may read it.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        source: WorkSource,
        *,
        seed: int,
        max_lag: int,
        prepare: Callable[[Any], None] = lambda params: None,
    ):
        stop = worker.stop
        self._worker = replace(worker, stop=lambda: stop() or source.closed)
        self._asked, self._source, self._engine = stop, source, worker.engine
        self._seed, self._max_lag, self._prepare = seed, max_lag, prepare
        self._next: PublishedPolicy | None = None  # that begins once nothing is open
        self._held: list[Ticket] = []  # leased, and not begun
        self._lease_at = 0.0  # when to ask for tickets again
        self._open = 0  # conversations that have begun, or wait in the collection
        self._finished: list[FinishedMember] = []  # to be delivered
        self._usage = _Usage()
        self._collection: Collection | None = None
        self.policy: SampledPolicy | None = None

    def run(self) -> None:
        """Returns when the run is over.

        Raises:
          Stopped: the worker was asked to stop. Finished conversations are delivered; the others
            are dropped.
        """
        with self._engine.one_policy():
            while not self._source.closed:
                if self._asked():
                    raise Stopped
                if self._next is None:
                    self._next = self._source.newer_policy(None)
                if self._next is None:
                    self._usage.idle(FEED_POLL_S)
                    continue
                if self.policy is None:
                    self._prepare(self._next.params)
                self._play(self._next)

    def more(self, room: int, wait_s: float) -> Sequence[EpisodeRequest]:
        """As of `Feed`: delivers, leases and swaps; the requests of tickets that may begin."""
        self._deliver()
        self._lease(room)
        self._take_policy()
        begun = [ticket for ticket in self._held if self._may_begin(ticket)]
        requests = [request for ticket in begun for request in _requests_of(ticket)]
        self._held = [ticket for ticket in self._held if ticket not in begun]
        self._open += len(requests)
        if wait_s and not (requests or self.ended):
            self._usage.idle(wait_s)
        return requests

    @property
    def ended(self) -> bool:
        """As of `Feed`: whether the next policy waits for the engine to begin anew with it."""
        return self._next is not None

    @property
    def version(self) -> int | None:
        """As of `Feed`."""
        return None if self.policy is None else self.policy.version

    def _play(self, policy: PublishedPolicy) -> None:
        """Plays with a policy and those that replace it, until one comes while nothing is open."""
        self._next = None
        self._engine.begin(policy.params, seed=self._seed, version=policy.version)
        self._take_up(policy)
        del policy  # its parameters are the engine's from now on
        options = CollectionOptions(self._seed, policy_version=self.version)
        self._collection = Collection(self._worker, (), options, self._on_finished, feed=self)
        try:
            with self._worker.watch.on(self._collection.activity):
                self._collection.run()
        except Stopped:
            if self._source.closed:
                return
            self._deliver()
            raise
        self._deliver()
        self._usage.end(self._engine, self._collection)

    def _take_policy(self) -> None:
        """Takes a newer policy, if there is one."""
        policy = self._source.newer_policy(self.version)
        if policy is None:
            return
        if not self._open:
            self._next = policy
            return
        self._engine.swap(policy.params, policy.version)
        self._take_up(policy)

    def _take_up(self, policy: PublishedPolicy) -> None:
        """Notes the policy in use, and drops tickets that others have played since."""
        self.policy = SampledPolicy(policy.version, time.monotonic())
        self._held = [ticket for ticket in self._held if ticket.iteration > policy.version]

    def _may_begin(self, ticket: Ticket) -> bool:
        """Whether the policy in use may sample a ticket.

        It has not if a restarted trainer continues from an earlier checkpoint: its policy follows.
        """
        if self.policy is None or self._next is not None:
            return False
        return 0 <= ticket.iteration - 1 - self.policy.version <= self._max_lag

    def _lease(self, room: int) -> None:
        """Leases tickets for free room; a group that fits in part only may wait for the rest.

        With `rollout.deterministic` it is a whole iteration, which is then dealt at once.
        """
        rollout, held = self._worker.rollout, sum(len(ticket.members) for ticket in self._held)
        if room <= held or time.monotonic() < self._lease_at:
            return
        least = rollout.trajectories if rollout.deterministic else rollout.group_size
        tickets = self._source.lease(max(room - held, least))
        self._held += tickets
        if not tickets:
            self._lease_at = time.monotonic() + FEED_POLL_S

    def _on_finished(self, request: EpisodeRequest, trajectory: Trajectory) -> None:
        self._open -= 1
        self._finished.append(FinishedMember(request.group, request.member, trajectory))

    def _deliver(self) -> None:
        if self._finished and self._collection is not None:
            finished, self._finished = self._finished, []
            self._source.deliver(finished, self._usage.take(self._engine, self._collection))


class _Usage:
    """Counts and seconds between deliveries, over collections that follow each other."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._seen: Mapping[str, float] = {}  # of the collection under way
        self._rest = defaultdict[str, float](float)  # to be delivered

    def idle(self, wait_s: float) -> None:
        """Waits where there is nothing to play."""
        began = time.monotonic()
        time.sleep(wait_s)
        self._rest[IDLE_S] += time.monotonic() - began

    def take(self, engine: Engine, collection: Collection) -> dict[str, float]:
        """What has come since it was last taken."""
        self._add(engine, collection)
        now = time.monotonic()
        taken = {**self._rest, WALL_S: now - self._since}
        self._since, self._rest = now, defaultdict[str, float](float)
        return taken

    def end(self, engine: Engine, collection: Collection) -> None:
        """After a collection: the next one counts from 0."""
        self._add(engine, collection)
        self._seen = {}

    def _add(self, engine: Engine, collection: Collection) -> None:
        waits = {name: getattr(collection, name) for name in WAITS}
        counted = {**engine.usage(), **engine.seconds(), **waits}
        for name, number in counted.items():
            self._rest[name] += number - self._seen.get(name, 0)
        self._seen = counted


def _requests_of(ticket: Ticket) -> list[EpisodeRequest]:
    """The episodes of a ticket; each group of the run has a number of its own."""
    iteration = collection_number(ticket.iteration, 0)
    return [
        EpisodeRequest(ticket.task_id, ticket.number, member, iteration=iteration)
        for member in ticket.members
    ]
