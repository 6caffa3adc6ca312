"""A worker's connection to its trainer."""

from __future__ import annotations

import contextlib
import http.client
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from seeupo_jax.errors import file_error
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
    PROGRAM,
    REFUSAL_TYPE,
    REGISTER,
    UNKNOWN_WORKER,
    WEIGHTS,
    Alive,
    Deliver,
    LeaseTickets,
    Leave,
    Message,
    Register,
    Status,
    TrainerAddress,
)
from seeupo_jax.rollout.stored_trajectories import with_json
from seeupo_jax.rollout.weights.versions import FOLDER, UnusableVersion, receive_version

_LOGGER = logging.getLogger(__name__)
_ALIVE_S = 2.0  # between two messages to the trainer
_RECENT_S = 1.0  # how old an answer may be that tells of the newest policy
_RETRY_S = 0.5  # between two tries to reach the trainer
_CONNECT_S, _ANSWER_S = 5.0, 60.0
_PART_BYTES = 2**23  # of a delivery's arrays; a larger one is cut
_CHUNK = 2**20


class TrainerLost(RuntimeError):
    """The trainer was not reached for too long; the text is a sentence."""

    exit_code = 1


class _Away(Exception):
    """The trainer is not reached now; the text says why."""


class _Gone(Exception):
    """The trainer has removed a version."""


