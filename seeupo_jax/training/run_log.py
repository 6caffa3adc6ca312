"""The logs of a run: metrics, times, trajectories, trackers; process 0 writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.evaluation.evaluation import Labels
from seeupo_jax.metrics.metrics_log import MetricsWriter
from seeupo_jax.metrics.run_manifest import Launch
from seeupo_jax.metrics.samples import histograms_of, samples_of
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import (
    most_frequent_failure,
    rewritten_episodes,
    rollout_metrics,
    truncation,
    unpaid_rewards,
)
from seeupo_jax.training.phase_times import PhaseTimes
from seeupo_jax.training.run_description import write_description
from seeupo_jax.trajectories.reader import TRAIN, TrajectoryFile, evaluation_label
from seeupo_jax.trajectories.trajectory_record import TokenTexts
from seeupo_jax.trajectories.trajectory_writer import TrajectoryWriter
from seeupo_jax.types import Trajectory, TrajectoryStats


class RunLog:
    """The files that are written, and an iteration's costs so far; close it in the end."""

    def __init__(
        self, config: Config, workdir: Path, progress: ProgressDisplay, tokenizer: Tokenizer
    ):
        telemetry = config.telemetry
        self._config, self._workdir, self._progress = config, workdir, progress
        self._tokenizer, self._warned_of_segments = tokenizer, False
        self._writes = jax.process_index() == 0
        self._metrics = MetricsWriter(workdir, telemetry.trackers, log=progress.log)
        self._times = PhaseTimes(progress)
        self.phase, self.timed, self.spent = self._times.phase, self._times.timed, self._times.spent
        self.counted, self.apart = self._times.counted, self._times.apart
        self._trajectories = TrajectoryWriter(
            workdir,
            texts=TokenTexts(tokenizer.token_bytes),
            share=telemetry.trajectory_share,
            mib=telemetry.trajectory_mib,
            seed=config.seed,
            log=progress.log,
        )

    def wait(self) -> None:
        """Returns when the trajectories so far are on the disk, or were reported as lost."""
        self._trajectories.wait()

    def close(self) -> None:
        """Finishes what is being written."""
        with contextlib.ExitStack() as parts:  # all are closed, even where one of them fails
            for part in (self._metrics, self._trajectories):
                parts.callback(part.close)

    def resume_from(self, iteration: int) -> None:
        """Forgets what is of this and later iterations, and opens the trackers.

        Raises:
          ValueError: a tracker that cannot begin.
        """
        if self._writes:
            self._metrics.resume_from(iteration)
            self._trajectories.resume_from(iteration)
            self._metrics.open()

    def describe(
        self, launch: Launch, policy: Policy, params: Any, *, resumes: tuple[int, bool] | None
    ) -> None:
        """Leaves in WORKDIR/run.json how the run was begun, and with what; logs what changed.

        Args:
          resumes: as of `write_run_manifest`.
        """
        if self._writes:
            changed = write_description(
                self._workdir, self._config, launch, policy, params, resumes=resumes
            )
            if changed is not None:
                self._progress.log(changed)

    def iteration(
        self,
        iteration: int,
        collected: Collected,
        stats: Sequence[TrajectoryStats | None],
        labels: Labels,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Writes and shows an iteration: its metrics, which it returns, and its trajectories.

        Args:
          stats: of each trajectory. labels: of the tasks. more: metrics.
        """
        spent = self._times.take()
        algorithm = self._config.algorithm
        values = rollout_metrics(
            collected,
            labels,
            grouped=algorithm.grouped,
            weights=self._config.compared_weights,
            by_turn=algorithm.by_turn,
            centred=algorithm.keeps_statistics,
        )
        values |= dict(more) | spent
        if self._writes:
            shard = TrajectoryFile(iteration, TRAIN, evaluation=False)
            self._trajectories.write(shard, collected.trajectories, labels, stats)
            if self._trajectories.removed:
                values["telemetry/shards_removed"] = self._trajectories.removed
            self._metrics.write(iteration, values)
            samples = samples_of(collected.trajectories, TRAIN)
            self._metrics.draw(iteration, histograms_of(stats), samples)
        self._progress.iteration(iteration, values)
        max_context = self._config.rollout.max_context
        for trouble in (
            most_frequent_failure(collected),
            unpaid_rewards(collected, self._config.rewards),
            truncation(collected, max_context),
            self._rewritten(collected),
        ):
            if trouble is not None:
                self._progress.log(f"iteration {iteration}: {trouble}")
        return values

    def _rewritten(self, collected: Collected) -> str | None:
        """A warning that every turn is a segment of its own, the first time that it is due."""
        if self._warned_of_segments:
            return None
        counts = rewritten_episodes(collected)
        warning = counts.warning("episodes", self._tokenizer.why_rewritten)
        self._warned_of_segments = warning is not None
        return warning

    def episodes(
        self, iteration: int, split: str, trajectories: Sequence[Trajectory], labels: Labels
    ) -> None:
        """Keeps what was played in an evaluation after an iteration."""
        if self._writes:
            self._trajectories.write(
                TrajectoryFile(iteration, split, evaluation=True), trajectories, labels
            )
            self._metrics.draw(iteration, {}, samples_of(trajectories, evaluation_label(split)))

    def evaluation(self, iteration: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Writes, shows and returns an evaluation's metrics."""
        values = dict(values)
        if self._writes:
            self._metrics.write(iteration, values)
        self._progress.evaluation(iteration, values)
        return values
