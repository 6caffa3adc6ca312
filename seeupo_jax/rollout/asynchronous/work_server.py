"""The trainer's side of its workers' connections: tickets and weights over HTTP."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from seeupo_jax.checkpoint.manifest import read_manifest
from seeupo_jax.parallel.listening import address_towards
from seeupo_jax.rollout.asynchronous import work_messages
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import FinishedMember, Ticket, versions_of
from seeupo_jax.rollout.asynchronous.work_http import ConnectionLimits, HttpServer, Refusal, Service
from seeupo_jax.rollout.asynchronous.work_messages import (
    ADDRESS_FILE,
    MESSAGES,
    PROGRAM,
    UNKNOWN_WORKER,
    WEIGHTS,
    Deliver,
    LeaseTickets,
    Leave,
    Message,
    Register,
    Status,
)
from seeupo_jax.rollout.weights.versions import FOLDER, identity

_LOGGER = logging.getLogger(__name__)
_LIMITS = ConnectionLimits()
_GRACE_S = 5.0  # that a worker whose connection ended has to open another one
_LOOK_S = 0.5  # between two looks for workers that are lost
_ELSEWHERE = "192.0.2.1", 9  # of no machine (RFC 5737): the way to it is the one to others


@dataclass
class _Worker:
    """A process that has registered.

    heard: when, in seconds of the monotonic clock. delivery: the number of its last delivery.
    playing: it is neither lost, nor has it left. informed: that the run is over.
    """

    name: str
    heard: float
    delivery: int = 0
    playing: bool = True
    informed: bool = False


class WorkServer:
    """Serves a ticket book to workers in other processes, from `start` to `close`.

    A worker that is not heard for `patience_s`, or whose connection ended and that does not come
    back within 5 s, is lost: its conversations are for others. It may return at any time, and
    what it delivers then counts where it is still missing.
    """

    def __init__(
        self,
        book: TicketBook,
        workdir: Path,
        sampling_hash: str,
        *,
        max_lag: int,
        patience_s: float = 60.0,
        limits: ConnectionLimits = _LIMITS,
        log: Callable[[str], None] = _LOGGER.warning,
    ):
        """Prepares a server; it does not listen yet.

        Args:
          workdir: WORKDIR/workers.json is written there, and WORKDIR/weights is served.
          sampling_hash: of the run; a worker with another one, or of another version of this
            program, is refused.
          max_lag: a worker with version v plays iterations up to v + max_lag + 1.
          limits: of connections.
          log: takes a sentence on each worker that comes, leaves or is lost.
        """
        self._book, self._workdir, self._limits, self._log = book, workdir, limits, log
        self._sampling_hash, self._max_lag, self._patience_s = sampling_hash, max_lag, patience_s
        self._workers: dict[str, _Worker] = {}  # by what tells them apart
        self._lock = threading.Lock()  # guards workers, published and closed
        self._published: dict[int, str] = {}  # names of versions, the newest last
        self._closed = False
        self._http: HttpServer | None = None
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._watch_workers, name="workers", daemon=True)

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listens, and tells workers where in WORKDIR/workers.json; returns HOST:PORT.

        Args:
          host: loopback serves workers of this machine; 0.0.0.0 or ::, all interfaces, for others.
          port: 0: a free one.

        Raises:
          ValueError: the address is not available, or SEEUPO_ROLLOUT_KEY cannot be sent.
        """
        try:
            http = HttpServer(host, port, self._limits)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"config.rollout.port: {host}:{port} cannot be listened on: {error}."
            ) from None
        known_as = _reached_at() if host in ("", "0.0.0.0", "::") else host
        try:
            key = work_messages.write_address(self._workdir, known_as, http.port)
        except BaseException:
            http.close()
            raise
        self._http = http
        http.serve(Service(key, self._answer, self._weight_file, self._hung_up))
        self._watch.start()
        return f"{known_as}:{http.port}"

    def publish(self, version: int) -> None:
        """Offers a version that is whole in WORKDIR/weights to all workers, as the newest."""
        manifest = read_manifest(epath.Path(self._workdir / FOLDER / str(version)))
        name = f"{version}-{identity(manifest)[:12]}"
        with self._lock:
            newer = [number for number in self._published if number >= version]
            for number in newer:
                del self._published[number]
            self._published[version] = name

    def finish(self, wait_s: float = 10.0) -> None:
        """The run is over; waits until the workers that are there know it, so long at most."""
        with self._lock:
            self._closed = True
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not self._all_informed():
            time.sleep(0.05)

    def close(self) -> None:
        """Ends all threads and connections, and removes WORKDIR/workers.json."""
        self._ending.set()
        if self._http is not None:
            self._watch.join()
            (self._workdir / ADDRESS_FILE).unlink(missing_ok=True)
            self._http.close()

    def _answer(self, path: str, body: bytes) -> tuple[bytes, str]:
        """The answer to a message, and who sent it."""
        kind = MESSAGES.get(path)
        if kind is None:
            raise Refusal(404, f"the path: got {path[:80]!r}; allowed: {', '.join(MESSAGES)}.")
        try:
            message = work_messages.unpack(body, kind, self._limits.body_bytes)
            return work_messages.pack(self._receive(message)), message.worker
        except ValueError as error:
            raise Refusal(400, str(error)) from None

    def _receive(self, message: Message) -> Status:
        if isinstance(message, Register):
            self._register(message)
        delivered_before = self._hear(message)
        if isinstance(message, LeaseTickets):
            return self._status(message.worker, self._lease(message))
        if isinstance(message, Deliver):
            self._deliver(message, {} if delivered_before else message.usage)
        if isinstance(message, Leave):
            self._lose(message.worker, "has left")
        return self._status(message.worker)

    def _register(self, message: Register) -> None:
        for what, got, ours in (
            ("a configuration whose sampling is", message.sampling_hash, self._sampling_hash),
            ("version", message.program, PROGRAM),
        ):
            if got != ours:
                raise Refusal(
                    403,
                    f"worker {message.name}: got {what} {got}; allowed: that of the trainer,"
                    f" {ours}. Start it with the trainer's program and configuration.",
                )
        with self._lock:
            usual = _Worker(message.name, 0.0, playing=False)
            is_new = message.worker not in self._workers
            worker = self._workers.setdefault(message.worker, usual)
            returns, worker.playing, worker.heard = not worker.playing, True, time.monotonic()
        if returns:
            self._log(f"worker {message.name} has come{'' if is_new else ' back'}.")
        self._book.hold(message.worker, message.held)

    def _hear(self, message: Message) -> bool:
        """Notes that a worker is there; whether this delivery was received before."""
        with self._lock:
            worker = self._workers.get(message.worker)
            if worker is None or not worker.playing:
                raise Refusal(UNKNOWN_WORKER, "the worker: got one that has not registered.")
            worker.heard = time.monotonic()
            if not isinstance(message, Deliver):
                return False
            return message.number <= worker.delivery

    def _lease(self, message: LeaseTickets) -> list[Ticket]:
        """The tickets that a worker may play with the policy that it has."""
        self._book.hold(message.worker, message.held)
        if not self._published or not self._has_published(message.version, message.policy):
            return []
        up_to = message.version + self._max_lag + 1
        return self._book.lease(message.worker, message.conversations, up_to)

    def _deliver(self, message: Deliver, usage: dict[str, float]) -> None:
        if not self._published:
            raise Refusal(503, "the run: has no policy yet; try again.")
        foreign = {
            (each.number, each.member)
            for each in message.finished
            if self._is_foreign(each, message.policies)
        }
        own = [each for each in message.finished if (each.number, each.member) not in foreign]
        self._book.deliver(message.worker, own, usage)
        self._workers[message.worker].delivery = message.number
        if foreign:
            self._book.put_back(message.worker, foreign)
            name = self._workers[message.worker].name
            self._log(
                f"worker {name}: {len(foreign)} conversations are sampled again: their policies"
                " are not of this run, which was resumed from an older checkpoint."
            )

    def _is_foreign(self, finished: FinishedMember, policies: dict[int, str]) -> bool:
        """Whether policies sampled that are not of this run; `policies`: their names by version."""
        sampled = versions_of(finished.trajectory)
        return not all(self._has_published(each, policies.get(each)) for each in sampled)

    def _has_published(self, version: int, name: str | None) -> bool:
        """Whether a policy is of this run, as far as is known.

        It is not if it is newer than all of this run's, or of another name than that version's: the
        run was resumed from an older checkpoint. Older ones, from before it was resumed, may be.
        """
        with self._lock:
            if version in self._published:
                return name in (None, self._published[version])
            return version < max(self._published, default=0)

    def _status(self, worker: str, tickets: Sequence[Ticket] = ()) -> Status:
        with self._lock:
            self._workers[worker].informed = self._closed
            version = next(reversed(self._published), None)
            name = None if version is None else self._published[version]
            return Status(version, name, self._closed, tuple(tickets))

    def _all_informed(self) -> bool:
        with self._lock:
            return all(worker.informed or not worker.playing for worker in self._workers.values())

    def _weight_file(self, path: str) -> Path:
        """The file of WORKDIR/weights that a path names."""
        name, _, file = path.removeprefix(WEIGHTS).partition("/")
        with self._lock:
            found = [version for version, known in self._published.items() if known == name]
        if not found or not path.startswith(WEIGHTS) or Path(file).name != file:
            raise Refusal(404, "weights: got a version or file that is not there.")
        return self._workdir / FOLDER / str(found[0]) / file

    def _hung_up(self, worker: str) -> None:
        """A connection of a worker has ended."""
        with self._lock:
            ends = time.monotonic() + _GRACE_S - self._patience_s
            self._workers[worker].heard = min(self._workers[worker].heard, ends)

    def _lose(self, worker: str, how: str) -> None:
        with self._lock:
            self._workers[worker].playing = False
            name = self._workers[worker].name
        lost = self._book.lose(worker)
        what = f": {lost} conversations that it played are for others" if lost else ""
        self._log(f"worker {name} {how}{what}.")

    def _watch_workers(self) -> None:
        while not self._ending.wait(_LOOK_S):
            before = time.monotonic() - self._patience_s
            with self._lock:
                silent = [
                    name
                    for name, worker in self._workers.items()
                    if worker.playing and worker.heard < before
                ]
            for worker in silent:
                self._lose(worker, "does not answer")


def _reached_at() -> str:
    """What other machines reach this one by: not every network resolves its name."""
    try:
        return address_towards(*_ELSEWHERE)
    except OSError:  # no way to other machines
        return socket.gethostname()
