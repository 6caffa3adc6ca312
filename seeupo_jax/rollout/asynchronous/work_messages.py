"""What a trainer and its workers say to each other over HTTP: messages, and where to send them.

Messages are packed as `stored_trajectories` does; refusals are sentences. Requests
have the run's key as `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import seeupo_jax
from seeupo_jax.durable_files import make_folder, move_file
from seeupo_jax.parallel.listening import split_address
from seeupo_jax.rollout import stored_trajectories
from seeupo_jax.rollout.asynchronous.work import FinishedMember, Ticket
from seeupo_jax.types import Segment, Trajectory

PROGRAM = seeupo_jax.__version__  # which a worker must share with its trainer
KEY_VARIABLE = "SEEUPO_ROLLOUT_KEY"
ADDRESS_FILE = "workers.json"  # in the run's workdir
# Of answers and of refusals: nothing else has them that answers at the address.
CONTENT_TYPE, REFUSAL_TYPE = "application/x-seeupo-work", "text/x-seeupo-refusal; charset=utf-8"
REGISTER, LEASE, DELIVER, ALIVE, LEAVE = "/register", "/lease", "/deliver", "/alive", "/leave"
WEIGHTS = "/weights/"  # then VERSION-DIGEST/FILE
UNKNOWN_WORKER = 410  # the status that asks a worker to register, again or at all


@dataclass(frozen=True)
class Register:
    """A worker asks for work. held: tickets that it plays, with the members it has not delivered.

    worker: that no other one has. name: for people.
    """

    worker: str
    name: str
    sampling_hash: str
    program: str
    held: tuple[Ticket, ...]


@dataclass(frozen=True)
class LeaseTickets:
    """As `WorkSource.lease`.

    version, policy: of the policy that the worker has, and its name. held: as of `Register`.
    """

    worker: str
    conversations: int
    version: int
    policy: str
    held: tuple[Ticket, ...]


@dataclass(frozen=True)
class Deliver:
    """As `WorkSource.deliver`.

    number: of the worker's delivery, from 1; sent again until it is answered.
    policies: names of the published versions that sampled, by version.
    """

    worker: str
    number: int
    finished: tuple[FinishedMember, ...]
    usage: dict[str, float]
    policies: dict[int, str]


@dataclass(frozen=True)
class Alive:
    """A worker is there."""

    worker: str


@dataclass(frozen=True)
class Leave:
    """A worker ends; what it has not delivered is for others."""

    worker: str


@dataclass(frozen=True)
class Status:
    """The answer to every message.

    version, policy: of the newest published policy, and its name; None: there is none yet.
    closed: the run is over. tickets: that were leased.
    """

    version: int | None
    policy: str | None
    closed: bool
    tickets: tuple[Ticket, ...] = ()


MESSAGES = {REGISTER: Register, LEASE: LeaseTickets, DELIVER: Deliver, ALIVE: Alive, LEAVE: Leave}
Message = Register | LeaseTickets | Deliver | Alive | Leave
_TYPES = (*MESSAGES.values(), Status, Ticket, FinishedMember, Trajectory, Segment)


def pack(message: Message | Status) -> bytes:
    """A message as bytes."""
    return stored_trajectories.pack(message, _TYPES)


def unpack(data: bytes, kind: type, most: int | None = None) -> Any:
    """The message of a kind that was packed.

    Args:
      most: bytes that it may have, decompressed; None: whatever it has.

    Raises:
      ValueError: other bytes than those; the text is a sentence.
    """
    try:
        message = stored_trajectories.unpack(data, _TYPES, most)
    except stored_trajectories.Damaged:
        raise ValueError("the body: its bytes changed on the way.") from None
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the body: got {error}; allowed: a message of this program.") from None
    found = _find_mistake(message, kind)
    if found is not None:
        raise ValueError(f"the body: got {found}; allowed: a whole {kind.__name__} message.")
    return message


def _find_mistake(message: Any, kind: type) -> str | None:
    """What of a message is not as this program writes it; None: nothing."""
    if type(message) is not kind:
        return f"a {type(message).__name__}"
    checks = _FIELDS | ({"version": _is_version} if kind is Status else {})
    for name, value in vars(message).items():
        if not checks[name](value):
            return f"another {name}"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 1000


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_version(value: Any) -> bool:
    return value is None or _is_count(value)


def _are_tickets(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        type(each) is Ticket
        and all(map(_is_count, (each.number, each.iteration, each.group)))
        and isinstance(each.task_id, str)
        and isinstance(each.members, tuple)
        and all(map(_is_count, each.members))
        for each in value
    )


def _are_finished(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        type(each) is FinishedMember
        and _is_count(each.number)
        and _is_count(each.member)
        and _is_trajectory(each.trajectory)
        for each in value
    )


def _is_trajectory(value: Any) -> bool:
    return (
        type(value) is Trajectory
        and isinstance(value.task_id, str)
        and isinstance(value.reward, int | float)
        and isinstance(value.info, dict)
        and isinstance(value.segments, tuple)
        and all(map(_is_segment, value.segments))
    )


def _is_segment(value: Any) -> bool:
    if type(value) is not Segment:
        return False
    dtypes = {"tokens_L": np.int32, "turn_L": np.int32, "logp_L": np.float32}
    if value.version_L is not None:
        dtypes["version_L"] = np.int32
    arrays = [getattr(value, name) for name in dtypes]
    return all(
        isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1
        for array, dtype in zip(arrays, dtypes.values(), strict=True)
    ) and all(len(array) == len(arrays[0]) for array in arrays)


def _is_usage(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(amount, int | float) for name, amount in value.items()
    )


def _are_policies(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_count(version) and _is_text(name) for version, name in value.items()
    )


_FIELDS = {
    **dict.fromkeys(("worker", "name", "sampling_hash", "program"), _is_text),
    **dict.fromkeys(("conversations", "version", "number"), _is_count),
    **dict.fromkeys(("held", "tickets"), _are_tickets),
    "finished": _are_finished,
    "usage": _is_usage,
    "policies": _are_policies,
    "policy": lambda value: value is None or _is_text(value),
    "closed": lambda value: isinstance(value, bool),
}


class TrainerAddress(NamedTuple):
    """Where a trainer listens for its workers, and the key that it asks for."""

    host: str
    port: int
    key: str


def write_address(workdir: Path, host: str, port: int) -> str:
    """Writes WORKDIR/workers.json, which only its owner may read; returns the run's key.

    The key is that of SEEUPO_ROLLOUT_KEY, which is not written, or a new one.
    """
    given = os.environ.get(KEY_VARIABLE)
    key = secrets.token_urlsafe(32) if given is None else _checked_key(given)
    name = f"[{host}]" if ":" in host else host
    address = {"address": f"{name}:{port}"} | ({"key": key} if given is None else {})
    make_folder(workdir)
    unfinished = workdir / f"{ADDRESS_FILE}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(address, file)
        move_file(unfinished, workdir / ADDRESS_FILE)
    finally:
        unfinished.unlink(missing_ok=True)
    return key


def read_address(workdir: Path) -> TrainerAddress | None:
    """What WORKDIR/workers.json says now; None: it is missing, or not of a trainer.

    Raises:
      ValueError: it has no key, and SEEUPO_ROLLOUT_KEY is not set.
    """
    try:
        found: Mapping[str, str] = json.loads((workdir / ADDRESS_FILE).read_bytes())
        host, port = split_address(found["address"], ADDRESS_FILE)
        key = found.get("key")
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return None
    return TrainerAddress(host, port, _find_key(key))


def given_address(address: str) -> TrainerAddress:
    """The address [http://]HOST:PORT with the key of SEEUPO_ROLLOUT_KEY.

    Raises:
      ValueError: another form of address; no key.
    """
    host, port = split_address(address.removeprefix("http://").rstrip("/"), "the trainer")
    return TrainerAddress(host, port, _find_key(None))


def _find_key(written: str | None) -> str:
    """SEEUPO_ROLLOUT_KEY, or the key that a file has."""
    key = os.environ.get(KEY_VARIABLE, written)
    if key is None:
        raise ValueError(
            f"{KEY_VARIABLE}: got none; allowed for a trainer that is given as HOST:PORT, or that"
            " has one in its environment: its key."
        )
    return _checked_key(key)


def _checked_key(key: str) -> str:
    if not key or not all("!" <= character <= "~" for character in key):
        raise ValueError(f"{KEY_VARIABLE}: got one that is empty or not visible ASCII.")
    return key
