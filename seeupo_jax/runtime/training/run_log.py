"""What a run leaves behind for people: metrics, times, trajectories, trackers; process 0 writes."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import Progress
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.metrics.metrics_log import MetricsWriter
from seeupo_jax.metrics.run_manifest import Launch, write_run_manifest
from seeupo_jax.metrics.samples import histograms_of, samples_of
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import (
    most_frequent_failure,
    rollout_metrics,
    truncation,
    unpaid_rewards,
)
from seeupo_jax.runtime.build import Policy
from seeupo_jax.trajectories.reader import TRAIN, Shard
from seeupo_jax.trajectories.trajectory_record import TokenTexts
from seeupo_jax.trajectories.trajectory_writer import TrajectoryWriter
from seeupo_jax.types import Trajectory, TrajectoryStats

Labels = Mapping[str, Mapping[str, str]]  # of tasks


class RunLog:
    """What is written, and what an iteration has spent so far; close it in the end."""

    def __init__(self, config: Config, workdir: Path, progress: Progress, tokenizer: Tokenizer):
        telemetry = config.telemetry
        self._config, self._workdir, self._progress = config, workdir, progress
        self._writes = jax.process_index() == 0
        self._metrics = MetricsWriter(workdir, telemetry.trackers, log=progress.log)
        self._compilations = Compilations()
        self.spent: Counter[str] = Counter()  # seconds and programs since the last iteration's line
        self._trajectories = TrajectoryWriter(
            workdir,
            texts=TokenTexts(tokenizer.token_bytes),
            share=telemetry.trajectory_share,
            mib=telemetry.trajectory_mib,
            seed=config.seed,
            log=progress.log,
        )

    def close(self) -> None:
        """Finishes what is being written."""
        with contextlib.ExitStack() as parts:  # all are closed, even where one of them fails
            for part in (self._compilations, self._metrics, self._trajectories):
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

    def describe(self, launch: Launch, policy: Policy, params: Any, *, resumed: bool) -> None:
        """Leaves in WORKDIR/run.json how the run was begun, and with what.

        Args:
          params: those that train. resumed: whether the run resumes from a checkpoint.
        """
        if not self._writes:
            return
        devices, path = policy.mesh.devices, self._config.model.path
        write_run_manifest(
            self._workdir,
            resumed=resumed,
            launch=launch,
            config=to_dict(self._config),
            devices={
                "platform": devices.flat[0].platform,
                "kind": devices.flat[0].device_kind,
                "count": devices.size,
                "processes": jax.process_count(),
            },
            model={
                "name": "randomly initialised" if path is None else path,
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.merged(params))),
            },
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of an iteration: shown, timed, and its compilations counted."""
        self._progress.phase(name)
        programs, compiling = self._compilations.programs, self._compilations.seconds
        with self.timed(name):
            yield
        self.spent[f"{name}/programs_compiled"] += self._compilations.programs - programs
        self.spent["time/compile_s"] += self._compilations.seconds - compiling

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds that something takes to `time/NAME_s` of the iteration under way."""
        began = time.perf_counter()
        yield
        self.spent[f"time/{name}_s"] += time.perf_counter() - began

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
        spent, self.spent = self.spent, Counter()
        grouped, weights = self._config.algorithm.grouped, self._config.compared_weights
        values = rollout_metrics(collected, labels, grouped=grouped, weights=weights)
        values |= dict(more) | spent
        if "sweep/tokens" in values:
            values["sweep/tokens_per_second"] = values["sweep/tokens"] / spent["time/sweep_s"]
        if self._writes:
            shard = Shard(iteration, TRAIN, evaluation=False)
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
        ):
            if trouble is not None:
                self._progress.log(f"iteration {iteration}: {trouble}")
        return values

    def episodes(
        self, iteration: int, split: str, trajectories: Sequence[Trajectory], labels: Labels
    ) -> None:
        """Keeps what was played in an evaluation after an iteration."""
        if self._writes:
            self._trajectories.write(Shard(iteration, split, evaluation=True), trajectories, labels)
            self._metrics.draw(iteration, {}, samples_of(trajectories, split))

    def evaluation(self, iteration: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Writes, shows and returns an evaluation's metrics."""
        values = dict(values) | {"time/evaluation_s": self.spent.pop("time/evaluation_s", 0.0)}
        if self._writes:
            self._metrics.write(iteration, values)
        self._progress.evaluation(iteration, values)
        return values
