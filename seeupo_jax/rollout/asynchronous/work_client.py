"""A worker's connection to its trainer."""

from __future__ import annotations

import contextlib
import http.client
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from seeupo_jax.checkpoint.manifest import DamagedCheckpoint
from seeupo_jax.rollout.asynchronous import work_messages
from seeupo_jax.rollout.asynchronous.work import (
    FinishedMember,
    PublishedPolicy,
    Ticket,
    versions_of,
)
from seeupo_jax.rollout.asynchronous.work_messages import (
    ALIVE,
    CONTENT_TYPE,
    DELIVER,
    LEASE,
    LEAVE,
    REGISTER,
    UNKNOWN_WORKER,
    WEIGHTS,
    Alive,
    Deliver,
    Lease,
    Leave,
    Message,
    Register,
    Status,
    TrainerAddress,
)
from seeupo_jax.rollout.stored_trajectories import with_json
from seeupo_jax.rollout.weights.reading import ReadPolicy
from seeupo_jax.rollout.weights.versions import receive_version

_LOGGER = logging.getLogger(__name__)
_ALIVE_S = 2.0  # between two messages to the trainer
_RECENT_S = 1.0  # how old an answer may be that tells of the newest policy
_RETRY_S = 0.5  # between two tries to reach the trainer
_CONNECT_S, _ANSWER_S = 5.0, 60.0
_CHUNK = 2**20


class TrainerLost(RuntimeError):
    """The trainer was not reached for too long; the text is a sentence."""

    exit_code = 1


class _Away(Exception):
    """The trainer is not reached now; the text says why."""


class _Gone(Exception):
    """The trainer has removed a version."""


class Reader(Protocol):
    """As `PolicyReader`."""

    def read(self) -> ReadPolicy | None:
        """The newest version of its folder; None: it was read before, or there is none."""
        ...


@dataclass
class _Delivery:
    """What is to be handed over. number: from 1."""

    number: int
    finished: tuple[FinishedMember, ...]
    usage: dict[str, float]


