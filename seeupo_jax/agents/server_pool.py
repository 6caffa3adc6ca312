"""An engine whose policy is on several servers, each of which is given every version of it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from seeupo_jax.agents.action_client import ActionClient
from seeupo_jax.agents.request_engine import Answer, RequestEngine
from seeupo_jax.agents.server_client import TryAgain
from seeupo_jax.agents.server_dialects import Reply
from seeupo_jax.agents.server_weights import PUSHES
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.types import UNKNOWN_VERSION

DECODED = "decoded_tokens"  # of `usage`
NEW = "it was given no weights yet"


class PublishedFolder(NamedTuple):
    """A policy's folder: its path as servers see it, and a name that no other weights have."""

    path: str
    name: str


@dataclass(eq=False)
class _Server:
    """A server, and what it serves.

    client: None: it has not answered yet. tried: whether it has sampled.
    serves: the name of the weights that it was given last; None: none, or it has failed since.
    out: why no conversation is sent to it; "": some are.
    """

    url: str
    client: ActionClient | None = None
    tried: bool = False
    serves: str | None = None
    out: str = NEW


class ServerPool(RequestEngine):
    """Samples on several servers; conversations of a group stay on one while it answers.

    A server that does not answer, whose update fails, or that says that it serves other weights is
    named and gets no conversation; the actions that it owes are sampled by others. The next version
    is pushed to it as well, and it takes part again once that has worked.

    Args:
      urls: of servers, at least one. connect: makes the client of one; raises ValueError.
      publish: writes a policy's folder: of its parameters and its version.
      log: of sentences for the run's user.
      concurrency, sampling, max_context: as of `RequestEngine`.

    Raises:
      ValueError: no server answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], ActionClient],
        publish: Callable[[Any, int], PublishedFolder],
        log: Callable[[str], None],
        *,
        concurrency: int,
        sampling: Sampling,
        max_context: int,
    ):
        super().__init__(concurrency=concurrency, sampling=sampling, max_context=max_context)
        self._servers = tuple(_Server(url) for url in urls)
        self._connect, self._publish, self._log = connect, publish, log
        self._versions: dict[str, int] = {}  # by the names that were pushed
        self._groups: dict[int, _Server] = {}
        self._lock = threading.Lock()
        self._kept: str | None = None  # the name of the weights that `one_policy` keeps
        self._keeps = False
        for server in self._servers:
            try:
                server.client = connect(server.url)
            except ValueError as error:
                self._leave_out(server, str(error))
        if all(server.client is None for server in self._servers):
            super().close()
            raise self._none_left()

    @property
    def plan(self) -> str:
        """Where it samples, for the run's log."""
        there = [server.url for server in self._servers if server.client is not None]
        return f"servers that sample: {', '.join(there)}"

    def compile(self, params: Any, between: Any) -> None:
        """Nothing: the servers have their programs."""

    def begin(
        self,
        params: Any,
        *,
        seed: int,
        temperature: float | None = None,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        """Starts a collection, for which all servers are given the policy.

        Raises:
          ValueError: none of them took it.
        """
        super().begin(params, seed=seed, temperature=temperature, version=version)
        self._groups.clear()
        if self._kept is None or not self._taking:
            self._push(params, version, under_way=False)

    def swap(self, params: Any, version: int) -> None:
        """Gives all servers another policy, with which requests under way go on."""
        self._version = version
        self._push(params, version, under_way=True)

    @contextlib.contextmanager
    def one_policy(self) -> Iterator[None]:
        """Within it, the servers are given the policy once."""
        outer, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = outer
            if not outer:
                self._kept = None

    def ask(self, turn: Turn, seed: int, version: int, sampling: Sampling) -> Answer:
        retries = 0
        while True:
            server = self._server_of(turn.group)
            assert server.client is not None, "a server that takes part has answered"
            try:
                reply, more = server.client.ask(turn, seed, sampling)
            except TryAgain as error:
                retries += server.client.client.retries
                self._leave_out(server, str(error))
                continue
            wrong = self._wrong_with(reply)
            if wrong:
                self._leave_out(server, wrong)
                continue
            version_L = self._version_L(reply, version)
            action = Action(turn.key, reply.tokens, reply.logp, version_L=version_L)
            return Answer(action, retries + more, {DECODED: len(reply.tokens)})

    def usage(self) -> Mapping[str, int]:
        """The numbers of repeated requests, of dropped answers, of sampled tokens, and of servers
        that are left out now."""
        left_out = len(self._servers) - len(self._taking)
        return {**super().usage(), "servers_left_out": left_out}

    def close(self) -> None:
        """Ends the threads, each after its request, and the connections."""
        clients = [server.client for server in self._servers if server.client is not None]
        for each in clients:
            each.client.stop()
        super().close()
        for each in clients:
            each.close()

    @property
    def _taking(self) -> list[_Server]:
        return [server for server in self._servers if not server.out]

    def _push(self, params: Any, version: int, *, under_way: bool) -> None:
        """Publishes a policy, and gives it to all servers side by side."""
        folder = self._publish(params, version)
        self._versions[folder.name] = version
        with ThreadPoolExecutor(len(self._servers)) as threads:
            [*threads.map(lambda server: self._update(server, folder, under_way), self._servers)]
        if not self._taking:
            raise self._none_left()
        self._kept = folder.name if self._keeps else None

    def _update(self, server: _Server, folder: PublishedFolder, under_way: bool) -> None:
        if server.serves == folder.name and not server.out:
            return
        was = server.out or NEW
        try:
            if server.client is None:
                server.client = self._connect(server.url)
            push = PUSHES[server.client.dialect_name]
            push(server.client.client, folder.path, folder.name, under_way)
            if not server.tried:
                server.client.try_once()
            server.tried = True
        except (TryAgain, ValueError) as error:
            self._leave_out(server, f"its update to {folder.name} failed: {error}")
            return
        with self._lock:
            server.serves, server.out = folder.name, ""
        if was != NEW:
            self._log(f"{server.url} serves {folder.name} and takes part again")

    def _server_of(self, group: int) -> _Server:
        """The server of a group's conversations: the first time one that has the fewest groups."""
        with self._lock:
            server, taking = self._groups.get(group), self._taking
            if server is not None and not server.out:
                return server
            if not taking:
                raise self._none_left()
            counts = Counter(each.url for each in self._groups.values())
            server = min(taking, key=lambda each: counts[each.url])
            self._groups[group] = server
            return server

    def _leave_out(self, server: _Server, reason: str) -> None:
        with self._lock:
            new, server.out, server.serves = server.out != reason, reason, None
        if new:
            self._log(f"{server.url} is left out until its next update: {reason}")

    def _none_left(self) -> ValueError:
        reasons = "; ".join(f"{server.url}: {server.out}" for server in self._servers)
        return ValueError(
            f"config.rollout.servers: got none that samples ({reasons}); allowed: at least one;"
            " rerun the command to resume once one is there."
        )

    def _wrong_with(self, reply: Reply) -> str:
        """Why an answer is not of the policy; "": it is."""
        other = [span.version for span in reply.versions if span.version not in self._versions]
        if other:
            return f"it serves weights that are called {other[0]!r}, which it was not given"
        if any(map(math.isnan, reply.logp)):
            return "it returns an end token without its log-probability"
        return ""

    def _version_L(self, reply: Reply, version: int) -> list[int]:
        """The version of each token: what the server says, or where it says nothing, the latest
        that was pushed before the request."""
        version_L = [version] * len(reply.tokens)
        for span in reply.versions:
            for place in range(span.start, min(span.end, len(version_L))):
                version_L[place] = self._versions[span.version]
        return version_L
