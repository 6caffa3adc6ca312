"""An engine whose policy is on several servers, each of which is given every version of it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from seeupo_jax.agents.action_client import ActionClient
from seeupo_jax.agents.request_engine import Answer, RequestEngine
from seeupo_jax.agents.server_client import Refused, TryAgain
from seeupo_jax.agents.server_dialects import Reply
from seeupo_jax.agents.server_weights import WEIGHT_UPDATES
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.types import UNKNOWN_VERSION

DECODED = "decoded_tokens"  # of `usage`
NEW = "it was given no weights yet"
RETRY_S = 5.0  # between updates of servers that are left out


class NoServerLeft(ValueError):
    """No server takes part; the text is a sentence that names each and why it does not."""


class PublishedFolder(NamedTuple):
    """A policy's folder: its path as servers see it, and a name that no other weights have."""

    path: str
    name: str


@dataclass(eq=False)
class _Server:
    """A server, and what it serves.

    client: None: it is left out, or has not answered yet. tried: whether it has sampled.
    serves: the name of the weights that it was given last; None: none, or it has failed since.
    out: why no conversation is sent to it; "": some are. said: what of this the log has.
    updating: held during an update.
    """

    url: str
    client: ActionClient | None = None
    tried: bool = False
    serves: str | None = None
    out: str = NEW
    said: str = ""
    updating: threading.Lock = field(default_factory=threading.Lock)


