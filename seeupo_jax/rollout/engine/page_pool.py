"""Pages that no two conversations share, for models with recurrent layers.

What such a layer knows of a context is one state, which no page holds: cached keys and values of a
prefix would lack it. So every turn prefills its whole context, into pages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from seeupo_jax.rollout.engine.kv_pages import Lease, LeaseRefusal, check_lease_size


class PagePool:
    """The pages of one row shard, with the methods of `PageTree`; nothing outlives a lease."""

    hits = 0
    evicted = 0

    def __init__(self, pages: int, page_size: int) -> None:
        """As of `PageTree`."""
        self.pages = pages
        self.page_size = page_size
        self.refusal: LeaseRefusal | None = None
        self._free = list(range(pages))[::-1]

    def lease(self, context: Sequence[int], reserve: int) -> Lease | None:
        """As of `PageTree`, with nothing cached, copied or shared."""
        check_lease_size(len(context), reserve, self.pages, self.page_size)
        total = -(-(len(context) - 1 + reserve) // self.page_size)
        self.refusal = LeaseRefusal.PAGES if total > len(self._free) else None
        if self.refusal is not None:
            return None
        pages = [self._free.pop() for _ in range(total)]
        pending = len(context) > 1
        return Lease(pages, cached=0, copy=None, shared=0, pending=pending, path=[], source=None)

    def computed(self, lease: Lease) -> None:
        """The lease's prefill has been dispatched."""
        lease.pending = False

    def release(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The action is finished: others may have the pages."""
        self.cancel(lease)

    def cancel(self, lease: Lease) -> None:
        """Ends a lease."""
        assert lease.open, "the lease is closed"
        self._free += lease.pages
        lease.open = False

    def evict_first(self, lease: Lease) -> None:
        """The conversation of a closed lease is over; nothing of it is held."""
