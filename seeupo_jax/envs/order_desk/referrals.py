"""Demonstrations of which a share hand the case over in the first turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from seeupo_jax.envs.base import Demonstration, Tool
from seeupo_jax.envs.order_desk.desk import REFER
from seeupo_jax.envs.tool_calls import render_hermes


class Referrals(Sequence[Demonstration]):
    """Demonstrations some of which are a referral instead, chosen by their index.

    Args:
      played: the demonstrations of players that work on every case.
      share: of the referrals, from 0 to 1.
      tools: that the desk lists.

    Raises:
      ValueError: another share.
    """

    def __init__(self, played: Sequence[Demonstration], share: float, tools: tuple[Tool, ...]):
        if not 0 <= share <= 1:
            raise ValueError(f"order_desk referrals: got {share}; allowed: a number from 0 to 1.")
        self._played, self._share, self._tools = played, share, tools

    def __len__(self) -> int:
        return len(self._played)

    def __getitem__(self, index: int) -> Demonstration:
        position = range(len(self))[index]  # supports negative indices, and ends an iteration
        messages = self._played[position].messages
        if random.Random(f"referrals/{position}").random() < self._share:
            opening = tuple(each for each in messages[:2] if each["role"] != "assistant")
            refers = {"role": "assistant", "content": render_hermes(REFER["name"])}
            messages = (*opening, refers)
        return Demonstration(messages, self._tools)
