"""Servers that run in this process while a test asks them."""

import contextlib
import socketserver
import threading

POLL_S = 0.01  # how soon a server of the standard library sees that it is to end


@contextlib.contextmanager
def running(server):
    """A server in a thread of its own, until the block ends."""
    poll = (POLL_S,) if isinstance(server, socketserver.BaseServer) else ()
    thread = threading.Thread(target=server.serve_forever, args=poll)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(20)
