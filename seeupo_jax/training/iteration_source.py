"""What all sources of an iteration's trajectories share: its tasks, and what is stored of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seeupo_jax.configuration.rules.asynchronous_rules import lag_note
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import TaskShare
from seeupo_jax.parallel.compiling import Between
from seeupo_jax.parallel.fingerprint import fingerprint
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.resume_check import sampling_hash
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.curriculum import TaskSuccess
from seeupo_jax.rollout.engine.sampling import quantization_note, truncation_note
from seeupo_jax.rollout.rollout_store import RolloutStore
from seeupo_jax.rollout.task_draw import draw_tasks, repeats


class SamplingOrigin(NamedTuple):
    """Fingerprints of the parameters that sampled an iteration, and of those its sweep began with.

    sampled_by: one fingerprint where only those of the sweep sampled; else as of `join_origins`.
    """

    sampled_by: str
    swept: str


class StoppedTrajectories(NamedTuple):
    """Trajectories of a sweep that was stopped, and their origin."""

    collected: Collected
    origin: SamplingOrigin


class IterationSource:
    """The trajectories of each iteration of a run; what was sampled is stored in the background.

    With several processes each calls every method.

    Args:
      shares: the tasks of the training split.

    Attributes:
      success: of each task; None without a curriculum.
      metrics: of how the latest iteration's trajectories came about.
      origin: of the latest trajectories.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        policy: Policy,
        shares: Sequence[TaskShare],
        log: Callable[[str], None],
    ):
        self._config, self._policy, self._log = config, policy, log
        drawn = {name: vars(config.rollout)[name] for name in ("top_k", "top_p", "grammar")}
        drawn |= {"constraints": config.agent.constraints}
        rounded = quantization_note(
            config.rollout.quantize, config.algorithm.importance, ahead=config.rollout.max_lag > 0
        )
        lagging = lag_note(config)
        drawn_from = truncation_note(**drawn)
        for note in (*repeats(shares, config.rollout.tasks), drawn_from, rounded, lagging):
            if note is not None:
                log(note)
        by_success = config.curriculum.by != "none"
        self.success = TaskSuccess(config.curriculum) if by_success else None
        self.metrics: dict[str, float] = {}
        self._tasks = draw_tasks(
            shares, count=config.rollout.tasks, seed=config.seed, success=self.success
        )
        self._store = RolloutStore(workdir / "rollouts", log=log)
        self._made_by = sampling_hash(config)
        self.origin: SamplingOrigin | None = None

    def compile(self, params: Any) -> None:
        """Compiles the fingerprint of the parameters."""
        self._fingerprint(params)

    def compile_samplers(self, params: Any, between: Between) -> None:
        """Compiles what samplers of this source run in this process, if it has any.

        Args:
          between: as of `compile_all`.
        """

    def of(
        self,
        iteration: int,
        params: Any,
        *,
        evaluates: bool,
        stopped: StoppedTrajectories | None = None,
    ) -> Collected:
        """The iteration's trajectories.

        Args:
          params: of the policy as the iteration begins, those that train.
          evaluates: whether an evaluation follows the iteration.
          stopped: the trajectories of its stopped sweep, which continues from `params`.

        Raises:
          Stopped: the run was asked to stop.
        """
        raise NotImplementedError

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

    def finish(self) -> None:
        """The run is over: nothing more will be sampled."""

    def close(self) -> None:
        """Finishes what is being written."""
        self._store.close()

    def state(self, done: int) -> dict[str, Any]:
        """What a checkpoint after iteration `done` has to note, for `restore`."""
        return {} if self.success is None else {"task_success": self.success.state(done)}

    def restore(self, done: int, notes: Mapping[str, Any]) -> None:
        """Takes the notes of a checkpoint after iteration `done`."""
        if self.success is not None:
            self.success.restore(done, notes["task_success"])

    def _fingerprint(self, params: Any) -> str:
        return fingerprint(self._policy.merged(params))

    def _observe(self, iteration: int, collected: Collected) -> None:
        """Counts the tasks' success, before the next iteration's tasks are drawn."""
        if self.success is not None:
            self.metrics = self.metrics | self.success.metrics(collected.sampled)
            self.success.observe(iteration, collected.sampled)
