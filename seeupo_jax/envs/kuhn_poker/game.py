"""The rules of Kuhn poker, its equilibrium, and how far strategies are from one.

Each of two players pays one chip and gets one of three cards. The first passes or bets one chip;
the second answers. After a pass and a bet the first answers once more. A pass after a bet folds;
otherwise the higher card wins all chips (Kuhn, "A simplified two-person poker", 1950).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

CARDS = "JQK"  # from the lowest
PASS, BET = "p", "b"
DEALS = tuple(map("".join, itertools.permutations(CARDS, 2)))  # the cards of both players
ENDS = ("pp", "bp", "bb", "pbp", "pbb")
# The histories after which each player acts.
DECISIONS = (("", "pb"), ("p", "b"))
VALUE = -1 / 18  # of the game, for the first player

Strategy = Mapping[str, float]  # a card and a history, as `Jpb` -> the probability of a bet

# An equilibrium: the one in which the first player never bets first (alpha = 0).
EQUILIBRIUM: Strategy = {
    **{"J": 0.0, "Q": 0.0, "K": 0.0, "Jpb": 0.0, "Qpb": 1 / 3, "Kpb": 1.0},
    **{"Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0, "Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0},
}


def payoff(deal: str, history: str) -> int:
    """Chips that the first player wins from the second in a hand that is over."""
    if history in ("bp", "pbp"):  # who passed after a bet folds
        return 1 if history == "bp" else -1
    chips = 2 if history.endswith("bb") else 1
    return chips if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -chips


def expected_payoff(first: Strategy, second: Strategy) -> float:
    """Mean payoff of the first player, over all deals."""
    return sum(_value(deal, "", (first, second)) for deal in DEALS) / len(DEALS)


def _value(deal: str, history: str, players: tuple[Strategy, Strategy]) -> float:
    if history in ENDS:
        return payoff(deal, history)
    seat = len(history) % 2
    bet = players[seat][deal[seat] + history]
    after = {move: _value(deal, history + move, players) for move in (PASS, BET)}
    return bet * after[BET] + (1 - bet) * after[PASS]


def exploitability(strategy: Strategy) -> float:
    """What a best response wins against a strategy in either seat, on average, in chips a hand.

    0 at an equilibrium; 11/24 where both always choose at random (OpenSpiel's `nash_conv` / 2).

    Args:
      strategy: of both seats; all twelve information sets.
    """
    first = max(expected_payoff(pure, strategy) for pure in _pure_strategies(0))
    second = max(-expected_payoff(strategy, pure) for pure in _pure_strategies(1))
    return (first + second) / 2


@functools.cache
def _pure_strategies(seat: int) -> tuple[dict[str, float], ...]:
    sets = [card + history for card in CARDS for history in DECISIONS[seat]]
    choices = itertools.product((0.0, 1.0), repeat=len(sets))
    return tuple(dict(zip(sets, choice, strict=True)) for choice in choices)
