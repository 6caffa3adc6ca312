"""A task in the making: the world as it is now, and the calls of the turn that is being written."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from seeupo_jax.envs.bfcl.simulated_apis import CALL_FAILED, MultiTurnTask, World
from seeupo_jax.envs.tool_calls import ToolCall

T = TypeVar("T")
# Calls that are only made to change something.
CHANGES = frozenset(
    (
        *("mkdir", "touch", "cp", "mv", "rm", "rmdir", "cd", "create_ticket", "close_ticket"),
        *("resolve_ticket", "edit_ticket", "ticket_login", "logout", "cancel_order", "place_order"),
        *("withdraw_funds", "fund_account", "trading_login", "trading_logout", "add_to_watchlist"),
        *("remove_stock_from_watchlist", "authenticate_travel", "register_credit_card"),
        *("book_flight", "cancel_booking", "set_budget_limit", "purchase_insurance", "startEngine"),
        *("fillFuelTank", "lockDoors", "adjustClimateControl", "setHeadlights", "mention"),
        *("activateParkingBrake", "pressBrakePedal", "releaseBrakePedal", "setCruiseControl"),
        *("set_navigation", "message_login", "send_message", "delete_message", "add_contact"),
        *("authenticate_twitter", "post_tweet", "retweet", "comment", "follow_user"),
        "unfollow_user",
    )
)
# Those of them that a request only needs to get at what it is about.
PREPARATIONS = frozenset(
    (
        *("cd", "ticket_login", "trading_login", "message_login"),
        *("authenticate_twitter", "authenticate_travel"),
    )
)
# Facts that are called "it" or "that one", so that only the next turn may refer to them.
FLEETING = {"file", "figure"}
MAX_ARGUMENTS = 800  # characters of a call: nobody copies a padded file
# What some tools answer instead of an error.
NOT_FOUND = ("Stock not found", "Unknown", "00000")


class Unfit(Exception):
    """The world, as it is, has no place for a request."""


@dataclass(frozen=True)
class Ask:
    """What the user says in a turn.

    partial, detail: the same in two messages, of which the first lacks what its calls need; empty
      where no detail can be left out.
    """

    text: str
    partial: str = ""
    detail: str = ""


@dataclass(frozen=True)
class RequestKind:
    """A kind of turn.

    write: makes the turn's calls in the draft's world and returns what the user says for it.
    classes: simulators that it needs.
    follows: the fact that an earlier turn must have left; None: it stands alone.
    """

    write: Callable[[Draft], Ask]
    classes: tuple[str, ...]
    follows: str | None = None


def requests(
    classes: tuple[str, ...], *written: Callable[[Draft], Ask], follows: str | None = None
) -> tuple[RequestKind, ...]:
    """A table of requests to the same simulators."""
    return tuple(RequestKind(write, classes, follows) for write in written)


class Draft:
    """The world that requests act on while a task is written.

    rng: the source of all choices.
    long_context: the simulators pad their answers, as in the official category of that name.
    facts: what earlier turns left for later ones to refer to, such as the id of a booking, and
      whether it was left in the turn that is being written.
    calls: of the turn that is being written.
    """

    def __init__(
        self,
        rng: Random,
        classes: Sequence[str],
        scenario: Mapping[str, Any],
        long_context: bool = False,
    ):
        self.rng, self.classes, self.long_context = rng, tuple(classes), long_context
        self.facts: dict[str, tuple[Any, bool]] = {}
        self.calls: list[ToolCall] = []
        self._world = World(
            MultiTurnTask("draft", (), self.classes, scenario, (), {}, long_context)
        )
        self._answers: set[str] = set()

    def begin_turn(self) -> None:
        """Forgets the calls of the last turn, and what only that turn may refer to."""
        self.calls = []
        for name in FLEETING & set(self.facts):
            value, fresh = self.facts[name]
            if fresh:
                self.facts[name] = (value, False)
            else:
                del self.facts[name]

    def simulator(self, name: str) -> Any:
        """A simulator, to read its state."""
        return self._world.instances[name]

    def call(self, tool: str, **arguments: Any) -> Any:
        """Makes a reference call and returns its result.

        Raises:
          Unfit: it fails, changes nothing though it should, or says only what is known already, so
            that the task would be solved without it.
        """
        before = self._fingerprint()
        call = ToolCall(tool, arguments)
        answer = self._world.call(call)
        result = _read(answer)
        changed = self._fingerprint() != before
        said = repr(arguments)
        # The official executor takes a word before a parenthesis for a call, in texts too.
        unwritable = "(" in said or len(said) > MAX_ARGUMENTS
        needless = not changed and (tool in CHANGES or answer in self._answers)
        if needless or unwritable or _failed(answer, result):
            raise Unfit(f"{tool}: {answer}")
        self._answers.add(answer)
        self.calls.append(call)
        return result

    def choose(self, options: Sequence[T]) -> T:
        """One of the options; Unfit where there are none."""
        if not options:
            raise Unfit("nothing to choose from")
        return self.rng.choice(options)

    def choose_two(self, options: Sequence[T]) -> tuple[T, T]:
        if len(options) < 2:
            raise Unfit("nothing to choose two from")
        first, second = self.rng.sample(options, 2)
        return first, second

    def amount(self, low: int, high: int) -> float:
        """A number with a half: some tools return it as given, and nobody writes it otherwise."""
        return self.rng.randint(low, high - 1) + 0.5

    def fact(self, name: str) -> Any:
        """What an earlier turn left; Unfit where none did."""
        if name not in self.facts:
            raise Unfit(f"no {name}")
        return self.facts[name][0]

    def need_short_answers(self) -> None:
        """Unfit where the answer that a request needs is lost among padding."""
        if self.long_context:
            raise Unfit("a padded answer")

    def leave(self, name: str, value: Any) -> None:
        """Leaves a fact for later turns; those of `FLEETING` for the next turn only."""
        self.facts[name] = (value, True)

    def ask(
        self,
        *phrasings: str,
        partial: str | Sequence[str] = (),
        detail: str | Sequence[str] = (),
        note: str = "",
        **values: Any,
    ) -> Ask:
        """One of the phrasings with its values.

        Args:
          partial: phrasings that lack a detail.
          detail: phrasings of the message that gives it.
          note: what else the request needs, such as credentials; put after it.
        """

        def written(options: str | Sequence[str]) -> str:
            options = (options,) if isinstance(options, str) else options
            return self.rng.choice(options).format(**values) if options else ""

        text, less = written(phrasings) + note, written(partial)
        return Ask(text, less and less + note, written(detail))

    def _fingerprint(self) -> str:
        return repr([vars(part) for part in self._world.instances.values()])


def _read(answer: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(answer)
    return answer


def _failed(answer: str, result: Any) -> bool:
    if answer.startswith(CALL_FAILED):
        return True
    parts = result if isinstance(result, list) else [result]
    for part in parts:
        if not isinstance(part, dict):
            continue
        denied = any(v is False for k, v in part.items() if k.endswith("_status"))
        if denied or "error" in part or any(v in NOT_FOUND for v in part.values() if v):
            return True
    return False
