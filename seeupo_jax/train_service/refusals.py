"""Why a request is not done: one sentence for its client."""

from __future__ import annotations


class RequestRefused(ValueError):
    """A mistake of the client: what was got and what is allowed.

    status: of HTTP, where the request itself is refused and not its result.
    """

    def __init__(self, sentence: str, status: int = 400):
        super().__init__(sentence)
        self.status = status
