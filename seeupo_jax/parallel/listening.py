"""Where process 0 listens for the others: at the address that they are given, and no other."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import time

_LOGGER = logging.getLogger(__name__)
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # which JAX itself reads; HOST:PORT
_RETRY_S = 0.2


def listen(coordinator: str, deadline: float) -> socket.socket:
    """A socket at the address that HOST:PORT stands for on this machine.

    Where the others know this machine by an address that it does not have (behind NAT, say), or by
    a name of its loopback, it listens on all interfaces and warns.
    JAX_COORDINATOR_BIND_ADDRESS=HOST:PORT is another address to listen at.

    Args:
      deadline: until when a name may take to be known, in seconds of the monotonic clock.

    Raises:
      ValueError: no such host, or the port is in use.
    """
    given = os.environ.get(BIND_VARIABLE)
    name = "--coordinator" if given is None else BIND_VARIABLE
    host, port = split_address(coordinator if given is None else given, name)
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
        f" all interfaces, at port {port}; {BIND_VARIABLE}=HOST:PORT chooses one."
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
