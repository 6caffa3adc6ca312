"""An engine whose actions are answers to requests, which are under way side by side."""

from __future__ import annotations

import abc
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.types import UNKNOWN_VERSION

STEP_S = 0.02  # seconds that a step waits for an action; environments may answer meanwhile


class Answer(NamedTuple):
    """An action, the retries of its request, and what it used."""

    action: Action
    retries: int
    usage: Mapping[str, int]


class RequestEngine(abc.ABC):
    """An `Engine` for one process, which has all conversations; `ask` makes a request.

    Args:
      concurrency: number of concurrent requests and open conversations.
      max_context: tokens of a conversation; None: the server's own limit, where a conversation ends
        that does not fit.
    """

    def __init__(self, *, concurrency: int, sampling: Sampling, max_context: int | None):
        self.concurrency = concurrency
        self._sampling, self._max_context = sampling, max_context
        self._threads = ThreadPoolExecutor(concurrency)
        self._pending: dict[Future[Answer], Turn] = {}
        self._counts: Counter[str] = Counter()
        self._seed, self._version, self._current_sampling = 0, UNKNOWN_VERSION, sampling

    @abc.abstractmethod
    def ask(self, turn: Turn, seed: int, version: int, sampling: Sampling) -> Answer:
        """Requests a turn's action and waits for it, in a thread of its own.

        Args:
          seed: of the collection. version: of the policy when it was submitted.

        Raises:
          ValueError: no server answers it.
        """

    def begin(
        self,
        params: Any,
        *,
        seed: int,
        temperature: float | None = None,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        """Starts a collection; parameters are ignored, since the server has its own."""
        for future in self._pending:
            future.cancel()
        self._pending = {}
        self._counts.clear()
        self._seed, self._version = seed, version
        self._current_sampling = self._sampling
        if temperature is not None:
            self._current_sampling = self._sampling._replace(temperature=temperature)

    def swap(self, params: Any, version: int) -> None:
        """Counts the requests from now on as that version's; parameters are ignored."""
        self._version = version

    @property
    def shard_owners(self) -> Sequence[int]:
        """One shard, since only one process uses a server."""
        return (0,)

    def one_policy(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: the server holds its policy."""
        return contextlib.nullcontext()

    def fits(self, context: Sequence[int]) -> bool:
        """Whether there is room for a full action after a context."""
        limit = self._max_context
        return limit is None or len(context) + self._sampling.max_tokens <= limit

    def submit(self, turn: Turn) -> None:
        """Requests an action; a grammar of the turn's tools is not applied."""
        numbers = self._seed, self._version
        future = self._threads.submit(self.ask, turn, *numbers, self._current_sampling)
        self._pending[future] = turn

    def step(self, unfinished: bool, stop: bool = False) -> list[Action] | None:
        """Returns the actions that have arrived; waits up to `STEP_S` if any is pending.

        Raises:
          ValueError: the server rejects a request.
          Stopped: `stop` is set.
        """
        if stop:
            raise Stopped
        if not unfinished and not self._pending:
            return None
        done, _ = wait(self._pending, STEP_S, FIRST_COMPLETED)
        actions = []
        for turn, answer in [(self._pending.pop(each), each.result()) for each in done]:
            self._counts["server_retries"] += answer.retries
            self._counts["server_failures"] += bool(answer.action.failure)
            self._counts.update(answer.usage)
            actions.append(_cut_at_stop(turn, answer.action))
        return actions

    def cancel(self, key: int) -> None:
        """Drops a turn; the server still completes a running request (`server_dropped`)."""
        for future in [future for future, turn in self._pending.items() if turn.key == key]:
            del self._pending[future]
            self._counts["server_dropped"] += not future.cancel()

    def release(self, key: int) -> None:  # noqa: B027  # all of them do nothing
        """No effect: the server manages its cache."""

    @property
    def busy(self) -> bool:
        """Whether an action is pending."""
        return bool(self._pending)

    @property
    def poll_interval_s(self) -> float | None:
        """None: a step without pending actions does no work."""
        return None

    def usage(self) -> Mapping[str, int]:
        """The numbers of repeated requests, failed actions and dropped answers, and what the
        dialect reads of the server's (`Reply.usage`)."""
        return self._counts

    def seconds(self) -> Mapping[str, float]:
        """Empty: the server does not report device times."""
        return {}

    def close(self) -> None:
        """Ends the threads, each after its request."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _cut_at_stop(turn: Turn, action: Action) -> Action:
    """Truncates an action where its turn's listener ends it."""
    if turn.listen is None or action.failure or action.too_long:
        return action
    count = turn.listen(action.tokens)
    kept = (each[:count] for each in (action.tokens, action.logp, action.version_L))
    tokens, logp, version_L = kept
    return Action(action.key, tokens, logp, version_L=version_L)
