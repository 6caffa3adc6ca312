"""Writes the trajectories of a run to its folder in the background: a share, within a size."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from seeupo_jax.trajectories.reader import (
    FOLDER,
    TrajectoryFile,
    find_shards,
    pack_shard,
    write_shard,
)
from seeupo_jax.trajectories.trajectory_record import to_record
from seeupo_jax.types import Trajectory, TrajectoryStats

_LOGGER = logging.getLogger(__name__)
_WAITING = 2  # shards that are not written yet and held in memory, at the most
_MIB = 2**20


class TrajectoryWriter:
    """The trajectories of a run on disk; a shard that cannot be written is logged once.

    Args:
      workdir: of the run.
      texts: gives the text that each token adds, such as `TokenTexts`.
      share: of the groups, in [0, 1]; whole groups are kept or not.
      mib: bound on the size of all files together; None: no bound.
      seed: of the run: with the iteration and the group it decides which groups are kept.
      log: takes a sentence.

    Attributes:
      removed: files that were deleted for newer ones.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        texts: Callable[[Sequence[int]], list[str]],
        share: float = 1.0,
        mib: float | None = None,
        seed: int = 0,
        log: Callable[[str], None] = _LOGGER.warning,
    ):
        self._workdir, self._texts = workdir, texts
        self._share, self._seed, self._log = share, seed, log
        self._bytes = None if mib is None else int(mib * _MIB)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._pending: deque[Future[None]] = deque()
        self._reported = False
        self.removed = 0

    def resume_from(self, iteration: int) -> None:
        """Removes the shards of this and later iterations, which run again, and unfinished ones."""
        self.wait()
        try:
            for shard in find_shards(self._workdir):
                if shard.iteration >= iteration:
                    shard.path(self._workdir).unlink()
            for file in (self._workdir / FOLDER).glob("*.jsonl.gz.*tmp"):
                file.unlink()
        except OSError as error:
            self._report_once(error)

    def write(
        self,
        shard: TrajectoryFile,
        trajectories: Sequence[Trajectory],
        labels: Mapping[str, Mapping[str, str]],
        stats: Sequence[TrajectoryStats | None] | None = None,
    ) -> None:
        """Writes a shard in the background.

        Args:
          labels: by task.
          stats: of each trajectory; None: they were not trained on.
        """
        while len(self._pending) >= _WAITING:
            self._pending.popleft().result()
        stats_or_none = [None] * len(trajectories) if stats is None else stats
        with_stats = [
            (trajectory, what)
            for trajectory, what in zip(trajectories, stats_or_none, strict=True)
            if self._keeps(shard, trajectory.group)
        ]
        if with_stats:
            self._pending.append(self._writer.submit(self._write, shard, with_stats, dict(labels)))

    def wait(self) -> None:
        """Returns when all that was given is on the disk, or was reported as lost."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Finishes pending writes and ends the background thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _keeps(self, shard: TrajectoryFile, group: int) -> bool:
        """Whether a group is written: a draw by name, so a resumed run repeats it."""
        name = f"{self._seed}/{shard.kind}/{shard.iteration}/{group}"
        draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        return draw < self._share * 2**64

    def _write(
        self,
        shard: TrajectoryFile,
        with_stats: Sequence[tuple[Trajectory, TrajectoryStats | None]],
        labels: Mapping[str, Mapping[str, str]],
    ) -> None:
        try:
            records = [
                to_record(
                    trajectory,
                    split=shard.split,
                    iteration=shard.iteration,
                    evaluation=shard.evaluation,
                    labels=labels.get(trajectory.task_id, {}),
                    texts=self._texts,
                    stats=stats,
                )
                for trajectory, stats in with_stats
            ]
            records.sort(key=lambda record: (record["group"], record["member"]))
            data = pack_shard(records)
            if self._make_room(shard, len(data)):
                write_shard(self._workdir, shard, data)
        except Exception as error:  # of whatever kind: training continues
            self._report_once(error)

    def _make_room(self, shard: TrajectoryFile, size: int) -> bool:
        """Removes older shards until a new one fits; whether it does."""
        if self._bytes is None:
            return True
        paths = {other: other.path(self._workdir) for other in find_shards(self._workdir)}
        paths.pop(shard, None)  # it is replaced
        sizes = {other: path.stat().st_size for other, path in paths.items()}
        needed = size + sum(sizes.values()) - self._bytes
        leaving: list[TrajectoryFile] = []
        while needed > 0:
            shards = [*(other for other in sizes if other not in leaving), shard]
            other = dispensable(shards, besides=shard)
            if other is None:
                self._log(
                    f"trajectories: {shard.name} has {size / _MIB:.1f} MiB, and"
                    f" config.telemetry.trajectory_mib={self._bytes / _MIB:g} leaves no room for"
                    " it: it is not kept."
                )
                return False
            leaving.append(other)
            needed -= sizes[other]
        for other in leaving:
            paths[other].unlink()
            self.removed += 1
            self._log(
                f"trajectories: removed {other.name}, to stay below"
                f" config.telemetry.trajectory_mib={self._bytes / _MIB:g}."
            )
        return True

    def _report_once(self, error: Exception) -> None:
        if not self._reported:
            self._reported = True
            self._log(
                f"trajectories cannot be written to {self._workdir / FOLDER}"
                f" ({type(error).__name__}: {error}); training continues without them."
            )


def dispensable(
    shards: Sequence[TrajectoryFile], *, besides: TrajectoryFile
) -> TrajectoryFile | None:
    """The shard whose removal leaves the iterations of its kind the most evenly spread.

    That is the one whose neighbours are the closest to each other, of these the oldest; the first
    and the last of each kind go after all others. The newest training shard and `besides` stay.

    Returns: None where all must stay.
    """
    kinds: dict[str, list[TrajectoryFile]] = {}
    for shard in sorted(shards):
        kinds.setdefault(shard.kind, []).append(shard)
    newest = max((shard for shard in shards if not shard.evaluation), default=None)
    gaps: dict[TrajectoryFile, float] = {}
    for of_kind in kinds.values():
        gaps |= dict.fromkeys((of_kind[0], of_kind[-1]), float("inf"))
        triples = zip(of_kind, of_kind[1:], of_kind[2:], strict=False)
        gaps |= {shard: right.iteration - left.iteration for left, shard, right in triples}
    free = [shard for shard in gaps if shard not in (newest, besides)]
    return min(free, key=lambda shard: (gaps[shard], shard), default=None)