class WorkClient:
    """A `WorkSource` of a trainer in another process, which may end and be restarted meanwhile.

    While the trainer is away there are no new tickets and no newer policies, and `deliver` waits.
    It is looked for every 0.5 s, at the address that it has then. Where it is not reached for
    `patience_s` every method raises `TrainerLost`; where it refuses this worker, ValueError; both
    are one sentence. A thread reports every 2 s that this worker is there.
    """

    def __init__(
        self,
        *,
        workdir: Path | None = None,
        address: str | None = None,
        name: str,
        sampling_hash: str,
        read_policy: Callable[[Path], Any],
        downloads: Path,
        patience_s: float = 600.0,
        log: Callable[[str], None] = _LOGGER.warning,
    ):
        """Prepares a connection, which the first call opens.

        Args:
          workdir: of the trainer, where workers.json tells its address and key and WORKDIR/weights
            is read; None: it is not shared.
          address: HOST:PORT of the trainer otherwise; the key is SEEUPO_ROLLOUT_KEY then.
          name: for people; workers of one name are told apart.
          sampling_hash: of this worker's configuration.
          read_policy: the parameters of a published version's folder; UnusableVersion where it is
            damaged or gone.
          downloads: a folder of this worker alone for policies, if the workdir is not shared.

        Raises:
          ValueError: the address has another form, or there is no key for it.
        """
        given = None if address is None else work_messages.given_address(address)
        self._workdir, self._given = workdir, given
        self._read, self._downloads = read_policy, downloads
        self._patience_s, self._log = patience_s, log
        self._name, self._worker = name, f"{name[:80]}/{secrets.token_hex(8)}"
        self._sampling_hash = sampling_hash
        self._names: dict[int, str] = {}  # of policies that this worker has had, by version
        self._version: int | None = None  # of the latest
        self._deliveries = 0
        self._damaged: str | None = None  # the version that this was logged of
        self._sending = threading.Lock()  # guards all that follows
        self._connection: http.client.HTTPConnection | None = None
        self._address: TrainerAddress | None = None
        self._held: dict[int, Ticket] = {}  # by number, with the members that are not acknowledged
        self._status, self._heard = Status(None, None, closed=False), time.monotonic()
        self._retry_at = 0.0
        self._failure: Exception | None = None
        self._ending = threading.Event()
        self._pulse: threading.Thread | None = None

    def lease(self, conversations: int) -> list[Ticket]:
        """See `WorkSource`; none while this worker has no policy, or one that is too old."""
        version = self._version
        with self._sending:
            self._raise_failure()
            if version is None:
                return []
            held, name = tuple(self._held.values()), self._names[version]
            message = LeaseTickets(self._worker, conversations, version, name, held)
            status = self._try(LEASE, message)
            if status is None:
                return []
            for ticket in status.tickets:
                mine = self._held.get(ticket.number)
                members = ticket.members if mine is None else mine.members + ticket.members
                self._held[ticket.number] = replace(ticket, members=members)
            return list(status.tickets)

    def deliver(self, finished: Sequence[FinishedMember], usage: Mapping[str, float]) -> None:
        """See `WorkSource`; returns when it is acknowledged."""
        amounts = {name: np.asarray(amount).item() for name, amount in usage.items()}
        for part in _in_parts(finished):
            self._deliveries += 1
            message = self._delivery(part, amounts)
            while not self._deliver(message):
                time.sleep(_RETRY_S)
            amounts = {}

    def newer_policy(self, than: int | None) -> PublishedPolicy | None:
        """See `WorkSource`; waits while a version is copied, and read.

        After the trainer was resumed from an older checkpoint its newest version may be lower than
        `than`, or equal with other parameters: that is returned, too.
        """
        name = self._refresh().policy
        if name is None or (than is not None and self._names.get(than) == name):
            return None
        version = int(name.partition("-")[0])
        try:
            folder = self._folder_of(name)
            params = self._read(folder)
        except (_Away, _Gone):
            return None
        except (OSError, UnusableVersion) as error:
            self._pass_over(name, error)
            return None
        self._names[version], self._version = name, version
        return PublishedPolicy(version, params)

    @property
    def closed(self) -> bool:
        """See `WorkSource`."""
        return self._refresh().closed

    def close(self) -> None:
        """Leaves the trainer, which lets others have what was not delivered."""
        self._ending.set()
        if self._pulse is not None:
            self._pulse.join(_ANSWER_S)
        with self._sending:
            if self._failure is None and self._connection is not None:
                with contextlib.suppress(_Away, ValueError):
                    self._send(LEAVE, Leave(self._worker))
            self._hang_up()

    def _delivery(self, finished: Sequence[FinishedMember], usage: dict[str, float]) -> Deliver:
        trajectories = with_json([each.trajectory for each in finished])
        pairs = zip(finished, trajectories, strict=True)
        members = tuple(replace(each, trajectory=trajectory) for each, trajectory in pairs)
        sampled = set[int]().union(*map(versions_of, trajectories))
        names = {version: self._names[version] for version in sampled & self._names.keys()}
        return Deliver(self._worker, self._deliveries, members, usage, names)

    def _deliver(self, message: Deliver) -> bool:
        """Tries to deliver; returns whether it is acknowledged."""
        with self._sending:
            if self._try(DELIVER, message) is None:
                return False
            for each in message.finished:
                ticket = self._held.pop(each.number, None)
                left = () if ticket is None else set(ticket.members) - {each.member}
                if ticket is not None and left:
                    members = tuple(member for member in ticket.members if member in left)
                    self._held[each.number] = replace(ticket, members=members)
            return True

    def _refresh(self) -> Status:
        """The trainer's status, at most a second old unless it is away."""
        with self._sending:
            if time.monotonic() - self._heard > _RECENT_S or self._pulse is None:
                self._try(ALIVE, Alive(self._worker))
            return self._status

    def _report(self) -> None:
        """Tells the trainer that this worker is there, until it ends or is refused."""
        while not self._ending.wait(_ALIVE_S):
            with self._sending:
                if time.monotonic() - self._heard < _ALIVE_S:
                    continue
                try:
                    self._try(ALIVE, Alive(self._worker))
                except (TrainerLost, ValueError):  # kept for the worker's own thread
                    return

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _try(self, path: str, message: Message) -> Status | None:
        """The answer to a message; None: the trainer is away.

        Raises:
          TrainerLost: it has been for too long. ValueError: it refuses this worker.
        """
        self._raise_failure()
        if time.monotonic() < self._retry_at:
            return None
        try:
            return self._send(path, message)
        except _Away as away:
            self._retry_at = time.monotonic() + _RETRY_S
            silent_s = time.monotonic() - self._heard
            if silent_s <= self._patience_s:
                return None
            self._failure = TrainerLost(
                f"the trainer was not reached for {silent_s:.0f} s ({away}); allowed: at most"
                f" {self._patience_s:g} s."
            )
        except ValueError as error:
            self._failure = error
        raise self._failure

    def _send(self, path: str, message: Message) -> Status:
        """The answer to a message; registers where the trainer does not know this worker."""
        status = self._exchange(path, message)
        if status is None:
            held = tuple(self._held.values())
            about = Register(self._worker, self._name, self._sampling_hash, PROGRAM, held)
            self._exchange(REGISTER, about)
            status = self._exchange(path, message)
        if status is None:
            raise _Away("it does not know this worker")
        self._status, self._heard = status, time.monotonic()
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._report, name="work-client", daemon=True)
            self._pulse.start()
        return status

    def _exchange(self, path: str, message: Message) -> Status | None:
        """The answer to a message; None: the trainer asks this worker to register.

        Raises:
          _Away: there is no answer. ValueError: a refusal.
        """
        status, kind, data = self._request(path, work_messages.pack(message))
        if status == 200 and kind == CONTENT_TYPE:
            try:
                return work_messages.unpack(data, Status)
            except ValueError as error:
                raise _Away(str(error)) from None
        if kind != REFUSAL_TYPE or status not in (400, 401, 403, 413, UNKNOWN_WORKER):
            self._hang_up()
            raise _Away(f"what answers there says {status}")
        if status == UNKNOWN_WORKER:
            return None
        used = self._address
        if status == 401 and self._find() != used:
            self._hang_up()
            raise _Away("it was restarted")
        raise ValueError(data.decode(errors="replace").strip()[:1000])

    def _request(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, type and content of an answer."""
        try:
            if self._connection is None or self._address is None:
                self._connection, self._address = self._connect()
            head = {"Authorization": f"Bearer {self._address.key}"}
            self._connection.request("POST", path, body, head)
            answer = self._connection.getresponse()
            return answer.status, answer.headers.get("Content-Type", ""), answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._hang_up()
            raise _Away(str(error) or type(error).__name__) from None

    def _find(self) -> TrainerAddress | None:
        """Where the trainer is now."""
        if self._workdir is None:
            return self._given
        return work_messages.read_address(self._workdir)

    def _connect(self) -> tuple[http.client.HTTPConnection, TrainerAddress]:
        address = self._find()
        if address is None:
            raise _Away(f"there is no {work_messages.ADDRESS_FILE} in {self._workdir}")
        connection = http.client.HTTPConnection(address.host, address.port, timeout=_CONNECT_S)
        connection.connect()
        connection.sock.settimeout(_ANSWER_S)
        return connection, address

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _folder_of(self, name: str) -> Path:
        """The folder of a version; it is copied where the workdir is not shared."""
        version = int(name.partition("-")[0])
        if self._workdir is not None:
            return self._workdir / FOLDER / str(version)
        return receive_version(self._downloads, version, lambda *file: self._fetch(name, *file))

    def _pass_over(self, name: str, error: Exception) -> None:
        """Logs once what is wrong with a version, unless the trainer has removed it."""
        removed = isinstance(error, UnusableVersion) and error.gone
        if not removed and self._damaged != name:
            self._damaged = name
            self._log(f"version {name} of the policy cannot be read: {error}; it is tried again.")

    def _fetch(self, name: str, file: str, path: Path) -> None:
        """Copies a file of a version; continues where a connection ended."""
        path.touch()
        while not self._fetch_rest(f"{WEIGHTS}{name}/{file}", path):
            if self._ending.is_set() or self._refresh().policy != name:
                raise _Gone
            time.sleep(_RETRY_S)

    def _fetch_rest(self, place: str, path: Path) -> bool:
        """Appends what a file lacks, over a connection of its own; whether it is whole then."""
        try:
            with contextlib.ExitStack() as opened:
                connection, address = self._connect()
                opened.callback(connection.close)
                rest = f"bytes={path.stat().st_size}-"
                head = {"Authorization": f"Bearer {address.key}", "Range": rest}
                connection.request("GET", place, headers=head)
                answer = connection.getresponse()
                if answer.status == 404:
                    raise _Gone
                if answer.status not in (200, 206):
                    return False
                left, file = (
                    int(answer.headers["Content-Length"]),
                    opened.enter_context(path.open("ab")),
                )
                while left > 0 and (chunk := answer.read(min(left, _CHUNK))):
                    file.write(chunk)
                    left -= len(chunk)
                return left == 0
        except (_Away, OSError, http.client.HTTPException) as error:
            if file_error(error) is not None:  # of this machine's disk
                raise
            return False


def _in_parts(finished: Sequence[FinishedMember]) -> Iterator[list[FinishedMember]]:
    """Cuts a delivery where its arrays are too large for one message; at least one part."""
    part: list[FinishedMember] = []
    size = 0
    for each in finished:
        if part and size > _PART_BYTES:
            yield part
            part, size = [], 0
        part.append(each)
        for segment in each.trajectory.segments:
            experts = segment.expert_LG
            size += 4 * segment.tokens_L.nbytes + (0 if experts is None else experts.nbytes)
    yield part
