"""Where an iteration's trajectories come from if others sample: the disk, or their tickets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import TaskShare
from seeupo_jax.parallel.compiling import Between
from seeupo_jax.parallel.distributed import broadcast_from_primary, max_over_processes
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.rollout.asynchronous.sampling_loop import IDLE_S, WAITS, WALL_S
from seeupo_jax.rollout.asynchronous.ticket_book import TakenIteration, TicketBook
from seeupo_jax.rollout.collect import Collected, count_tokens
from seeupo_jax.rollout.player import STOP_POLL_S
from seeupo_jax.rollout.stored_trajectories import TYPES
from seeupo_jax.rollout.watch import Activity, Watch
from seeupo_jax.training.admissions import Admissions
from seeupo_jax.training.iteration_source import (
    IterationSource,
    SamplingOrigin,
    StoppedTrajectories,
)
from seeupo_jax.training.policy_history import (
    PolicyHistory,
    Verdict,
    join_origins,
    split_origins,
)


class Samplers(Protocol):
    """Who samples beside training; of several trainer processes each calls every method."""

    def compile(self, params: Any, between: Between) -> None:
        """Compiles their programs, where they run here; `between`: as of `compile_all`."""
        ...

    def publish(self, params: Any, version: int) -> None:
        """Gives them a policy; every process calls it, and `params` may be donated then."""
        ...

    def resume(self, version: int) -> None:
        """Lets them go on with a policy whose sweep is resumed, if they still have it."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics of how they are now; process 0 alone calls it."""
        ...

    def check(self) -> None:
        """Raises what ended them; process 0 alone calls it, while it waits."""
        ...

    def finish(self) -> None:
        """Tells them that there will be no more tickets."""
        ...

    def close(self) -> None:
        """Ends what of them runs here."""
        ...


class _Stored(NamedTuple):
    """An iteration that need not be sampled, and the policies that sampled it, in one text."""

    collected: Collected
    sampled_by: str


