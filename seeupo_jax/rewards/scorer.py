"""Runs the reward functions of each episode, as soon as it is over, while the sampler works."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from seeupo_jax.configuration.reward import Reward, reward_weights
from seeupo_jax.configuration.user_code import describe
from seeupo_jax.envs.base import TurnRewards
from seeupo_jax.envs.pool import EnvCall, EnvPool, Failure
from seeupo_jax.envs.validation import ProtocolError, check_pay
from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.rewards.reward_functions import RewardFunction, load_functions

POLL_S = 0.02  # between looks at functions that run
REWARD_FAILURE = "reward_failure"  # key of a trajectory's `info`: NAME=CAUSE
_CLOSE_S = 1.0  # for calls that still run when the run ends
_LOGGER = logging.getLogger(__name__)


class RewardFailure(NamedTuple):
    """Why an episode has no reward. cause: a class of errors, `timeout` or `invalid`."""

    name: str
    cause: str
    reason: str


@dataclass
class ScoringResult:
    """The rewards of an episode by name, or the first failure of a function."""

    rewards: dict[str, TurnRewards] = field(default_factory=dict)
    failure: RewardFailure | None = None


class _Raised(NamedTuple):
    cause: str
    reason: str


class Scorer:
    """The reward functions of a run and the weights of its rewards; one thread submits and polls.

    Functions run in threads, coroutines in one event loop; a call that takes too long is abandoned.

    Args:
      functions: those to call. weights: by name.
    """

    def __init__(
        self, functions: Sequence[RewardFunction] = (), weights: Mapping[str, float] | None = None
    ):
        self.weights = {} if weights is None else dict(weights)
        self._loop = _EventLoop()
        self._calls = [_Calls(function, self._loop) for function in functions]
        self._answers: dict[int, dict[str, Any]] = {}  # by key, of each function that answered
        self._turns: dict[int, int] = {}  # by key, of its episode

    @property
    def functions(self) -> int:
        """How many are called for each episode."""
        return len(self._calls)

    @property
    def open(self) -> int:
        """How many episodes have been submitted and not yet returned by a poll."""
        return len(self._answers)

    def submit(self, key: int, episode: FinishedEpisode) -> None:
        """Lets every function judge an episode, and returns at once."""
        self._answers[key], self._turns[key] = {}, episode.turns
        for calls in self._calls:
            calls.submit(key, episode)

    def poll(self, max_reward: float, timeout_s: float = 0.0) -> list[tuple[int, ScoringResult]]:
        """The episodes that every function has answered since the last poll, sorted by key.

        Args:
          max_reward: the largest magnitude of a reward. timeout_s: how long to wait for a first.
        """
        until = time.monotonic() + timeout_s
        while True:
            for calls in self._calls:
                for key, answer in calls.poll():
                    self._answers[key][calls.name] = answer
            keys = [k for k, answers in self._answers.items() if len(answers) == self.functions]
            left_s = until - time.monotonic()
            if keys or not self._answers or left_s <= 0:
                return [(key, self._result(key, max_reward)) for key in sorted(keys)]
            next(calls for calls in self._calls if calls.open).wait(min(POLL_S, left_s))

    def close(self) -> None:
        """Ends the threads; calls that still run are soon abandoned.

        A function whose own `close` fails is logged, and the others are closed.
        """
        for calls in self._calls:
            calls.close()
        self._loop.close()

    def _result(self, key: int, max_reward: float) -> ScoringResult:
        answers, turns, scored = self._answers.pop(key), self._turns.pop(key), ScoringResult()
        for calls in self._calls:  # in the configuration's order
            answer = answers[calls.name]
            try:
                if not isinstance(answer, _Raised):
                    where = f"reward {calls.name}"
                    pay = check_pay(answer, where, turns=turns, max_reward=max_reward)
                    scored.rewards[calls.name] = pay
                    continue
            except ProtocolError as error:
                answer = _Raised("invalid", str(error))
            if scored.failure is None:
                scored.failure = RewardFailure(calls.name, *answer)
        return scored


def make_scorer(rewards: Sequence[Reward]) -> Scorer:
    """The scorer of `config.rewards`.

    Raises:
      ValueError: as `load_functions`.
    """
    return Scorer(load_functions(rewards), reward_weights(rewards))


class _Seat:
    """The content of a slot in the pool of a function's calls."""

    def close(self) -> None:
        pass


