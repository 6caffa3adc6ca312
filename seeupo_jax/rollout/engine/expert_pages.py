"""The experts of the tokens whose keys and values are in the cache, page by page on the host.

Turns and siblings that share a page of the cache share its record, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seeupo_jax.policy.architecture import Routing
from seeupo_jax.policy.kernels.attention import NOWHERE
from seeupo_jax.policy.kernels.paged import PageTable


class ExpertPages:
    """The record of one row shard's pages, written in the order of the device's programs."""

    def __init__(self, routing: Routing, pages: int, page_size: int):
        self._size = page_size
        # Of zeros, so that memory is taken as pages are written.
        self._expert_XG = np.zeros((pages * page_size, routing.size), routing.dtype)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, (source, target); all are read before one is written."""
        held = [self._expert_XG[self._page(source)].copy() for source, _ in pairs]
        for (_, target), expert_SG in zip(pairs, held, strict=True):
            self._expert_XG[self._page(target)] = expert_SG

    def write(self, pages: Sequence[int], start: int, expert_LG: np.ndarray) -> None:
        """Takes those of consecutive positions of a lease's pages."""
        position_L = start + np.arange(len(expert_LG))
        self._expert_XG[self._places(np.asarray(pages), position_L)] = expert_LG

    def write_tiles(
        self, position_RL: np.ndarray, page_table: PageTable, expert_RLG: np.ndarray
    ) -> None:
        """Records the experts that a prefill of rows chose."""
        for row, position_L in enumerate(position_RL):
            real_L = position_L != NOWHERE
            places = self._places(page_table.table_RP[row], position_L[real_L])
            self._expert_XG[places] = expert_RLG[row, real_L]

    def read(self, pages: Sequence[int], count: int) -> np.ndarray:
        """A copy of those of a lease's first positions, [count, G]."""
        return self._expert_XG[self._places(np.asarray(pages), np.arange(count))]

    def _page(self, page: int) -> slice:
        return slice(page * self._size, (page + 1) * self._size)

    def _places(self, pages: np.ndarray, position_L: np.ndarray) -> np.ndarray:
        return pages[position_L // self._size] * self._size + position_L % self._size