class AsynchronousSource(IterationSource):
    """Admits tickets to samplers as policies come, and waits for those of an iteration.

    Args:
      shares: the tasks of the training split.
      start: makes the samplers of a ticket book, which is empty but in process 0.
      stop: whether this process was asked to stop.
      watch: shows how far the tickets are.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        policy: Policy,
        shares: Sequence[TaskShare],
        start: Callable[[TicketBook], Samplers],
        log: Callable[[str], None],
        *,
        stop: Callable[[], bool] = lambda: False,
        watch: Watch | None = None,
    ):
        super().__init__(config, workdir, policy, shares, log)
        self._stop, self._watch = stop, Watch() if watch is None else watch
        self._policies = PolicyHistory(config.rollout.max_lag)
        self._admissions = Admissions(
            config.rollout, workdir / "rollouts", self._made_by, self._tasks, self._policies, log
        )
        self._book = self._admissions.book
        self._samplers = start(self._book)
        self._next: int | None = None  # iteration to be admitted
        self._booked = False  # whether the book has tickets
        self._stored: dict[int, _Stored] = {}  # iterations that were stored, not trained on yet
        self._complete_at = 0.0  # when the previous iteration was, or the first policy came
        self._reissued = 0  # members, up to the previous iteration

    def compile_samplers(self, params: Any, between: Between) -> None:
        self._samplers.compile(params, between)

    def of(
        self,
        iteration: int,
        params: Any,
        *,
        evaluates: bool,
        stopped: StoppedTrajectories | None = None,
    ) -> Collected:
        """As of `IterationSource`; samplers go on with later iterations meanwhile."""
        if stopped is None:
            swept = self._fingerprint(params)
            self._policies.add(iteration - 1, swept)
            self._samplers.publish(params, iteration - 1)
        else:
            swept = stopped.origin.swept
            self._policies.add(iteration - 1, swept)
            self._samplers.resume(iteration - 1)
            self._stored[iteration] = _Stored(stopped.collected, stopped.origin.sampled_by)
        ahead = self._book.counts().groups_ahead
        self._admit(iteration)
        if iteration in self._stored:
            collected, sampled_by = self._stored.pop(iteration)
            self.metrics = {}
        else:
            collected, sampled_by = self._wait(iteration, ahead)
        self.origin = SamplingOrigin(sampled_by, swept)
        self._observe(iteration, collected)
        if iteration == self._config.iterations:
            self.finish()
        return collected

    def forget(self, up_to_iteration: int) -> None:
        super().forget(up_to_iteration)
        if jax.process_index() == 0:
            self._admissions.written.forget(up_to_iteration)

    def finish(self) -> None:
        self._samplers.finish()

    def close(self) -> None:
        try:
            self._samplers.close()
        finally:
            super().close()

    def state(self, done: int) -> dict[str, Any]:
        return super().state(done) | {"policies": self._policies.state()}

    def restore(self, done: int, notes: Mapping[str, Any]) -> None:
        super().restore(done, notes)
        self._policies.restore(notes.get("policies", {}))

    def _admit(self, iteration: int) -> None:
        """Lets all tickets start that may while an iteration's policy is the newest."""
        if self._next is None:
            self._next, self._complete_at = iteration, time.perf_counter()
        last = min(iteration + self._config.rollout.max_lag, self._config.iterations)
        while self._next <= last and self._admit_next(self._next):
            self._next += 1

    def _admit_next(self, iteration: int) -> bool:
        """Finds an iteration stored, or lets its tickets start; False: it has to wait."""
        if iteration in self._stored:
            return True
        text = self._store.sampled_by(iteration, self._made_by)
        if text is not None:
            verdict = self._policies.judge(split_origins(text, iteration), iteration)
            if verdict is Verdict.COMING:
                return False
            if verdict is Verdict.USABLE and not self._booked:
                collected = self._store.load(iteration, self._made_by, text)
                if collected is not None:
                    self._stored[iteration] = _Stored(collected, text)
                    return True
            why = "follow others that are gone" if verdict is Verdict.USABLE else verdict.value
            self._log(
                f"the stored trajectories of iteration {iteration} {why}; they are discarded and"
                " sampled again."
            )
        first = jax.process_index() == 0
        admitted = broadcast_from_primary(self._admissions.admit(iteration) if first else None)
        self._booked = self._booked or admitted
        return admitted

    def _wait(self, iteration: int, ahead: int) -> _Stored:
        """Waits until the iteration is complete, and stores it.

        Args:
          ahead: groups that were finished before.
        """
        first, stopping, complete = jax.process_index() == 0, 0, 0
        with self._watch.on(self._activity):
            while not complete:
                if first:
                    self._samplers.check()
                here = first and self._book.wait(iteration, STOP_POLL_S)
                stopping, complete = max_over_processes([int(self._stop()), int(here)])
                if stopping:
                    raise Stopped
        found = None
        if first:
            taken = self._book.take(iteration)
            sampled_by = join_origins(self._policies.sampled(taken.trajectories), iteration)
            found = self._collected(taken), sampled_by, self._counted(taken.usage, ahead)
        collected, sampled_by, self.metrics = broadcast_from_primary(found, *TYPES)

        def remove() -> None:
            self._admissions.written.remove(iteration)

        self._store.save(iteration, collected, self._made_by, sampled_by, on_saved=remove)
        return _Stored(collected, sampled_by)

    def _collected(self, taken: TakenIteration) -> Collected:
        """An iteration's trajectories, with what was spent since the previous one was complete."""
        now = time.perf_counter()
        wall_s, self._complete_at = now - self._complete_at, now
        sampled, context = count_tokens(taken.trajectories)
        seconds = {name: x for name, x in taken.usage.items() if name.endswith("_s")}
        counts = {name: int(x) for name, x in taken.usage.items() if name not in seconds}
        environment_s, reset_s, reward_s = (seconds.pop(name, 0.0) for name in WAITS)
        for name in (WALL_S, IDLE_S):  # they have a metric of their own
            seconds.pop(name, None)
        return Collected(
            taken.trajectories,
            wall_s,
            environment_s,
            sampled,
            context,
            usage=counts,
            reset_s=reset_s,
            seconds=seconds,
            reward_s=reward_s,
        )

    def _counted(self, usage: Mapping[str, float], ahead: int) -> dict[str, float]:
        """Metrics of the samplers since the previous iteration was complete."""
        counts = self._book.counts()
        reissued, self._reissued = counts.reissued - self._reissued, counts.reissued
        wall_s = usage.get(WALL_S, 0.0)
        return {
            "rollout/workers": counts.workers,
            "rollout/groups_ahead": ahead,
            "rollout/reissued": reissued,
            "rollout/idle_fraction": usage.get(IDLE_S, 0.0) / wall_s if wall_s else float("nan"),
            **self._samplers.metrics(),
        }

    def _activity(self) -> Activity:
        """How far the admitted tickets are; any thread may call this."""
        counts = self._book.counts()
        return Activity(
            total=counts.waiting + counts.leased + counts.finished,
            active=counts.leased,
            stepping=0,
            finished=counts.finished,
            failed=0,
            tokens=0,
        )