class _Calls:
    """The calls of one function, a bounded number at a time, each within its time limit."""

    def __init__(self, function: RewardFunction, loop: _EventLoop):
        self.name, self._function, self._loop = function.name, function, loop
        size = function.concurrency
        self._pool = EnvPool(_Seat, size, workers=size, timeout_s=function.timeout_s)
        self._free, self._keys = list(range(size)), dict[int, int]()  # by slot
        self._waiting: deque[tuple[int, FinishedEpisode]] = deque()
        self._answered: list[tuple[int, Any]] = []

    @property
    def open(self) -> int:
        return self._pool.open + len(self._waiting)

    def submit(self, key: int, episode: FinishedEpisode) -> None:
        self._waiting.append((key, episode))
        self._start()

    def wait(self, timeout_s: float) -> None:
        """Returns when a call has ended, at the latest after `timeout_s`."""
        for call, outcome in self._pool.poll(timeout_s):
            self._free.append(call.slot)
            timed_out = isinstance(outcome.result, Failure)  # nothing else: `_ask` raises nothing
            answer = self._timeout() if timed_out else outcome.result
            self._answered.append((self._keys.pop(call.slot), answer))
        self._start()

    def poll(self) -> list[tuple[int, Any]]:
        self.wait(0.0)
        answered, self._answered = self._answered, []
        return answered

    def close(self) -> None:
        self._waiting.clear()
        self._pool.close(_CLOSE_S)
        try:
            self._function.close()
        except (Exception, SystemExit) as error:  # of a user's code
            _LOGGER.warning("reward %s: its close() failed by %s.", self.name, describe(error))

    def _start(self) -> None:
        while self._free and self._waiting:
            slot, (key, episode) = self._free.pop(), self._waiting.popleft()
            self._keys[slot] = key
            self._pool.submit(EnvCall(slot, partial(self._ask, episode)))

    def _ask(self, episode: FinishedEpisode, _: Any) -> Any:
        """Calls the function in a thread of the pool: its answer, or the error that it raised.

        Rewards become plain numbers here, so that an error of the conversion is the function's.
        """
        try:
            answer = self._function.call(copy.deepcopy(episode))
            if not inspect.isawaitable(answer):
                return _plain(answer)
            future = self._loop.submit(answer)
            try:
                return _plain(future.result(self._function.timeout_s))
            except TimeoutError:
                if future.done():
                    raise  # its own
                future.cancel()
                return self._timeout()
        except BaseException as error:  # even SystemExit ends this episode and no other
            return _Raised(type(error).__name__, f"reward {self.name}: {describe(error)}")

    def _timeout(self) -> _Raised:
        limit = f"{self._function.timeout_s:g} s"
        return _Raised("timeout", f"reward {self.name}: no answer in {limit}")


def _plain(answer: Any) -> Any:
    """Rewards as plain numbers; any other value unchanged, which the caller refuses."""
    with contextlib.suppress(ProtocolError):
        return check_pay(answer, "", turns=None)
    return answer


class _EventLoop:
    """An event loop in a thread of its own, begun by the first coroutine."""

    def __init__(self):
        self._lock = threading.Lock()
        self._loop: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] | None = None
        # Daemon: a coroutine that blocks it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def submit(self, awaitable: Awaitable[Any]) -> Future[Any]:
        """Runs a coroutine; any thread may call this."""
        with self._lock:
            if self._loop is None:
                self._loop = Future()
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._loop.result()[0])

    def close(self) -> None:
        """Cancels running coroutines and ends the thread, unless a coroutine blocks it."""
        if self._loop is not None:
            loop, ended = self._loop.result()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            ended = asyncio.Event()
            self._loop.set_result((runner.get_loop(), ended))
            while not ended.is_set():
                with contextlib.suppress(BaseException):  # SystemExit of a task, which keeps it
                    runner.run(ended.wait())


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
