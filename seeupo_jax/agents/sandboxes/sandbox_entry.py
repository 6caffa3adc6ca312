"""The first program in a sandbox: opens the endpoint's port, limits itself, becomes the command.

A sandbox has no network. This program listens on a port of the sandbox's own loopback and sends
the listening socket out through a Unix socket, so that the endpoint is reached at the address that
it has outside. It imports the standard library only: an image has no other module.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys


def main() -> None:
    """Runs a command. Arguments: the settings as JSON, the command's words."""
    settings, words = json.loads(sys.argv[1]), sys.argv[2:]
    if settings.get("port"):
        _share_port(settings["port"], settings["socket"])
    for path, text in settings.get("files", {}).items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    with contextlib.suppress(OSError):  # the agent may have removed it: then the verifier's is /
        os.chdir(settings.get("folder", "."))
    os.environ["PWD"] = os.getcwd()  # docker sets none; opencode works in it
    for name, limit in settings["limits"].items():
        with contextlib.suppress(ValueError, OSError):  # it is lower already
            resource.setrlimit(getattr(resource, name), (limit, limit))
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror} (in the sandbox)")


def _share_port(port: int, path: str) -> None:
    with (
        socket.create_server(("127.0.0.1", port), backlog=128) as listening,
        socket.socket(socket.AF_UNIX) as outside,
    ):
        outside.connect(path)
        socket.send_fds(outside, [b"listening"], [listening.fileno()])
        outside.recv(1)  # it has arrived


if __name__ == "__main__":
    main()
