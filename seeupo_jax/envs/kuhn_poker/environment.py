"""`kuhn_poker`: a game of two roles, played against oneself or against an equilibrium."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from seeupo_jax.envs.base import Demonstration, Message, StepResult, Tool, check_choice
from seeupo_jax.envs.kuhn_poker.game import (
    BET,
    CARDS,
    DEALS,
    DECISIONS,
    ENDS,
    EQUILIBRIUM,
    PASS,
    payoff,
)
from seeupo_jax.envs.seeded_tasks import check_count, last_line

ROLES = ("player_1", "player_2")
MOVES = {PASS: "pass", BET: "bet"}
_SEATS = ("first", "second")


class KuhnPoker:
    """Hands of Kuhn poker; `config.roles` lists `player_1` and `player_2`.

    Each role reads its card and the other's moves, and answers `bet`; any other last line is a
    pass. `train/DEAL` is played by both roles, whose rewards are the chips that they win. In
    `test/DEAL/SEAT` an equilibrium strategy plays the other seat.

    """

    def __init__(self) -> None:
        self._deal = ""
        self._seats: tuple[int, ...] = ()  # that roles play
        self._history = ""
        self._dice = random.Random()

    @property
    def role(self) -> str:
        """The role that acts next; "": none."""
        seat = len(self._history) % 2
        return ROLES[seat] if seat in self._seats and self._history not in ENDS else ""

    def task_ids(self, split: str) -> Sequence[str]:
        check_choice("kuhn_poker split", split, ("train", "test"))
        if split == "train":
            return [f"train/{deal}" for deal in DEALS]
        return [f"test/{deal}/{seat}" for deal in DEALS for seat in _SEATS]

    def reset(
        self, task_id: str, seed: int, episode_seed: int = 0
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Deals the cards of a task; `episode_seed` seeds the equilibrium's moves."""
        split, *_ = task_id.split("/")
        if task_id not in self.task_ids(split):
            allowed = ", ".join(self.task_ids(split))
            raise ValueError(f"kuhn_poker task: got {task_id!r}; allowed: {allowed}.")
        _, deal, *seat = task_id.split("/")
        self._deal, self._history = deal, ""
        self._seats = (_SEATS.index(seat[0]),) if seat else (0, 1)
        self._dice = random.Random(episode_seed)
        self._let_equilibrium_move()
        return self._observation(), ()

    def step(self, text: str) -> StepResult:
        """Makes the move of the role that acts."""
        self._history += BET if last_line(text).lower() == MOVES[BET] else PASS
        self._let_equilibrium_move()
        if self._history not in ENDS:
            return StepResult(self._observation(), 0.0, False, role=self.role)
        first = float(payoff(self._deal, self._history))
        chips = (first, -first)
        info = {"history": self._history, "first_payoff": first}
        of_roles = {ROLES[seat]: chips[seat] for seat in self._seats}
        return StepResult((), 0.0, True, info, role_rewards=of_roles)

    def score(self) -> float:
        """1 if the role in the seat, of both the first, has won the hand; otherwise 0."""
        if self._history not in ENDS:
            return 0.0
        first = payoff(self._deal, self._history)
        return float((first, -first)[self._seats[0]] > 0)

    def close(self) -> None:
        """Nothing is open."""

    def labels(self, task_id: str) -> Mapping[str, str]:
        """The seat of the role in a hand against the equilibrium."""
        _, _, *seat = task_id.split("/")
        return {"seat": seat[0]} if seat else {}

    def demonstrations(
        self, split: str, *, episodes: int = 1000, seed: int = 0
    ) -> Sequence[Demonstration]:
        """Conversations of players that do the opposite of the equilibrium half of the time."""
        check_count("kuhn_poker episodes", episodes)
        dice = random.Random(seed)
        return [self._demonstration(dice) for _ in range(episodes)]

    def vocabulary(self) -> Sequence[str]:
        return (*MOVES.values(), *(f" {card}" for card in CARDS))

    def _demonstration(self, dice: random.Random) -> Demonstration:
        seat, card = dice.randrange(2), dice.choice(CARDS)
        history = dice.choice(DECISIONS[seat])
        messages: list[Message] = []
        for length in range(seat, len(history) + 1, 2):
            bets = dice.random() < 0.75 - EQUILIBRIUM[card + history[:length]] / 2
            move = history[length] if length < len(history) else (PASS, BET)[bets]
            read = {"role": "user", "content": _shown(card, history[:length])}
            messages += [read, {"role": "assistant", "content": MOVES[move]}]
        return Demonstration(tuple(messages))

    def _let_equilibrium_move(self) -> None:
        while self._history not in ENDS and not self.role:
            seen = self._deal[len(self._history) % 2] + self._history
            self._history += BET if self._dice.random() < EQUILIBRIUM[seen] else PASS

    def _observation(self) -> tuple[Message, ...]:
        shown = _shown(self._deal[len(self._history) % 2], self._history)
        return ({"role": "user", "content": shown},)


def _shown(card: str, history: str) -> str:
    """What the player who acts after a history reads, who has read the earlier parts of it."""
    other = f"Your opponent said {MOVES[history[-1]]}." if history else ""
    if len(history) > 1:
        return other
    return f"You are {_SEATS[len(history)]} with {card}. {other}".strip()


def strategy_of(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The probability of a bet at each information set of the policy, from training trajectories.

    The sampler's log-probability of a bet gives it exactly; where no bet was sampled, it is 1 less
    the probability of the pass. A set that was never reached is left out, as are all those of a
    frozen role.

    Args:
      records: of `read_trajectories`, all of one policy.
    """
    strategy: dict[str, float] = {}
    for record in (each for each in records if not each["failed"]):
        history, deal = record["info"]["history"], record["task_id"].split("/")[1]
        for place, probability in _probabilities(record).items():
            seen = deal[place % 2] + history[:place]
            if history[place] == BET:
                strategy[seen] = probability
            else:
                strategy.setdefault(seen, 1 - probability)
    return strategy


def _probabilities(record: Mapping[str, Any]) -> dict[int, float]:
    """The probability of each move, by its place in the history: each role has every second."""
    moves: dict[int, float] = {}
    for segment in record["segments"]:
        logp: dict[int, float] = {}  # by turn, in their order
        pairs = zip(segment["turn"], segment["logp"], strict=True)
        for turn, each in ((turn, each) for turn, each in pairs if turn >= 0):
            logp[turn] = logp.get(turn, 0.0) + each
        seat = ROLES.index(segment["role"])
        moves |= {2 * number + seat: math.exp(each) for number, each in enumerate(logp.values())}
    return moves
