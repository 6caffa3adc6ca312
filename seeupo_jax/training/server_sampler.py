"""A sampler beside training whose policy is on servers: `rollout.engine=openai` with a lag."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from seeupo_jax.agents.agent_tasks import AgentTasks
from seeupo_jax.agents.server_pool import PublishedFolder
from seeupo_jax.configuration.schema import Config
from seeupo_jax.parallel.compiling import Between
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import PublishedPolicy
from seeupo_jax.rollout.watch import Watch
from seeupo_jax.rollout.weights.versions import KEPT
from seeupo_jax.training.sampler_parts import build_sampler
from seeupo_jax.training.sampler_thread import SamplerThread
from seeupo_jax.training.served_rollout import ServedWeights, build_server_pool

_CLOSE_S = 5.0  # that `close` waits for the servers of an update


class _Push(NamedTuple):
    """A version, in a folder, that servers are to be given."""

    version: int
    folder: PublishedFolder


class ServerSampler(SamplerThread):
    """Plays a book's tickets on servers; see `Samplers`.

    A second thread gives each version to the servers while conversations are under way. Its tickets
    may start once every server that takes part has it.

    Args:
      tasks: of the run, for agents.
      stop: whether the run was asked to stop.

    Raises:
      ValueError: no server answers, or as `build_sampler`.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        policy: Policy,
        tasks: AgentTasks,
        book: TicketBook,
        *,
        stop: Callable[[], bool],
        log: Callable[[str], None],
    ):
        self._pool = build_server_pool(config, policy, None, log)
        self._weights, self._log = ServedWeights(config, workdir, policy), log
        parts = build_sampler(
            config, policy, tasks, stop=stop, watch=Watch(), log=log, served=self._pool
        )
        super().__init__(config, parts, policy.mesh, book)
        log(f"beside training, {self._pool.plan}")
        self._changed = threading.Condition()  # guards all that follows
        self._next: _Push | None = None
        self._pushing: _Push | None = None
        self._failure: BaseException | None = None
        self._over = False
        # Daemon: an update that hangs must not keep the process alive.
        self._pusher = threading.Thread(target=self._push_each, name="weights", daemon=True)
        self._pusher.start()

    def compile(self, params: Any, between: Between) -> None:
        """See `Samplers`; servers have their programs."""

    def publish(self, params: Any, version: int) -> None:
        """See `Samplers`; it waits only where a push under way would lose its folder.

        Raises:
          WriteError: it could not be written.
        """

        def is_kept() -> bool:
            return self._pushing is None or self._pushing.version > version - KEPT

        with self._changed:
            self._changed.wait_for(is_kept)
        self._give(_Push(version, self._weights(params, version)))

    def resume(self, version: int) -> None:
        """See `Samplers`; its folder is there unless it was removed."""
        folder = self._weights.find(version)
        if folder is None:
            return self._log(f"nothing is sampled until the sweep is over: {version} is gone")
        self._give(_Push(version, folder))

    def metrics(self) -> Mapping[str, float]:
        """See `Samplers`."""
        return {"rollout/servers_left_out": self._pool.left_out}

    def check(self) -> None:
        """Raises the error that ended a thread."""
        super().check()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """See `Samplers`."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        super().close()
        self._pusher.join(_CLOSE_S)

    def _give(self, push: _Push) -> None:
        with self._changed:
            self._next = push
            self._changed.notify_all()

    def _push_each(self) -> None:
        """Gives servers the newest version, again and again."""
        try:
            while (push := self._take()) is not None:
                self._pool.push(push.folder, push.version)
                self.offer(PublishedPolicy(push.version, push.folder))
        except BaseException as error:  # the trainer's thread raises it
            self._failure = error
        with self._changed:
            self._pushing = None
            self._changed.notify_all()

    def _take(self) -> _Push | None:
        """The next version to give, once there is one; None: it is over."""
        with self._changed:
            self._pushing = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._next is not None)
            self._pushing, self._next = self._next, None
            return None if self._over else self._pushing
