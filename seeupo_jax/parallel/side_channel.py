"""Bytes between the processes of a run over sockets of their own.

A collective of the devices waits until the programs in flight have ended; what is sent here does
not, and needs no memory of a device.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, NoReturn

import jax
from jax._src import distributed  # the processes' common notes, which need no device

from seeupo_jax.parallel.listening import Arrivals, address_towards, listen, split_address

_KEYS = "seeupo_jax/side_channel/"  # of the common notes
_OPEN_S = 3600.0  # until all have come to open it; they load a model before, say
_FRAME = struct.Struct("!QB")  # a round's number, and what is exchanged
_LENGTH = struct.Struct("!Q")
_BYE, _FAILED = 254, 255  # what a process sends last: it has ended well, or told its own error
_POLL_S = 1.0  # how often the others are looked at
_GRACE_S = 10.0  # that a process has to end by itself once another one is lost
_UNHEARD_S = 60  # without an answer of its machine for so long a process is lost


class PeerLost(RuntimeError):
    """Another process of the run is gone."""

    exit_code = 1


class _Peer(NamedTuple):
    number: int
    socket: socket.socket


class SideChannel:
    """Connections of one process to those that it exchanges bytes with.

    Everything goes to all in ceil(log2(processes)) rounds (Bruck et al. 1997, "Efficient algorithms
    for all-to-all communications"): in round r each process sends what it has to the one 2^r before
    it, and receives as much from the one 2^r after it; each byte reaches each process once.
    """

    def __init__(self, process: int, processes: int, peers: Mapping[int, socket.socket]) -> None:
        self._process, self._processes = process, processes
        self._peers = {number: _Peer(number, peer) for number, peer in peers.items()}
        self._turn = threading.Lock()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="side channel")
        self._exchanges = 0
        self._ending = threading.Event()
        self._lost: str | None = None
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def all_gather(self, data: bytes, kind: int = 0) -> list[bytes]:
        """What each process gives, in the order of the processes; every process calls it as often.

        Args:
          kind: of the exchange, below 254, the same in all processes.

        Raises:
          PeerLost: a process has ended.
          RuntimeError: the processes are not at the same exchange.
        """
        with self._turn:
            self._exchanges += 1
            blocks = [data]
            while (distance := len(blocks)) < self._processes:
                count = min(distance, self._processes - distance)
                to, source = (
                    self._peers[(self._process + step) % self._processes]
                    for step in (-distance, distance)
                )
                sending = self._sender.submit(self._send, to, kind, blocks[:count])
                blocks += self._receive(source, kind, count)
                sending.result()
        start = self._processes - self._process
        return [blocks[(start + number) % self._processes] for number in range(self._processes)]

    def lost(self, wait_s: float) -> str | None:
        """A sentence on a process that is lost, if one is or soon turns out to be; None: none."""
        deadline = time.monotonic() + wait_s
        while self._lost is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._lost

    def close(self, *, failed: bool = False) -> None:
        """Tells the others that this process ends: all is done, or it has said what went wrong."""
        if self._ending.is_set():
            return
        self._ending.set()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.settimeout(1.0)
                peer.socket.sendall(_FRAME.pack(0, _FAILED if failed else _BYE))

    def leave_last(self) -> None:
        """Process 0 keeps JAX's service of the others, which would abort them without it."""
        if self._process:
            return
        left = select.poll()
        for peer in self._peers.values():
            left.register(peer.socket, select.POLLRDHUP)
        deadline, open_ = time.monotonic() + _GRACE_S + 2 * _POLL_S, len(self._peers)
        while open_ and (remaining_s := deadline - time.monotonic()) > 0:
            for number, _ in left.poll(1000 * remaining_s):
                left.unregister(number)
                open_ -= 1

    def _send(self, to: _Peer, kind: int, blocks: Sequence[bytes]) -> None:
        lengths = b"".join(_LENGTH.pack(len(block)) for block in blocks)
        head = _FRAME.pack(self._exchanges, kind) + lengths
        try:
            # A small message is one packet; a large block is not copied for its head.
            if sum(map(len, blocks)) < 2**16:
                to.socket.sendall(head + b"".join(blocks))
                return
            to.socket.sendall(head)
            for block in blocks:
                to.socket.sendall(block)
        except OSError as error:
            raise self._gone(to, error.strerror or str(error)) from None

    def _receive(self, source: _Peer, kind: int, count: int) -> list[bytes]:
        number, got = _FRAME.unpack(self._read(source, _FRAME.size))
        if got in (_BYE, _FAILED):
            raise self._gone(source)
        if (number, got) != (self._exchanges, kind):
            raise RuntimeError(
                f"process {source.number} is at exchange {number} of kind {got}, process"
                f" {self._process} at exchange {self._exchanges} of kind {kind}."
            )
        lengths = self._read(source, count * _LENGTH.size)
        return [bytes(self._read(source, length)) for (length,) in _LENGTH.iter_unpack(lengths)]

    def _read(self, source: _Peer, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        try:
            while rest:
                read = source.socket.recv_into(rest)
                if not read:
                    raise self._gone(source)
                rest = rest[read:]
        except OSError as error:
            raise self._gone(source, error.strerror or str(error)) from None
        return data

    def _gone(self, peer: _Peer, reason: str = "") -> PeerLost:
        if self._lost is None:
            self._lost = _lost_sentence(peer.number, reason)
        return PeerLost(self._lost)

    def _watch(self) -> None:
        """Ends this process where another one is lost and it does not end by itself.

        It may wait in a collective of the devices, which nothing else would end.
        """
        while not self._ending.wait(_POLL_S):
            for peer in self._peers.values():
                if _has_ended(peer.socket):
                    self._gone(peer)
            if self._lost is not None:
                break
        else:
            return
        if not self._ending.wait(_GRACE_S):
            end(self._lost)


def _has_ended(peer: socket.socket) -> bool:
    """Whether a process has left without a word, or with the word that it failed."""
    try:
        head = peer.recv(_FRAME.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not head or (len(head) == _FRAME.size and _FRAME.unpack(head)[1] == _FAILED)


def _lost_sentence(number: int, reason: str) -> str:
    """What is said of a lost process: of the first that was, where the common notes know it."""
    said = f" ({reason})" if reason else ""
    sentence = f"process {number} has ended before the run{said}; its own output says why."
    client = distributed.global_state.client
    with contextlib.suppress(Exception):  # process 0 keeps the notes, and may be the lost one
        client.key_value_set(f"{_KEYS}lost", sentence)
    with contextlib.suppress(Exception):
        return client.blocking_key_value_get(f"{_KEYS}lost", 1_000)
    return sentence


@functools.cache
def the_channel() -> SideChannel:
    """This process's connections, from the first call to its end; every process of JAX's calls it.

    Raises:
      ValueError: a process that cannot be reached.
    """
    process, processes = jax.process_index(), jax.process_count()
    client, coordinator = (
        distributed.global_state.client,
        distributed.global_state.coordinator_address,
    )
    deadline = time.monotonic() + _OPEN_S
    neighbours = {(process + sign * 2**r) % processes for r, sign in _steps(processes)}
    server = _listen(coordinator, process, deadline)
    with server:
        host, port = _own_host(coordinator, process), server.getsockname()[1]
        client.key_value_set(f"{_KEYS}address/{process}", f"{host}:{port}")
        if process == 0:
            client.key_value_set(f"{_KEYS}word", secrets.token_hex(16))
        word = client.blocking_key_value_get(f"{_KEYS}word", int(1000 * _OPEN_S))
        peers = {}
        for number in sorted(n for n in neighbours if n < process):
            address = client.blocking_key_value_get(
                f"{_KEYS}address/{number}", int(1000 * (deadline - time.monotonic()))
            )
            peers[number] = _call(number, address, process, word)
        peers |= _accept(server, {n for n in neighbours if n > process}, word, deadline)
    for peer in peers.values():
        _configure(peer)
    channel = SideChannel(process, processes, peers)
    atexit.register(channel.close)
    return channel


def lost_peer(wait_s: float) -> str | None:
    """A sentence on a lost process; see `SideChannel.lost`."""
    return the_channel().lost(wait_s) if the_channel.cache_info().currsize else None


def end(sentence: str | None, code: int = PeerLost.exit_code) -> NoReturn:
    """Ends this process at once, with a sentence where it has not said yet what is wrong."""
    with contextlib.suppress(OSError):
        if sentence is not None:
            print(f"error: {sentence}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    if the_channel.cache_info().currsize:
        the_channel().close(failed=True)
        the_channel().leave_last()
    os._exit(code)


def _steps(processes: int) -> Iterator[tuple[int, int]]:
    """Exponent and direction of every step between two that are connected."""
    for r in range((processes - 1).bit_length()):
        yield from ((r, -1), (r, 1))


def _listen(coordinator: str, process: int, deadline: float) -> socket.socket:
    if process == 0:
        return listen(coordinator, deadline, port=0)
    host = _own_host(coordinator, process)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def _own_host(coordinator: str, process: int) -> str:
    """The host by which the others reach this process: its address on the way to process 0."""
    host, port = split_address(coordinator, "--coordinator")
    if process == 0:
        return host
    return address_towards(host, port)


def _call(number: int, address: str, process: int, word: str) -> socket.socket:
    try:
        peer = socket.create_connection(split_address(address, "the side channel"), timeout=60.0)
        peer.sendall(f"{word} {process}\n".encode())
        with peer.makefile("rb", buffering=0) as lines:
            answered = lines.readline(64).strip() == word.encode()
    except OSError as error:
        answered, reason = False, str(error)
    else:
        reason = "it does not answer"
    if not answered:
        raise ValueError(
            f"process {process} cannot reach process {number} at {address} ({reason}); allowed:"
            " hosts that reach one another by TCP."
        )
    return peer


def _accept(
    server: socket.socket, wanted: set[int], word: str, deadline: float
) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    with Arrivals(server, most_bytes=64) as arrivals:
        while wanted - peers.keys():
            arrival = arrivals.next(deadline)
            if arrival is None:
                missing = ", ".join(map(str, sorted(wanted - peers.keys())))
                raise ValueError(
                    f"process {missing} did not connect within {_OPEN_S:.0f} s; allowed: hosts that"
                    " reach one another by TCP."
                )
            peer, line = arrival
            said, _, number = line.decode(errors="replace").partition(" ")
            if secrets.compare_digest(said, word) and number.isdecimal() and int(number) in wanted:
                peer.sendall(word.encode() + b"\n")
                peers[int(number)] = peer
            else:
                peer.close()
    return peers


def _configure(peer: socket.socket) -> None:
    """Small messages at once; a machine that is gone is noticed, whatever it left undone."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", _UNHEARD_S // 10 - 1),
        ("TCP_USER_TIMEOUT", 1000 * _UNHEARD_S),
    ):
        if hasattr(socket, name):  # not on every system
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
