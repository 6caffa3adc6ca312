"""A task under construction: its current world, and the reference calls of the current turn."""

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
# Calls whose purpose is to change state.
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
# Those that only prepare a request, such as logging in.
PREPARATIONS = frozenset(
    (
        *("cd", "ticket_login", "trading_login", "message_login"),
        *("authenticate_twitter", "authenticate_travel"),
    )
)
# Facts that users call "it" or "that one": only the next turn may refer to them.
SHORT_LIVED = {"file", "figure"}
MAX_ARGUMENTS = 800  # characters of a call's arguments: a padded file is not copied
# Answers of some tools instead of an error.
NOT_FOUND = ("Stock not found", "Unknown", "00000")


class Infeasible(Exception):
    """A request is not possible in the current world."""


@dataclass(frozen=True)
class UserMessage:
    """The user's message of a turn.

    partial, detail: the same request in two messages, of which the first lacks a detail that its
      calls need; empty if no detail can be omitted.
    """

    text: str
    partial: str = ""
    detail: str = ""


@dataclass(frozen=True)
class RequestKind:
    """A kind of user request.

    write: makes the reference calls in the draft's world and returns the user's message.
    classes: the simulators that it needs.
    follows: the fact that an earlier turn must have set; None: it needs none.
    """

    write: Callable[[Draft], UserMessage]
    classes: tuple[str, ...]
    follows: str | None = None


def requests(
    classes: tuple[str, ...], *written: Callable[[Draft], UserMessage], follows: str | None = None
) -> tuple[RequestKind, ...]:
    """Makes the kinds of requests to the same simulators."""
    return tuple(RequestKind(write, classes, follows) for write in written)


class Draft:
    """The world on which requests act while a task is written.

    rng: the generator of all choices.
    long_context: the simulators pad their answers, as in the official category of that name.
    facts: values of earlier turns to which later ones may refer, such as the id of a booking, and
      whether they were set in the current turn.
    calls: reference calls of the current turn.
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
        """Removes the calls of the last turn, and facts to which only that turn may refer."""
        self.calls = []
        for name in SHORT_LIVED & set(self.facts):
            value, fresh = self.facts[name]
            if fresh:
                self.facts[name] = (value, False)
            else:
                del self.facts[name]

    def simulator(self, name: str) -> Any:
        """Returns a simulator, to read its state."""
        return self._world.instances[name]

    def call(self, tool: str, **arguments: Any) -> Any:
        """Makes a reference call and returns its result.

        Raises:
          Infeasible: it fails, or the task would be solved without it, since it has no effect or
            returns a known answer.
        """
        before = self._fingerprint()
        call = ToolCall(tool, arguments)
        answer = self._world.call(call)
        result = _read(answer)
        changed = self._fingerprint() != before
        written = repr(arguments)
        # The official executor takes a word before a parenthesis for a call, even in texts.
        unwritable = "(" in written or len(written) > MAX_ARGUMENTS
        needless = not changed and (tool in CHANGES or answer in self._answers)
        if needless or unwritable or _failed(answer, result):
            raise Infeasible(f"{tool}: {answer}")
        self._answers.add(answer)
        self.calls.append(call)
        return result

    def choose(self, options: Sequence[T]) -> T:
        """Draws one of the options; raises Infeasible if there are none."""
        if not options:
            raise Infeasible("nothing to choose from")
        return self.rng.choice(options)

    def choose_two(self, options: Sequence[T]) -> tuple[T, T]:
        if len(options) < 2:
            raise Infeasible("nothing to choose two from")
        first, second = self.rng.sample(options, 2)
        return first, second

    def amount(self, low: int, high: int) -> float:
        """Draws a number that ends in .5: some tools return it as given; it has one spelling."""
        return self.rng.randint(low, high - 1) + 0.5

    def fact(self, name: str) -> Any:
        """Returns a fact that an earlier turn has set; raises Infeasible if none has."""
        if name not in self.facts:
            raise Infeasible(f"no {name}")
        return self.facts[name][0]

    def need_unpadded_answers(self) -> None:
        """Raises Infeasible if padding would hide the answer that a request needs."""
        if self.long_context:
            raise Infeasible("a padded answer")

    def set_fact(self, name: str, value: Any) -> None:
        """Sets a fact for later turns; facts in `SHORT_LIVED` only for the next turn."""
        self.facts[name] = (value, True)

    def phrase(
        self,
        *phrasings: str,
        partial: str | Sequence[str] = (),
        detail: str | Sequence[str] = (),
        note: str = "",
        **values: Any,
    ) -> UserMessage:
        """Draws one of the phrasings and fills in its values.

        Args:
          partial: phrasings that lack a detail.
          detail: phrasings of the message that gives it.
          note: further text that the request needs, such as credentials; appended.
        """

        def written(options: str | Sequence[str]) -> str:
            options = (options,) if isinstance(options, str) else options
            return self.rng.choice(options).format(**values) if options else ""

        text, less = written(phrasings) + note, written(partial)
        return UserMessage(text, less and less + note, written(detail))

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
