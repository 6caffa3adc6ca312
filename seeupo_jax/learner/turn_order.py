"""In which order a sweep updates the turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def update_order(
    turns: int,
    order: str,
    *,
    turns_per_update: int | None = 1,
    custom_order: Sequence[int] = (),
    seed: Sequence[int] = (0,),
) -> list[tuple[int, ...]]:
    """The steps of a sweep, first to last; each is the turns that it updates together.

    Args:
      turns: K, of the longest trajectory.
      order: `reverse` (SeeUPO), `forward`, `random`, `custom` (`custom_order`, without the
        turns that no trajectory has) or `parallel` (one step on all).
      turns_per_update: so many consecutive turns, counted from the last one, make one step; None:
        all.
      seed: of the random order.

    Raises:
      ValueError: an unknown order.
    """
    span = turns_per_update or max(turns, 1)
    steps = [tuple(range(max(0, end - span), end)) for end in range(turns, 0, -span)]
    orders: dict[str, Callable[[], list[tuple[int, ...]]]] = {
        "reverse": lambda: steps,
        "forward": lambda: steps[::-1],
        "random": lambda: [steps[i] for i in np.random.default_rng(seed).permutation(len(steps))],
        "custom": lambda: [(turn,) for turn in custom_order if turn < turns],
        "parallel": lambda: [tuple(range(turns))] if turns else [],
    }
    if order not in orders:
        raise ValueError(f"order: got {order!r}; allowed: {', '.join(orders)}.")
    return orders[order]()
