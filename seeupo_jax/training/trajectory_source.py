"""Where an iteration's trajectories come from: the disk, or the policy that trains on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import TaskShare
from seeupo_jax.parallel.fingerprint import fingerprint
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.resume_check import sampling_hash
from seeupo_jax.rollout.branching.plans import make_plan, root_requests
from seeupo_jax.rollout.collect import Collected, collect, group_requests, prefetch
from seeupo_jax.rollout.curriculum import TaskSuccess
from seeupo_jax.rollout.engine.sampling import quantization_note, truncation_note
from seeupo_jax.rollout.episode import EpisodeRequest
from seeupo_jax.rollout.player import CollectionOptions, Prefetched, RolloutWorker
from seeupo_jax.rollout.resample import collection_number, resample
from seeupo_jax.rollout.rollout_store import RolloutStore
from seeupo_jax.rollout.task_draw import draw_tasks, repeats


class SamplingOrigin(NamedTuple):
    """Fingerprints of the parameters that sampled an iteration, and of those its sweep began with.

    They differ where an earlier policy sampled.
    """

    sampled_by: str
    swept: str


class StoppedTrajectories(NamedTuple):
    """Trajectories of a sweep that was stopped, and their origin."""

    collected: Collected
    origin: SamplingOrigin


class TrajectorySource:
    """The trajectories of each iteration of a run; what was sampled is stored in the background.

    With several processes each calls every method.

    Args:
      worker: its environments are used by nothing else while `of` runs, nor
        prefetched for the next iteration where an evaluation needs them.
      shares: the tasks of the training split.

    Attributes:
      success: of each task; None without a curriculum.
      drawn: metrics of the latest iteration's tasks; empty without a curriculum.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        policy: Policy,
        worker: RolloutWorker,
        shares: Sequence[TaskShare],
        log: Callable[[str], None],
    ):
        self._config, self._policy, self._worker, self._log = config, policy, worker, log
        drawn = {name: vars(config.rollout)[name] for name in ("top_k", "top_p", "grammar")}
        drawn |= {"constraints": config.agent.constraints}
        rounded = quantization_note(
            config.rollout.quantize, config.algorithm.importance, ahead=config.rollout.max_lag > 0
        )
        for note in (*repeats(shares, config.rollout.tasks), truncation_note(**drawn), rounded):
            if note is not None:
                log(note)
        by_success = config.curriculum.by != "none"
        self.success = TaskSuccess(config.curriculum) if by_success else None
        self.drawn: dict[str, float] = {}
        self._tasks = draw_tasks(
            shares, count=config.rollout.tasks, seed=config.seed, success=self.success
        )
        self._store = RolloutStore(workdir / "rollouts", log=log)
        self._made_by, self._forks = sampling_hash(config), make_plan(config)
        self._prefetched: Prefetched | None = None  # environments of the next iteration
        self.origin: SamplingOrigin | None = None  # of the latest trajectories

    def compile(self, params: Any) -> None:
        """Compiles the fingerprint of the parameters."""
        self._fingerprint(params)

    def of(
        self,
        iteration: int,
        params: Any,
        *,
        evaluates: bool,
        stopped: StoppedTrajectories | None = None,
    ) -> Collected:
        """The iteration's trajectories, stored in the background.

        Meanwhile the environments of the next one begin, unless an evaluation needs them.

        Args:
          params: of the policy as the iteration begins, those that train.
          evaluates: whether an evaluation follows the iteration.
          stopped: the trajectories of its stopped sweep, which continues from `params`.

        Raises:
          Stopped: the run was asked to stop.
        """
        if stopped is not None:
            collected, stored, self.origin = stopped.collected, True, stopped.origin
        else:
            collected, stored = self._next(iteration, params)
        if self.success is not None:  # before the next iteration's tasks are drawn
            self.drawn = self.success.metrics(collected.sampled)
            self.success.observe(iteration, collected.sampled)
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

    def stored(self, iteration: int, origin: SamplingOrigin) -> StoppedTrajectories | None:
        """The trajectories of a sweep that was stopped; None where they are not there."""
        collected = self._store.load(iteration, self._made_by, origin.sampled_by)
        return None if collected is None else StoppedTrajectories(collected, origin)

    def wait(self) -> None:
        """Returns when what was sampled is on the disk."""
        self._store.wait()

    def forget(self, up_to_iteration: int) -> None:
        """Removes what is stored of all iterations up to this one."""
        self._store.forget(up_to_iteration)

    def close(self) -> None:
        """Finishes what is being written."""
        self._store.close()

    def _fingerprint(self, params: Any) -> str:
        return fingerprint(self._policy.merged(params))

    def _next(self, iteration: int, params: Any) -> tuple[Collected, bool]:
        """The trajectories of an iteration that begins, and whether they were stored."""
        swept = self._fingerprint(params)
        self.origin = SamplingOrigin(swept, swept)
        collected = self._store.load(iteration, self._made_by, swept)
        if collected is not None:
            return collected, True
        collected = self._sample(iteration, params)
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
