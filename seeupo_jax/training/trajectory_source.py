"""Where an iteration's trajectories come from: the disk, a sampler that runs ahead, or one now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.checkpoint import Checkpoints, find_directory
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

    They differ where the iteration was sampled ahead.
    """

    sampled_by: str
    swept: str


class StoppedTrajectories(NamedTuple):
    """Trajectories of a sweep that was stopped, and their origin."""

    collected: Collected
    origin: SamplingOrigin


class _Ahead(NamedTuple):
    """The next iteration, sampled while one is swept; by parameters with so many sweeps behind."""

    iteration: int
    params: Any
    sampled_by: str
    version: int
    sampled: Future[tuple[Collected, bool]]


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
            config.rollout.quantize, config.algorithm.importance, ahead=bool(config.rollout_ahead)
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
        self._sampler = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._ahead: _Ahead | None = None
        self._prefetched: Prefetched | None = None  # environments of the next iteration
        # What was sampling ahead when the run was stopped: nothing else holds these parameters.
        folder = f"{find_directory(config.checkpoint, workdir)}/ahead"
        self._samplers = Checkpoints(folder, 1, 0, log=log)
        self.origin: SamplingOrigin | None = None  # of the latest trajectories

    def compile(self, params: Any) -> None:
        """Compiles the fingerprint of the parameters."""
        self._fingerprint(params)

    def of(
        self,
        iteration: int,
        params: Any,
        *,
        saves: bool,
        evaluates: bool,
        stopped: StoppedTrajectories | None = None,
    ) -> Collected:
        """The iteration's trajectories, stored in the background; meanwhile the next one begins.

        Its environments begin or, with `rollout_ahead`, all of it is sampled; but an iteration
        after a checkpoint or an evaluation is sampled in its turn, by the policy that is trained on
        it, so that a resumed run does just what the first one did.

        Args:
          params: of the policy as the iteration begins, those that train.
          saves, evaluates: whether a checkpoint or an evaluation follows the iteration.
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
        if self._config.rollout_ahead and not (evaluates or saves):
            self._sample_ahead(iteration, params, in_sweep=stopped is not None)
        # Evaluations play in the same environments; where these trajectories were stored, the next
        # ones probably are too.
        elif rollout.reset_ahead_s and not (evaluates or stored):
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

    def save_ahead(self) -> None:
        """Saves the parameters that sample ahead: a resumed run continues with them."""
        if self._ahead is not None:
            notes = {"sampled_by": self._ahead.sampled_by, "version": self._ahead.version}
            self._samplers.save(self._ahead.iteration, self._ahead.params, notes)
            self._samplers.wait()

    def forget(self, up_to_iteration: int) -> None:
        """Removes what is stored of all iterations up to this one."""
        self._store.forget(up_to_iteration)
        saved = self._samplers.latest()
        if saved is not None and saved <= up_to_iteration and jax.process_index() == 0:
            self._samplers.clear()

    def close(self) -> None:
        """Finishes what is being written and what is being sampled."""
        with contextlib.ExitStack() as parts:
            for part in (self._store, self._samplers):
                parts.callback(part.close)
            parts.callback(self._sampler.shutdown)

    def _fingerprint(self, params: Any) -> str:
        return fingerprint(self._policy.merged(params))

    def _next(self, iteration: int, params: Any) -> tuple[Collected, bool]:
        """The trajectories of an iteration that begins, and whether they were stored."""
        swept = self._fingerprint(params)
        if self._ahead is None and self._config.rollout_ahead:
            self._ahead = self._resume_ahead(iteration, params)
        if self._ahead is None:
            self.origin = SamplingOrigin(swept, swept)
            return self._load_or_sample(iteration, params, swept, iteration - 1)
        sampled = self._ahead.sampled.result()
        self.origin, self._ahead = SamplingOrigin(self._ahead.sampled_by, swept), None
        return sampled

    def _load_or_sample(
        self, iteration: int, params: Any, sampled_by: str, version: int
    ) -> tuple[Collected, bool]:
        """Trajectories of these parameters, stored now if they were not; and whether they were."""
        collected = self._store.load(iteration, self._made_by, sampled_by)
        if collected is not None:
            return collected, True
        collected = self._sample(iteration, params, version)
        self._store.save(iteration, collected, self._made_by, sampled_by)
        return collected, False

    def _sample_ahead(self, iteration: int, params: Any, *, in_sweep: bool) -> None:
        """Begins to sample the next iteration with the parameters that this one begins with."""
        if not in_sweep:
            copied = jax.tree.map(jnp.copy, params)  # the sweep donates the state
            self._ahead = self._begin_ahead(
                iteration + 1, copied, self.origin.swept, version=iteration - 1
            )
            return
        self._ahead = self._resume_ahead(iteration + 1, params)
        if self._ahead is None:
            self._log(
                f"iteration {iteration + 1} is not sampled ahead: the parameters that iteration"
                f" {iteration} started with are missing"
            )

    def _resume_ahead(self, iteration: int, like: Any) -> _Ahead | None:
        """Resumes sampling ahead where the run was stopped in it; `like`: other parameters."""
        if self._samplers.latest() != iteration:
            return None
        restored = self._samplers.restore(like, optional=True)
        if restored is None:
            return None
        _, params, notes = restored
        return self._begin_ahead(iteration, params, notes["sampled_by"], version=notes["version"])

    def _begin_ahead(self, iteration: int, params: Any, sampled_by: str, *, version: int) -> _Ahead:
        sampled = self._sampler.submit(self._load_or_sample, iteration, params, sampled_by, version)
        return _Ahead(iteration, params, sampled_by, version, sampled)

    def _requests(self, tasks: Sequence[str], number: int) -> list[EpisodeRequest]:
        """The first requests of the collection of this number."""
        group_size = self._config.rollout.group_size
        return root_requests(group_requests(tasks, group_size, number), self._forks)

    def _sample(self, iteration: int, params: Any, version: int) -> Collected:
        config = self._config
        prefetched, self._prefetched = self._prefetched, None

        def sample(round: int, tasks: Sequence[str]) -> Collected:
            number = collection_number(iteration, round)
            return collect(
                self._worker,
                self._policy.merged(params),
                self._requests(tasks, number),
                CollectionOptions(config.seed, policy_version=version, forks=self._forks),
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
