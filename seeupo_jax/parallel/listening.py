"""Where process 0 listens for the others: at the address that they are given, and no other."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import selectors
import socket
import time
from collections import deque
from typing import Self

_LOGGER = logging.getLogger(__name__)
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # which JAX itself reads; HOST:PORT
_RETRY_S = 0.2


def listen(coordinator: str, deadline: float, port: int | None = None) -> socket.socket:
    """A socket at the address that HOST:PORT stands for on this machine.

    Where the others know this machine by an address that it does not have (behind NAT, say), or by
    a name of its loopback, it listens on all interfaces and warns.
    JAX_COORDINATOR_BIND_ADDRESS=HOST:PORT is another address to listen at.

    Args:
      deadline: until when a name may take to be known, in seconds of the monotonic clock.
      port: another one than that of HOST:PORT; 0: any that is free.

    Raises:
      ValueError: no such host, or the port is in use.
    """
    given = os.environ.get(BIND_VARIABLE)
    name = "--coordinator" if given is None else BIND_VARIABLE
    host, own_port = split_address(coordinator if given is None else given, name)
    port = own_port if port is None else port
    for family, address in _addresses(host, port, name, deadline):
        ip = ipaddress.ip_address(address[0].partition("%")[0])
        if ip.is_loopback and given is None and not _names_loopback(host):
            continue
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise _refused(port, name, error) from None
    if given is not None:
        raise ValueError(f"{name}: got {given}; allowed: an address of this machine.")
    _LOGGER.warning(
        f"warning: {host} is no address of this machine that others reach: process 0 listens on"
        f" all interfaces, at port {port or 'any'}; {BIND_VARIABLE}=HOST:PORT chooses one."
    )
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise _refused(port, name, error) from None


def split_address(text: str, name: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, the value of a setting; ValueError: of another form."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{name}: got {text!r}; allowed: HOST:PORT of process 0.")
    return host.strip("[]"), int(port)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another one, to which nothing is sent.

    Raises:
      OSError: there is no way, or the name has no address.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _addresses(
    host: str, port: int, name: str, deadline: float
) -> list[tuple[socket.AddressFamily, tuple]]:
    """Addresses of a host, IPv4 first; a name may not resolve as soon as the machine is up."""
    while True:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{name}: got {host}:{port} ({error.strerror}); allowed: a host that is known."
                ) from None
        time.sleep(_RETRY_S)
    addresses.sort(key=lambda one: one[0] != socket.AF_INET)
    return [(family, address) for family, _, _, _, address in addresses]


def _names_loopback(host: str) -> bool:
    """Whether a host means the machine that uses it: a loopback address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".").endswith("localhost")


def _refused(port: int, name: str, error: OSError) -> ValueError:
    return ValueError(
        f"{name}: port {port} of this machine cannot be listened to ({error.strerror}); allowed: a"
        " free one."
    )


class Arrivals:
    """Connections to a socket that listens, each with the first line that it sent.

    They are read side by side: one that is silent, or sends half a line, holds up no other.
    """

    def __init__(self, server: socket.socket, most_bytes: int) -> None:
        """A connection whose first line has more than `most_bytes` is closed."""
        self._server, self._most_bytes = server, most_bytes
        self._selector = selectors.DefaultSelector()
        self._ready: deque[tuple[socket.socket, bytes]] = deque()

    def __enter__(self) -> Self:
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._server:
                key.fileobj.close()
        for connection, _ in self._ready:
            connection.close()
        self._selector.close()

    def next(self, deadline: float) -> tuple[socket.socket, bytes] | None:
        """A connection, which blocks, and its line without the end; None: none until `deadline`.

        Args:
          deadline: in seconds of the monotonic clock.
        """
        while not self._ready:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            for key, _ in self._selector.select(remaining_s):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)
        return self._ready.popleft()

    def _accept(self) -> None:
        try:
            connection = self._server.accept()[0]
        except OSError:  # it has gone already
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, bytearray())

    def _read(self, connection: socket.socket, line: bytearray) -> None:
        try:
            part = connection.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        line += part
        ended = line.endswith(b"\n")
        if part and not ended and len(line) <= self._most_bytes:
            return
        self._selector.unregister(connection)
        if not ended:
            return connection.close()
        connection.setblocking(True)
        self._ready.append((connection, bytes(line[:-1])))