class ServerPool(RequestEngine):
    """Samples on several servers; conversations of a group stay on one while it answers.

    A server that does not answer, whose update fails, or that says that it serves other weights is
    named and gets no conversation; the actions that it owes are sampled by others. It is tried
    again every few seconds while there are conversations, and with each version: once an update
    has worked, it takes part again.

    Args:
      urls: of servers, at least one. connect: makes the client of one; raises ValueError.
      publish: writes a policy's folder: of its parameters and its version. None: each policy is
        given to `push` before `begin` or `swap` names its version.
      log: of sentences for the run's user.
      concurrency, sampling, max_context: as of `RequestEngine`.

    Raises:
      NoServerLeft: no server answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], ActionClient],
        publish: Callable[[Any, int], PublishedFolder] | None,
        log: Callable[[str], None],
        *,
        concurrency: int,
        sampling: Sampling,
        max_context: int,
    ):
        super().__init__(concurrency=concurrency, sampling=sampling, max_context=max_context)
        self._servers = tuple(_Server(url) for url in urls)
        self._connect, self._publish, self._log = connect, publish, log
        self._newest: PublishedFolder | None = None
        self._versions: dict[str, int] = {}  # by the names that were pushed
        self._group_of: dict[int, int] = {}  # by the keys of open conversations
        self._groups: dict[int, _Server] = {}  # where those are that have any
        self._lock = threading.Lock()
        self._retry_at = 0.0  # when to update servers that are left out
        self._closed = False
        self._kept = False  # whether the servers have the policy of `one_policy`
        self._keeps = False
        for server in self._servers:
            try:
                server.client = connect(server.url)
            except ValueError as error:
                self._leave_out(server, None, "it does not answer", error)
        if all(server.client is None for server in self._servers):
            super().close()
            raise self._none_left()

    @property
    def plan(self) -> str:
        """Where it samples, for the run's log."""
        there = [server.url for server in self._servers if server.client is not None]
        return f"servers that sample: {', '.join(there)}"

    @property
    def left_out(self) -> int:
        """The number of servers that get no conversation now."""
        return len(self._servers) - len(self._taking)

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
          NoServerLeft: none of them took it.
        """
        super().begin(params, seed=seed, temperature=temperature, version=version)
        self._group_of.clear()
        self._groups.clear()
        if self._publish is None or (self._kept and self._taking):
            return
        self._offer(self._publish(params, version), version)
        self._update_all()
        self._kept = self._keeps

    def swap(self, params: Any, version: int) -> None:
        """Gives all servers another policy, with which requests under way go on."""
        super().swap(params, version)
        if self._publish is not None:
            self.push(self._publish(params, version), version)

    def push(self, folder: PublishedFolder, version: int) -> None:
        """Gives all servers a policy while requests are under way; any thread may call it.

        Those that sample get it one after another: the others go on meanwhile. It returns when each
        has it or is left out.

        Raises:
          NoServerLeft: none of them took it.
        """
        self._offer(folder, version)
        for server in self._taking:
            self._update(server, under_way=True)
        if not self._taking:
            self._update_all()

    @contextlib.contextmanager
    def one_policy(self) -> Iterator[None]:
        """Within it, the servers are given the policy once."""
        outer, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = outer
            if not outer:
                self._kept = False

    def submit(self, turn: Turn) -> None:
        with self._lock:
            self._group_of[turn.key] = turn.group
        super().submit(turn)

    def release(self, key: int) -> None:
        """A group without an open conversation has no server."""
        with self._lock:
            group = self._group_of.pop(key, None)
            if group is not None and group not in self._group_of.values():
                self._groups.pop(group, None)

    def step(self, unfinished: bool, stop: bool = False) -> list[Action] | None:
        """As of `RequestEngine`; servers that are left out are updated beside it."""
        if time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + RETRY_S
            left_out = (server for server in self._servers if server.out)
            self._start_updates(server for server in left_out if not server.updating.locked())
        return super().step(unfinished, stop)

    def ask(self, turn: Turn, seed: int, version: int, sampling: Sampling) -> Answer:
        """As of `RequestEngine`; what a server says that was left out meanwhile is not used."""
        retries = 0
        while True:
            server, client, served = self._server_of(turn.group)
            try:
                reply, more = client.ask(turn, seed, sampling)
            except TryAgain as error:
                retries += client.client.retries
                self._leave_out(server, client, "", error)
                continue
            except Refused:
                if server.client is client:
                    raise
                continue
            retries += more
            if server.client is not client:
                continue
            if wrong := self._wrong_with(reply):
                self._leave_out(server, client, "", wrong)
                continue
            version_L = self._version_L(reply, served)
            action = Action(turn.key, reply.tokens, reply.logp, version_L=version_L)
            return Answer(action, retries, {DECODED: len(reply.tokens)})

    def close(self) -> None:
        """Ends the threads, each after its request, and the connections."""
        self._closed = True
        clients = [server.client for server in self._servers if server.client is not None]
        for each in clients:
            each.client.stop()
        super().close()
        for each in clients:
            each.close()

    @property
    def _taking(self) -> list[_Server]:
        return [server for server in self._servers if not server.out]

    def _offer(self, folder: PublishedFolder, version: int) -> None:
        """Makes a policy the one that servers are given."""
        with self._lock:
            self._versions[folder.name] = version
            self._newest = folder

    def _update_all(self) -> None:
        """Gives all servers the newest policy side by side.

        Raises:
          NoServerLeft: none of them took it.
        """
        for thread in self._start_updates(self._servers):
            thread.join()
        if not self._taking:
            raise self._none_left()

    def _start_updates(self, servers: Iterable[_Server]) -> list[threading.Thread]:
        """Threads that update servers."""
        threads = [
            # Daemon: an update that hangs must not keep the process alive.
            threading.Thread(target=self._update, args=(server,), daemon=True)
            for server in servers
        ]
        for thread in threads:
            thread.start()
        return threads

    def _update(self, server: _Server, under_way: bool = False) -> None:
        """Gives a server the newest policy, unless it has it."""
        with server.updating:
            while self._newest is not None and not self._closed:
                folder = self._newest
                if server.serves == folder.name and not server.out:
                    return
                if not self._give(server, folder, under_way and not server.out):
                    return

    def _give(self, server: _Server, folder: PublishedFolder, under_way: bool) -> bool:
        """Has a server load a folder; whether it takes part then."""
        had = client = server.client
        try:
            if client is None:
                client = self._connect(server.url)
            update = WEIGHT_UPDATES[client.dialect_name]
            update.push(client.client, folder.path, folder.name, under_way)
            if not server.tried:
                client.try_once()
        except (TryAgain, ValueError) as error:
            self._leave_out(server, had, f"its update to {folder.name} failed", error)
            if client is not None:
                WEIGHT_UPDATES[client.dialect_name].give_up(client.client)
                client.close()
            return False
        with self._lock:
            if server.client is not had:  # it was left out meanwhile
                return False
            server.client, server.tried = client, True
            if server.out and folder is not self._newest:  # it takes part with the newest alone
                return True
            back = server.out not in ("", NEW)
            server.serves, server.out, server.said = folder.name, "", ""
        if back:
            self._log(f"{server.url} serves {folder.name} and takes part again")
        return True

    def _server_of(self, group: int) -> tuple[_Server, ActionClient, int]:
        """The server of a group's conversations, and the version that it serves.

        The first time it is one that is not being updated and that has the fewest groups.
        """
        with self._lock:
            server, taking = self._groups.get(group), self._taking
            if not taking:
                raise self._none_left()
            if server is None or server.out:
                counts = Counter(each.url for each in self._groups.values())
                server = min(taking, key=lambda each: (each.updating.locked(), counts[each.url]))
                self._groups[group] = server
            assert server.client is not None and server.serves is not None, "it takes part"
            return server, server.client, self._versions[server.serves]

    def _leave_out(
        self, server: _Server, client: ActionClient | None, what: str, why: object
    ) -> None:
        """Sends no conversation to a server, nor repeats requests to it.

        Args:
          client: that it had when it failed; where it has another one by now, it has come back.
          what: is logged once. why: in addition.
        """
        reason = f"{what}: {why}" if what else str(why)
        with self._lock:
            if server.client is not client:
                return
            is_new = not server.out or server.said != what
            server.client, server.serves, server.out, server.said = None, None, reason, what
            self._retry_at = time.monotonic() + RETRY_S
        if client is not None:
            client.client.stop()
        if is_new:
            self._log(f"{server.url} is left out until an update works: {reason}")

    def _none_left(self) -> NoServerLeft:
        reasons = "; ".join(f"{server.url}: {server.out}" for server in self._servers)
        return NoServerLeft(
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
        """The version of each token: what the server says, or where it says nothing, the one that
        it was given last before the request."""
        version_L = [version] * len(reply.tokens)
        for span in reply.versions:
            for place in range(span.start, min(span.end, len(version_L))):
                version_L[place] = self._versions[span.version]
        return version_L
