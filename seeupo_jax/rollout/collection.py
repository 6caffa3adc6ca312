"""The loop of a collection: an engine samples actions, a player advances episodes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from seeupo_jax.configuration.role_schema import frozen_roles
from seeupo_jax.envs.validation import ProtocolError
from seeupo_jax.errors import NameTaken
from seeupo_jax.rewards.scorer import POLL_S, REWARD_FAILURE, RewardFailure, ScoringResult
from seeupo_jax.rollout.branching.candidate_plan import CandidatePlan
from seeupo_jax.rollout.branching.candidates import CandidateEngine
from seeupo_jax.rollout.branching.forking import Forks
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.episode import Episode, EpisodeRequest
from seeupo_jax.rollout.episode_queue import deal_more, deal_requests, own_shards, queue_of
from seeupo_jax.rollout.feed import FEED_POLL_S, Feed
from seeupo_jax.rollout.player import STOP_POLL_S, CollectionOptions, Prefetched, RolloutWorker
from seeupo_jax.rollout.watch import Activity
from seeupo_jax.trajectories.roles import without_frozen
from seeupo_jax.types import Trajectory


class Collection:
    """Runs a player's episodes with an engine's actions; keys number the trajectories.

    Args:
      requests: the first ones. feed: of more; None: there are no others. A collection without forks
        can have one.
      on_finished: receives every trajectory as soon as it is finished.

    Attributes:
      finished: the trajectories by key; with a feed they are not kept.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        requests: Sequence[EpisodeRequest],
        options: CollectionOptions,
        on_finished: Callable[[EpisodeRequest, Trajectory], None],
        feed: Feed | None = None,
    ):
        assert feed is None or options.forks is None
        self._candidates = _candidates(worker, options)
        if self._candidates is not None:
            worker = replace(worker, engine=self._candidates)
        self._worker, self._engine, self._rewards = worker, worker.engine, worker.rewards
        self._player = worker.host.player(worker, options)
        self._options, self._on_finished, self._feed = options, on_finished, feed
        requests = deal_requests(requests, worker.engine, forks=options.forks is not None)
        own = own_shards(worker.engine)
        local = [request for request in requests if request.shard in own]
        self.forks = None if options.forks is None else Forks(options.forks, local)
        self._requests = {self._key(i, request): request for i, request in enumerate(requests)}
        self._queue = queue_of(worker.engine, self._requests)
        self._total = len(self._queue)
        self._unscored: dict[int, Episode] = {}  # finished, without the rewards of functions
        self.finished: dict[int, Trajectory] = {}
        self._finished = self._failed = 0  # trajectories
        self._sampled = 0  # tokens of whole actions
        self.environment_s = self.reset_s = self.reward_s = 0.0

    def adopt(self, prefetched: Prefetched) -> None:
        """Opens the first episodes, which were prefetched."""
        assert prefetched.options.seed == self._options.seed
        keys = [*itertools.islice(iter(self._queue.next, None), len(prefetched.requests))]
        assert prefetched.requests == tuple(self._requests[key] for key in keys)
        self._player.adopt(keys, prefetched)

    def run(self) -> None:
        """Plays every episode; each answer is handled as soon as it arrives."""
        try:
            while (actions := self._step()) is not None:
                for action in actions:
                    self._sampled += 0 if action.failure else len(action.tokens)
                    self._player.act(action)
        finally:
            self._player.close()
            if self.forks is not None:
                self.forks.close()

    def activity(self) -> Activity:
        """The progress so far; any thread may call this."""
        return Activity(
            total=self._total,
            active=len(self._queue.open) + len(self._unscored),
            stepping=self._player.stepping,
            finished=self._finished,
            failed=self._failed,
            tokens=self._engine.usage().get("decoded_tokens", self._sampled),
            slowest=self._player.slowest,
        )

    def _step(self) -> Sequence[Action] | None:
        """Advances every episode that can; returns newly sampled actions, None at the end."""
        self._take_more()
        while self._player.room and (key := self._queue.next()) is not None:
            self._player.open(key, self._requests[key])
        self._poll_player()
        self._poll_rewards()
        unfinished = self._unfinished or (self._feed is not None and not self._feed.ended)
        actions = self._engine.step(unfinished, self._worker.stop())
        if self._candidates is not None:
            self.reward_s += self._candidates.take_waited_s()
        return actions

    @property
    def _unfinished(self) -> bool:
        """Whether episodes are open, wait to begin or wait for their rewards."""
        return bool(self._queue.open or self._queue or self._unscored)

    def _take_more(self) -> None:
        """Adds the requests that its feed has now."""
        if self._feed is None:
            return
        room = self._player.room - len(self._queue)
        more = self._feed.more(room, 0.0 if self._unfinished else self._wait_s())
        for key, request in enumerate(deal_more(more, self._queue), self._total):
            self._requests[key] = request
            self._queue.add(key, request.shard)
        self._total += len(more)

    def _key(self, index: int, request: EpisodeRequest) -> int:
        """A request's key: its index or, with forks, one that any process gives it."""
        return index if self.forks is None else self.forks.key(request)

    def _poll_player(self) -> None:
        idle = not self._engine.busy
        resetting = idle and self._player.beginning
        began, waits_s = time.perf_counter(), self._wait_s()
        if self._unscored:
            waits_s = min(waits_s, POLL_S)
        over = self._player.poll(waits_s if idle and self._queue.open else 0.0)
        waited = time.perf_counter() - began if idle else 0.0
        self.environment_s += waited
        self.reset_s += waited if resetting else 0.0
        for key, episode in over:
            self._queue.close(key)
            if self._rewards.functions and not episode.failed:
                self._unscored[key] = episode
                self._rewards.submit(key, episode.view(self._options.split))
            else:
                self._finish(key, episode)

    def _poll_rewards(self) -> None:
        if not self._unscored:
            return
        idle = not (self._engine.busy or self._queue.open or self._queue)
        began, max_reward = time.perf_counter(), self._worker.env.max_reward
        # The order in which episodes finish decides when their branches begin.
        waits = self.forks is not None and self._worker.rollout.deterministic
        scored = self._rewards.poll(max_reward, self._wait_s() if idle else 0.0)
        while waits and self._rewards.open and not self._worker.stop():
            scored += self._rewards.poll(max_reward, STOP_POLL_S)
        self.reward_s += time.perf_counter() - began if idle or waits else 0.0
        for key, answer in sorted(scored):
            episode = self._unscored.pop(key)
            self._take_scored(episode, answer)
            self._finish(key, episode)

    def _wait_s(self) -> float:
        """How long to wait at most where there is nothing else to do."""
        wait_s, interval_s = STOP_POLL_S, self._engine.poll_interval_s
        if self._feed is not None and not self._feed.ended:
            wait_s = FEED_POLL_S
        return wait_s if interval_s is None else min(wait_s, interval_s)

    def _take_scored(self, episode: Episode, scored: ScoringResult) -> None:
        """Adds the rewards of the reward functions to an episode, or fails it.

        Raises:
          NameTaken: the environment, or the agent, uses the name of a function for a reward.
        """
        failure = scored.failure
        for name in scored.rewards.keys() & episode.ledger.named.keys():
            raise NameTaken(
                f"config.rewards: got a function named {name!r}, and task"
                f" {episode.request.task_id!r} pays a reward of that name itself; allowed: a name"
                " of its own."
            )
        if failure is None:
            try:
                earned = episode.ledger.earned
                weighted_sums = self._worker.weigh(scored.rewards, "rewards by weight", earned)
                return episode.on_scored(scored, weighted_sums)
            except ProtocolError as error:
                failure = RewardFailure("sum", "invalid", str(error))
        episode.fail("env_error", failure.reason)
        episode.info[REWARD_FAILURE] = f"{failure.name}={failure.cause}"

    def _finish(self, key: int, episode: Episode) -> None:
        """Takes a finished episode with all its rewards."""
        options, request, candidates = self._options, self._requests.pop(key), self._candidates
        weighted = bool(self._rewards.weights) or candidates is not None
        version = options.policy_version if self._feed is None else self._feed.version
        trajectory = episode.finish(options.seed, version, weighted=weighted)
        trajectory = without_frozen(trajectory, frozen_roles(self._worker.roles))
        unchosen: list[Trajectory] = []
        if candidates is not None:
            trajectory, *unchosen = candidates.finish(key, trajectory)
        self._take(key, request, trajectory)
        for each in unchosen:
            member = replace(request, member=each.info["member"])
            self._total += 1
            self._take(self.forks.key(member), member, each)
        if self.forks is not None:
            for branch in self.forks.finish(request, episode, trajectory, unchosen):
                self._requests[self.forks.key(branch)] = branch
                self._queue.add(self.forks.key(branch), branch.shard)
                self._total += 1

    def _take(self, key: int, request: EpisodeRequest, trajectory: Trajectory) -> None:
        if self._feed is None:
            self.finished[key] = trajectory
        self._finished += 1
        self._failed += trajectory.failed
        self._on_finished(request, trajectory)


def _candidates(worker: RolloutWorker, options: CollectionOptions) -> CandidateEngine | None:
    """The engine that samples and judges candidates of turns; None: the options have none."""
    if not isinstance(options.forks, CandidatePlan):
        return None
    if worker.judge is None:
        raise ValueError("a collection with candidates: got no judge; allowed: a worker with one.")
    return CandidateEngine(
        worker.engine,
        worker.judge,
        options.forks,
        seed=options.seed,
        max_reward=worker.env.max_reward,
        wait=worker.rollout.deterministic,
    )
