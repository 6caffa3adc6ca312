"""HTTP/1.1 for clients that break it."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class StrictProtocol(H11Protocol):
    """uvicorn's, but for one case: a client breaks the protocol when it already has its answer.

    uvicorn then writes a second answer, which h11 refuses with an exception for the log; here the
    connection is closed.
    """

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what would still be sent is for nobody
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
