"""Agents that are async functions, which all run in one event loop in a separate thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from seeupo_jax.agents.calls import Access, AgentFailure, AgentResult, AgentTask
from seeupo_jax.agents.runners.agent_results import check_result
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.user_code import check_arguments, import_attribute
from seeupo_jax.envs.validation import ProtocolError, describe

BLOCKED_S = 2.0  # of one step of an agent, after which a warning names the agent
_CLOSE_S = 2.0  # for agents to end when the run does

_LOGGER = logging.getLogger(__name__)
_TASK = AgentTask("", "train", None, 0, 0, 1)

AgentFunction = Callable[[AgentTask, Any], Awaitable[Any]]
OnEnd = Callable[[AgentResult | AgentFailure], None]


def load_function(agent: Agent) -> AgentFunction:
    """Loads the function that `config.agent.name` names, with its options.

    Raises:
      ValueError: it is not async, or does not take (task, client) and the options.
    """
    name = str(agent.name)
    function = import_attribute(name, "config.agent.name", "function", callable)
    either = (inspect.unwrap(function), function.__call__)  # of an object, its method
    if isinstance(function, type) or not any(map(inspect.iscoroutinefunction, either)):
        raise ValueError(
            f"config.agent.name: {name} is no async function; allowed: async def"
            " agent(task, client), in which synchronous code runs by asyncio.to_thread."
        )
    try:
        check_arguments(inspect.signature(function), (_TASK, None), agent.options)
    except TypeError as error:
        raise ValueError(
            f"config.agent.name: {name}{inspect.signature(function)} cannot be called ({error});"
            " allowed: what takes a task, a client, and the keywords of config.agent.options."
        ) from None
    return functools.partial(function, **agent.options)


class FunctionAgents:
    """A `Runner` of an async function; warns about an agent that blocks the loop, with its line.

    An agent's client is an `openai.AsyncOpenAI`; other packages can use its `base_url` and
    `api_key`. It waits for an answer without a time limit and repeats no call, since a repeated
    call would be another turn.

    Args:
      name: of the function, for messages.
      max_reward: the largest magnitude of a reward.
      blocked_s: an agent may block the loop for this long without a warning.
    """

    def __init__(
        self,
        name: str,
        function: AgentFunction,
        *,
        max_reward: float,
        blocked_s: float = BLOCKED_S,
    ):
        self._name, self._function = name, function
        self._max_reward, self._blocked_s = max_reward, blocked_s
        self._lock = threading.Lock()
        self._loops: list[_Loop] = []
        self._open_client = open_clients()

    def start(self, task: AgentTask, access: Access, on_end: OnEnd) -> Callable[[], None]:
        name = f"agent {self._name} on {task.task_id}"
        return self._free_loop().run(
            name, lambda: self._play(task, self._open_client(access)), on_end
        )

    def close(self) -> None:
        with self._lock:
            loops, self._loops = self._loops, []
        for loop in loops:
            loop.close()

    def _free_loop(self) -> _Loop:
        """Returns the latest loop, or a new one if an agent has blocked that for too long."""
        with self._lock:
            if not self._loops or self._loops[-1].blocked:
                self._loops.append(_Loop(self._blocked_s))
            return self._loops[-1]

    async def _play(self, task: AgentTask, opened: Any) -> AgentResult | AgentFailure:
        try:
            async with opened as client:
                answer = await self._function(task, client)
            return check_result(answer, max_reward=self._max_reward)
        except ProtocolError as error:
            return AgentFailure("env_error", str(error), "result")
        except BaseException as error:  # even SystemExit ends this episode and no other
            return AgentFailure("env_error", describe(error), "exception")


def open_clients() -> Callable[[Access], Any]:
    """Makes the function that opens an episode's client, an `openai.AsyncOpenAI`.

    Each client has its own connections, since a pool inspects all its connections at every call.
    Without certificates, which loopback does not need, opening takes 0.2 ms instead of 35 ms.

    Raises:
      ValueError: the OpenAI SDK is not installed.
    """
    try:
        import httpx2  # a dependency of that SDK
        import openai
    except ImportError:
        raise ValueError(
            "config.agent.name: the package openai is missing; pip install seeupo_jax[agents]"
        ) from None

    limits = httpx2.Limits(max_connections=None)  # otherwise a call might wait for another

    def make(access: Access) -> Any:
        connections = httpx2.AsyncHTTPTransport(verify=False, limits=limits)
        http = httpx2.AsyncClient(transport=connections, timeout=None, follow_redirects=True)
        return openai.AsyncOpenAI(
            base_url=access.base_url,
            api_key=access.api_key,
            max_retries=0,
            timeout=None,
            http_client=http,
        )

    return make


class _Loop:
    """An event loop in its own thread, and a thread that watches whether the loop responds.

    Args:
      limit_s: how long one task may block the loop.
    """

    def __init__(self, limit_s: float) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Threads())
        self._limit_s, self._blocked_s = limit_s, 0.0
        self._closed = threading.Event()
        # Daemon threads: an agent that blocks the loop must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()
        threading.Thread(target=self._look, name="agents-watch", daemon=True).start()

    @property
    def blocked(self) -> bool:
        """Whether one task has blocked the other agents for long."""
        return self._blocked_s > 1.5 * self._limit_s

    def run(
        self,
        name: str,
        play: Callable[[], Coroutine[Any, Any, AgentResult | AgentFailure]],
        on_end: OnEnd,
    ) -> Callable[[], None]:
        """Runs an agent and reports its outcome to `on_end`; returns a function that ends it."""
        task: asyncio.Task[None] | None = None
        stopped = False

        async def run() -> None:
            result = await play()
            if not (stopped or self._closed.is_set()):
                on_end(result)

        def begin() -> None:
            nonlocal task
            if not stopped:
                task = self._loop.create_task(run(), name=name)

        def cancel() -> None:
            if task is not None:
                task.cancel()

        def stop() -> None:
            nonlocal stopped
            stopped = True
            self._call(cancel)

        self._call(begin)
        return stop

    def close(self) -> None:
        """Cancels running agents and ends the thread, unless an agent blocks it."""
        self._closed.set()
        self._call(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._loop.run_forever()
            except BaseException as error:  # SystemExit of a task that an agent started
                _LOGGER.warning("a task that an agent began raised %s", describe(error))
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_S / 2))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _look(self) -> None:
        """Tests regularly whether the loop responds; warns if one task blocks it."""
        look_s = self._limit_s / 4
        while not self._closed.wait(look_s):
            turned, warned_s = threading.Event(), self._limit_s
            task, since = None, time.monotonic()
            self._call(turned.set)
            while not turned.wait(look_s) and not self._closed.is_set():
                current, now = asyncio.current_task(self._loop), time.monotonic()
                if current is None or current is not task:  # several tasks run: the loop is busy
                    task, since = current, now
                self._blocked_s = now - since
                if self._blocked_s > warned_s:
                    self._warn(task, self._blocked_s)
                    warned_s = 2 * self._blocked_s
            self._blocked_s = 0.0

    def _warn(self, task: asyncio.Task[Any] | None, seconds: float) -> None:
        name = "an agent" if task is None else task.get_name()
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "" if frame is None else _place(traceback.extract_stack(frame))
        _LOGGER.warning(
            "%s has blocked the event loop for %.0f s%s, so that no other agent can run; allowed:"
            " await, and asyncio.to_thread for synchronous code",
            name,
            seconds,
            where,
        )


def _place(stack: traceback.StackSummary) -> str:
    """The innermost line outside of the standard library and installed packages."""
    frames = [each for each in stack if "/lib/python" not in each.filename]
    last = frames[-1] if frames else stack[-1]
    return f" at {last.filename}, line {last.lineno}"


class _Threads(ThreadPoolExecutor):
    """A daemon thread for each call of `asyncio.to_thread`.

    Python's default pool has a few more threads than the machine has cores. With more agents in
    synchronous code, agents without a thread would wait for agents whose calls wait for them
    (deadlock). It also keeps the process alive until every call has ended.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future
