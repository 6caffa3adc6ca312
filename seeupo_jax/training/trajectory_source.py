"""Where an iteration's trajectories come from: the disk, or the policy that trains on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.agents.server_pool import ServerPool
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import TaskShare
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.rollout.branching.plans import make_plan, root_requests
from seeupo_jax.rollout.collect import Collected, collect, group_requests, prefetch
from seeupo_jax.rollout.episode import EpisodeRequest
from seeupo_jax.rollout.player import CollectionOptions, Prefetched, RolloutWorker
from seeupo_jax.rollout.resample import collection_number, resample
from seeupo_jax.training.iteration_source import (
    IterationSource,
    SamplingOrigin,
    StoppedTrajectories,
)


class TrajectorySource(IterationSource):
    """Samples each iteration in its turn, with the devices that train.

    Args:
      worker: its environments are used by nothing else while `of` runs, nor
        prefetched for the next iteration where an evaluation needs them.
      shares: the tasks of the training split.
      served: the worker's engine, where servers sample.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        policy: Policy,
        worker: RolloutWorker,
        shares: Sequence[TaskShare],
        log: Callable[[str], None],
        *,
        served: ServerPool | None = None,
    ):
        super().__init__(config, workdir, policy, shares, log)
        self._worker, self._served, self._forks = worker, served, make_plan(config)
        self._prefetched: Prefetched | None = None  # environments of the next iteration

    def of(
        self,
        iteration: int,
        params: Any,
        *,
        evaluates: bool,
        stopped: StoppedTrajectories | None = None,
    ) -> Collected:
        """As of `IterationSource`.

        Meanwhile the environments of the next iteration begin, unless an evaluation needs them.
        """
        self.metrics = {}
        if stopped is not None:
            collected, stored, self.origin = stopped.collected, True, stopped.origin
        else:
            collected, stored = self._load_or_sample(iteration, params)
        self._observe(iteration, collected)
        if stored and self._prefetched is not None:  # begun for what need not be sampled
            self._prefetched = None
            self._worker.host.drain()
        rollout = self._config.rollout
        # Evaluations play in the same environments; where these trajectories were stored, the next
        # ones probably are too.
        if rollout.reset_ahead_s and not (evaluates or stored):
            tasks, number = self._tasks.of(iteration + 1), collection_number(iteration + 1, 0)
            requests, options = self._requests(tasks, number), CollectionOptions(self._config.seed)
            self._prefetched = prefetch(self._worker, requests, options, rollout.reset_ahead_s)
        return collected

    def _load_or_sample(self, iteration: int, params: Any) -> tuple[Collected, bool]:
        """The trajectories of an iteration that begins, and whether they were stored."""
        swept = self._fingerprint(params)
        self.origin = SamplingOrigin(swept, swept)
        collected = self._store.load(iteration, self._made_by, swept)
        if collected is not None:
            return collected, True
        collected = self._sample(iteration, params)
        if self._served is not None:
            self.metrics = {"rollout/servers_left_out": self._served.left_out}
        self._store.save(iteration, collected, self._made_by, swept)
        return collected, False

    def _requests(self, tasks: Sequence[str], number: int) -> list[EpisodeRequest]:
        """The first requests of the collection of this number."""
        group_size = self._config.rollout.group_size
        return root_requests(group_requests(tasks, group_size, number), self._forks)

    def _sample(self, iteration: int, params: Any) -> Collected:
        config = self._config
        prefetched, self._prefetched = self._prefetched, None

        def sample(round: int, tasks: Sequence[str]) -> Collected:
            number = collection_number(iteration, round)
            return collect(
                self._worker,
                self._policy.merged(params),
                self._requests(tasks, number),
                CollectionOptions(config.seed, policy_version=iteration - 1, forks=self._forks),
                prefetched=prefetched if round == 0 else None,
            )

        tasks, others = self._tasks.of(iteration), self._tasks.others(iteration)
        # The mesh is this thread's; all rounds are of one policy.
        with jax.set_mesh(self._policy.mesh), self._worker.engine.one_policy():
            return resample(
                sample,
                tasks,
                others,
                rounds=config.algorithm.dynamic_sampling,
                weights=config.compared_weights,
                by_turn=config.algorithm.by_turn,
                centred=config.algorithm.keeps_statistics,
            )
