"""Where a command listens, and the key of those that call it."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket

from seeupo_jax.agents.calls import is_header_value

_LOGGER = logging.getLogger(__name__)
KEY_VARIABLE = "SEEUPO_API_KEY"


def check_address(host: str, port: int) -> None:
    """Warns of an address that other machines reach.

    Raises:
      ValueError: it cannot be listened on, or the environment's key cannot be sent.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ValueError(
            f"--port: got {port} at {host}, which cannot be had ({error.strerror}); allowed:"
            " a free one of this machine, or 0."
        ) from None
    if not is_header_value(os.environ.get(KEY_VARIABLE, "unset")):
        raise ValueError(
            f"{KEY_VARIABLE}: got a key that is empty or has a space or an odd character; allowed:"
            " letters, digits and other signs of ASCII, or no variable."
        )
    if not _is_loopback(host):
        _LOGGER.warning(
            f"warning: --host={host}: whoever reaches this machine and has the key is answered, and"
            " what they send and get is not encrypted."
        )


def _is_loopback(host: str) -> bool:
    """Whether an address or a name is for this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def choose_key(prefix: str = "") -> str:
    """The environment's key, or a new one, which begins with `prefix`.

    Raises:
      ValueError: the environment's begins with something else.
    """
    key = os.environ.get(KEY_VARIABLE) or prefix + secrets.token_urlsafe(32)
    if not key.startswith(prefix):
        raise ValueError(
            f"{KEY_VARIABLE}: got a key that begins otherwise; allowed: one that begins with"
            f" {prefix}, since clients refuse to send others."
        )
    return key


def describe_key(key: str) -> str:
    """The line that says which key is meant."""
    if KEY_VARIABLE in os.environ:
        return f"Key: as in {KEY_VARIABLE}"
    return f"Key: {key} (made for this server; {KEY_VARIABLE} sets one)"