class WorkClient:
    """A `WorkSource` of a trainer in another process, which may end and be restarted meanwhile.

    While the trainer is away nothing waits: there are no new tickets, and what is delivered is kept
    until it is acknowledged. Where the trainer is not reached for `patience_s` every method raises
    `TrainerLost`; where it refuses this worker, ValueError; both are one sentence.

    Messages go out one at a time, most of them from a thread of its own, which also reports every
    2 s that this worker is there.
    """

    def __init__(
        self,
        find: Callable[[], TrainerAddress | None],
        reader: Reader,
        *,
        name: str,
        sampling_hash: str,
        program: str,
        downloads: Path | None = None,
        patience_s: float = 600.0,
        log: Callable[[str], None] = _LOGGER.warning,
    ):
        """Prepares a connection; `register` opens it.

        Args:
          find: the trainer's address now; None: it has none. See `work_messages.read_address`.
          reader: of published policies: of `downloads`, or of the trainer's WORKDIR/weights.
          name: for people.
          sampling_hash, program: of this worker's configuration, and the version of this program.
          downloads: a folder of this process alone that policies are copied to; None: the trainer's
            folder is shared.
        """
        self._find, self._reader, self._downloads = find, reader, downloads
        self._patience_s, self._log = patience_s, log
        self._name, self._worker = name, f"{name[:80]}/{secrets.token_hex(8)}"
        self._sampling_hash, self._program = sampling_hash, program
        self._sending = threading.RLock()  # guards the connection; held before `_state`
        self._connection: http.client.HTTPConnection | None = None
        self._address: TrainerAddress | None = None
        self._state = threading.Condition()  # guards all that follows
        self._held: dict[int, Ticket] = {}  # by number, with the members that are not acknowledged
        self._outbox: deque[_Delivery] = deque()
        self._deliveries = 0
        self._status, self._heard = Status(None, None, closed=False), time.monotonic()
        self._retry_at = 0.0
        self._failure: Exception | None = None
        self._ending = False
        self._names: dict[int, str] = {}  # of policies that this worker has had, by version
        self._version: int | None = None  # of the latest
        self._fetched: str | None = None  # the name of the version that was downloaded last
        self._fetching: threading.Thread | None = None
        self._courier = threading.Thread(target=self._carry, name="work-client", daemon=True)

    def register(self) -> None:
        """Waits until the trainer is there and has accepted this worker.

        Raises:
          TrainerLost: it was not reached within the patience. ValueError: it refuses this worker.
        """
        while True:
            try:
                self._send(REGISTER, self._registration())
                break
            except _Away as away:
                self._check_patience(away)
                time.sleep(_RETRY_S)
        self._courier.start()

    def lease(self, conversations: int) -> list[Ticket]:
        """See `WorkSource`; none while this worker has no policy, or one that is too old."""
        self._raise_failure()
        version = self._version
        if version is None or time.monotonic() < self._retry_at:
            return []
        with self._sending:
            held = self._playing()
            status = self._try(LEASE, Lease(self._worker, conversations, version, held))
            if status is None:
                return []
            with self._state:
                for ticket in status.tickets:
                    mine = self._held.get(ticket.number)
                    members = ticket.members if mine is None else mine.members + ticket.members
                    self._held[ticket.number] = replace(ticket, members=members)
        return list(status.tickets)

    def deliver(self, finished: Sequence[FinishedMember], usage: Mapping[str, float]) -> None:
        """See `WorkSource`; does not wait until it is acknowledged."""
        self._raise_failure()
        amounts = {name: np.asarray(amount).item() for name, amount in usage.items()}
        with self._state:
            self._deliveries += 1
            self._outbox.append(_Delivery(self._deliveries, tuple(finished), amounts))
            self._state.notify_all()

    def newer_policy(self, than: int | None) -> PublishedPolicy | None:
        """See `WorkSource`.

        After the trainer was resumed from an older checkpoint its newest version may be lower than
        `than`, or equal with other parameters: that is returned, too.
        """
        self._raise_failure()
        self._refresh()
        name = self._status.policy
        if name is None or (than is not None and self._names.get(than) == name):
            return None
        if self._downloads is not None and not self._is_fetched(name):
            return None
        read = self._reader.read()
        if read is None:
            return None
        with self._state:
            self._names[read.version], self._version = read.name, read.version
        return PublishedPolicy(read.version, read.params)

    @property
    def closed(self) -> bool:
        """See `WorkSource`."""
        self._raise_failure()
        self._refresh()
        return self._status.closed

    def close(self, wait_s: float = 30.0) -> None:
        """Hands over what is not acknowledged, for so long at most, and leaves the trainer."""
        with self._state:
            if self._courier.is_alive():
                self._state.wait_for(lambda: not self._outbox or self._failure, wait_s)
            self._ending = True
            self._state.notify_all()
        if self._courier.is_alive():
            self._courier.join(_ANSWER_S)
            if self._failure is None:
                with contextlib.suppress(_Away, ValueError):
                    self._send(LEAVE, Leave(self._worker))
        with self._sending:
            self._hang_up()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _refresh(self) -> None:
        """Asks for the newest policy, unless an answer is recent or the trainer is away."""
        now = time.monotonic()
        if now - self._heard > _RECENT_S and now >= self._retry_at:
            self._try(ALIVE, Alive(self._worker))

    def _check_patience(self, away: _Away) -> None:
        silent_s = time.monotonic() - self._heard
        if silent_s > self._patience_s:
            raise TrainerLost(
                f"the trainer was not reached for {silent_s:.0f} s ({away}); allowed: at most"
                f" {self._patience_s:g} s."
            )

    def _try(self, path: str, message: Message) -> Status | None:
        """The answer to a message; None: the trainer is away."""
        try:
            return self._send(path, message)
        except _Away as away:
            self._retry_at = time.monotonic() + _RETRY_S
            self._check_patience(away)
            return None

    def _send(self, path: str, message: Message) -> Status:
        """The answer to a message; registers where the trainer does not know this worker."""
        with self._sending:
            status = self._exchange(path, message)
            if status is None:
                self._exchange(REGISTER, self._registration())
                status = self._exchange(path, message)
            if status is None:
                raise _Away("it does not know this worker")
            with self._state:
                self._status, self._heard = status, time.monotonic()
            return status

    def _registration(self) -> Register:
        held = self._playing()
        return Register(self._worker, self._name, self._sampling_hash, self._program, held)

    def _playing(self) -> tuple[Ticket, ...]:
        with self._state:
            return tuple(self._held.values())

    def _exchange(self, path: str, message: Message) -> Status | None:
        """The answer to a message; None: the trainer asks this worker to register.

        Raises:
          _Away: there is no answer. ValueError: a refusal.
        """
        status, kind, data = self._request("POST", path, work_messages.pack(message))
        if status == 200 and kind == CONTENT_TYPE:
            try:
                return work_messages.unpack(data, Status)
            except ValueError as error:
                self._hang_up()
                raise _Away(str(error)) from None
        if status == UNKNOWN_WORKER:
            return None
        if status == 401 and self._has_moved():
            raise _Away("it was restarted")
        if 400 <= status < 500 and status != 404:
            raise ValueError(data.decode(errors="replace").strip()[:1000])
        self._hang_up()
        raise _Away(f"something else answers there, with status {status}")

    def _request(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, type and content of an answer."""
        try:
            if self._connection is None:
                self._connection, self._address = self._connect()
            head = {"Authorization": f"Bearer {self._address.key}"}
            self._connection.request(method, path, body, head)
            answer = self._connection.getresponse()
            return answer.status, answer.headers.get("Content-Type", ""), answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._hang_up()
            raise _Away(str(error) or type(error).__name__) from None

    def _connect(self) -> tuple[http.client.HTTPConnection, TrainerAddress]:
        address = self._find()
        if address is None:
            raise _Away("there is no WORKDIR/workers.json")
        connection = http.client.HTTPConnection(address.host, address.port, timeout=_CONNECT_S)
        connection.connect()
        connection.sock.settimeout(_ANSWER_S)
        return connection, address

    def _has_moved(self) -> bool:
        """Whether the trainer's address or key are others than those that were used."""
        used = self._address
        self._hang_up()
        return self._find() != used

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _carry(self) -> None:
        """Hands over deliveries in their order, and reports that this worker is there."""
        try:
            while True:
                with self._state:
                    wait_s = max(0.0, self._retry_at - time.monotonic())
                    if not self._ending and (wait_s or not self._outbox):
                        self._state.wait(wait_s or _ALIVE_S)
                    if self._ending:
                        return
                    delivery = self._outbox[0] if self._outbox else None
                if time.monotonic() < self._retry_at:
                    continue
                if delivery is None:
                    self._try(ALIVE, Alive(self._worker))
                elif self._try(DELIVER, self._message(delivery)) is not None:
                    self._acknowledge(delivery)
        except Exception as error:
            with self._state:
                self._failure = error
                self._state.notify_all()

    def _message(self, delivery: _Delivery) -> Deliver:
        trajectories = with_json([each.trajectory for each in delivery.finished])
        finished = tuple(
            replace(each, trajectory=trajectory)
            for each, trajectory in zip(delivery.finished, trajectories, strict=True)
        )
        versions = set[int]().union(*map(versions_of, trajectories))
        policies = {number: self._names[number] for number in versions & self._names.keys()}
        return Deliver(self._worker, delivery.number, finished, delivery.usage, policies)

    def _acknowledge(self, delivery: _Delivery) -> None:
        with self._state:
            self._outbox.popleft()
            for each in delivery.finished:
                ticket = self._held.pop(each.number, None)
                if ticket is None:
                    continue
                left = tuple(member for member in ticket.members if member != each.member)
                if left:
                    self._held[each.number] = replace(ticket, members=left)
            self._state.notify_all()

    def _is_fetched(self, name: str) -> bool:
        """Whether a version was downloaded; if not, that begins in the background."""
        if self._fetching is None or not self._fetching.is_alive():
            if self._fetched == name:
                return True
            self._fetching = threading.Thread(target=self._fetch, args=(name,), daemon=True)
            self._fetching.start()
        return False

    def _fetch(self, name: str) -> None:
        assert self._downloads is not None
        download = _Download(self._connect, name, lambda: self._ending)
        try:
            receive_version(self._downloads, name, download.fetch)
            self._fetched = name
        except _Gone:
            pass  # there is a newer one
        except (OSError, DamagedCheckpoint) as error:
            self._log(f"version {name} of the policy could not be copied: {error}; it is retried.")
            time.sleep(_RETRY_S)


class _Download(NamedTuple):
    """Copies files of a version from the trainer. ending: whether to give up."""

    connect: Callable[[], tuple[http.client.HTTPConnection, TrainerAddress]]
    name: str
    ending: Callable[[], bool]

    def fetch(self, file: str, path: Path) -> None:
        """Copies a file, continued where the trainer was away."""
        path.touch()
        while not self._fetch_rest(file, path):
            if self.ending():
                raise _Gone
            time.sleep(_RETRY_S)

    def _fetch_rest(self, file: str, path: Path) -> bool:
        """Appends what a file lacks; whether it is complete then."""
        connection: Any = None
        try:
            connection, address = self.connect()
            head = {
                "Authorization": f"Bearer {address.key}",
                "Range": f"bytes={path.stat().st_size}-",
            }
            connection.request("GET", f"{WEIGHTS}{self.name}/{file}", headers=head)
            answer = connection.getresponse()
            if answer.status == 404:
                raise _Gone
            if answer.status not in (200, 206):
                return False
            left = int(answer.headers["Content-Length"])
            with path.open("ab") as target:
                while left > 0 and (chunk := answer.read(min(left, _CHUNK))):
                    target.write(chunk)
                    left -= len(chunk)
            return left == 0
        except (_Away, ConnectionError, TimeoutError, http.client.HTTPException):
            return False
        finally:
            if connection is not None:
                connection.close()
