"""Where an iteration's trajectories come from: the disk, a sampler that runs ahead, or one now."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from seeupo_jax.build import Policy
from seeupo_jax.config import Config
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.rollout.collect import Begun, Collected, begin_ahead, collect, group_requests
from seeupo_jax.rollout.resample import collection_number, resample
from seeupo_jax.rollout.slots import SlotEngine
from seeupo_jax.rollout.store import RolloutStore
from seeupo_jax.rollout.tasks import TrainingTasks, too_few
from seeupo_jax.same_run import made_by
from seeupo_jax.telemetry.progress import Progress


class TrajectorySource:
    """The trajectories of each iteration of a run; what was sampled is stored in the background.

    With several processes each calls every method.

    Args:
      pool: its environments are used by nobody else while `of` runs, nor prefetched for the next
        iteration where an evaluation needs them.
      task_ids: of the training split.
      stop: whether this process was asked to stop.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        policy: Policy,
        engine: SlotEngine,
        pool: EnvPool,
        task_ids: Sequence[str],
        progress: Progress,
        stop: Callable[[], bool],
    ):
        self._config, self._policy, self._engine, self._pool = config, policy, engine, pool
        self._progress, self._stop = progress, stop
        if (sentence := too_few(len(task_ids), config.rollout.tasks)) is not None:
            progress.log(sentence)
        self._tasks = TrainingTasks(task_ids, count=config.rollout.tasks, seed=config.seed)
        self._store = RolloutStore(workdir / "rollouts", log=progress.log)
        self._made_by = made_by(config)
        self._sampler = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._ahead: Future[Collected] | None = None  # the next iteration's trajectories
        self._begun: Begun | None = None  # or, of these, the environments that have begun

    def of(self, iteration: int, params: Any, *, saves: bool, evaluates: bool) -> Collected:
        """The iteration's trajectories; the next one is prepared meanwhile and in the sweep.

        They are stored in the background: a run that is killed in a sweep repeats the sweep only.
        Of the next iteration the environments begin, or with `rollout_ahead` all of it is sampled;
        but an iteration after a checkpoint or an evaluation is sampled in its turn, by the policy
        that is trained on it, so that a resumed run does just what the first one did.

        Args:
          params: of the policy as the iteration begins, those that train.
          saves, evaluates: whether a checkpoint or an evaluation follows the iteration.

        Raises:
          Stopped: the run was asked to stop.
        """
        collected = self.stored(iteration)
        stored = collected is not None
        if stored:
            self._drop_begun()
        else:
            ahead, self._ahead = self._ahead, None
            collected = self._sample(iteration, params) if ahead is None else ahead.result()
            self._store.save(iteration, collected, self._made_by)
        rollout = self._config.rollout
        if self._config.rollout_ahead and not (evaluates or saves):
            copied = jax.tree.map(jnp.copy, params)  # the sweep donates the state
            self._ahead = self._sampler.submit(self._sample, iteration + 1, copied, iteration - 1)
        # Evaluations play in the same environments; and where these trajectories were stored, so
        # are most likely the next ones.
        elif rollout.reset_ahead_s and not (evaluates or stored):
            requests = group_requests(self._tasks.of(iteration + 1), rollout.group_size)
            self._begun = begin_ahead(
                self._engine,
                self._pool,
                self._policy.tokenizer,
                requests,
                seed=self._config.seed,
                patience_s=rollout.reset_ahead_s,
            )
        return collected

    def stored(self, iteration: int) -> Collected | None:
        """The trajectories that an earlier life of the run stored; None where there are none."""
        return self._store.load(iteration, self._made_by)

    def wait(self) -> None:
        """Returns when what was sampled is on the disk."""
        self._store.wait()

    def forget(self, up_to_iteration: int) -> None:
        """Removes what is stored of all iterations up to this one."""
        self._store.forget(up_to_iteration)

    def close(self) -> None:
        """Finishes what is being written and what is being sampled."""
        with contextlib.ExitStack() as parts:
            parts.callback(self._store.close)
            parts.callback(self._sampler.shutdown)

    def _drop_begun(self) -> None:
        """Leaves environments alone that have begun for trajectories which are there already."""
        if self._begun is not None:
            self._begun = None
            self._pool.drain()

    def _sample(self, iteration: int, params: Any, version: int | None = None) -> Collected:
        config = self._config
        begun, self._begun = self._begun, None

        def sample(round: int, tasks: Sequence[str]) -> Collected:
            collected = collect(
                self._engine,
                self._pool,
                self._policy.tokenizer,
                self._policy.whole(params),
                group_requests(tasks, config.rollout.group_size),
                max_turns=config.rollout.max_turns,
                seed=config.seed,
                iteration=collection_number(iteration, round),
                policy_version=iteration - 1 if version is None else version,
                deterministic=config.rollout.deterministic,
                stop=self._stop,
                begun=begun if round == 0 else None,
                watch=self._progress.watch,
            )
            return dataclasses.replace(collected, seconds=self._engine.clock.seconds)

        tasks, others = self._tasks.of(iteration), self._tasks.others(iteration)
        with jax.set_mesh(self._policy.mesh):  # of this thread
            return resample(sample, tasks, others, rounds=config.algorithm.dynamic_sampling)
