"""The tickets of a run: admitted as policies come, and logged as they are finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from seeupo_jax.configuration.schema import Rollout
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import FinishedMember
from seeupo_jax.rollout.rollout_log import LoggedMember, RolloutLog
from seeupo_jax.rollout.task_draw import TaskDraw
from seeupo_jax.training.policy_history import PolicyHistory, Verdict


class Admissions:
    """Lets the tickets of iterations start, without those that a stopped run has finished.

    Of a run's processes only the first uses it.

    Args:
      folder: of the write-ahead log. sampling_hash: of its files.
      tasks: draws those of an iteration that has no log.
      policies: of the run so far.

    Attributes:
      book: of the tickets. written: the log.
    """

    def __init__(
        self,
        rollout: Rollout,
        folder: Path,
        sampling_hash: str,
        tasks: TaskDraw,
        policies: PolicyHistory,
        log: Callable[[str], None],
    ):
        self._tasks, self._policies, self._log = tasks, policies, log
        self._tickets, self._members = rollout.tasks, rollout.group_size
        self.written = RolloutLog(folder, sampling_hash, log=log)
        self.book = TicketBook(rollout.tasks, rollout.group_size, record=self._record)

    def admit(self, iteration: int) -> bool:
        """Lets an iteration's tickets start.

        Returns: False: it has to wait, since conversations of it were sampled by a policy which
          this run has to come to again.
        """
        logged = self.written.load(iteration)
        if logged is None:
            tasks = self._tasks.of(iteration)
            self.written.begin(iteration, tasks)
            self.book.admit(iteration, tasks)
            return True
        judged = {key: self._policies.judge(by, iteration) for key, by in logged.origins.items()}
        counts = Counter(judged.values())
        if counts[Verdict.COMING]:
            return False
        for verdict in (Verdict.OTHER, Verdict.STALE):
            if count := counts[verdict]:
                self._log(
                    f"{count} finished conversations of iteration {iteration} {verdict.value}; they"
                    " are discarded and sampled again."
                )
        usable = {
            key: trajectory
            for key, trajectory in logged.trajectories.items()
            if judged[key] is Verdict.USABLE
        }
        if usable:
            total = self._tickets * self._members
            self._log(f"iteration {iteration}: {len(usable)} of {total} conversations are finished")
        self.book.admit(iteration, logged.tasks, usable)
        return True

    def _record(self, finished: Sequence[FinishedMember]) -> None:
        """Logs finished conversations, from any thread."""
        by_iteration: dict[int, list[LoggedMember]] = {}
        for number, member, trajectory in ((f.number, f.member, f.trajectory) for f in finished):
            iteration, group = divmod(number, self._tickets)
            sampled_by = self._policies.sampled([trajectory])
            by_iteration.setdefault(iteration + 1, []).append(
                LoggedMember(group, member, trajectory, sampled_by)
            )
        for iteration, members in by_iteration.items():
            self.written.append(iteration, members)
