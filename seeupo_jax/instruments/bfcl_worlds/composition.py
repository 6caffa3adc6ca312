"""Composition of conversations: simulators, requests in order, and the phrases between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from seeupo_jax.envs.tool_calls import render_python
from seeupo_jax.instruments.bfcl_worlds import scenarios
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, Infeasible, RequestKind, UserMessage
from seeupo_jax.instruments.bfcl_worlds.user_requests.cross_requests import CROSS_REQUESTS
from seeupo_jax.instruments.bfcl_worlds.user_requests.file_requests import FILE_REQUESTS
from seeupo_jax.instruments.bfcl_worlds.user_requests.math_requests import MATH_REQUESTS
from seeupo_jax.instruments.bfcl_worlds.user_requests.message_requests import MESSAGE_REQUESTS
from seeupo_jax.instruments.bfcl_worlds.user_requests.post_requests import POST_REQUESTS
from seeupo_jax.instruments.bfcl_worlds.user_requests.ticket_requests import TICKET_REQUESTS
from seeupo_jax.instruments.bfcl_worlds.user_requests.trading_requests import TRADING_REQUESTS
from seeupo_jax.instruments.bfcl_worlds.user_requests.travel_requests import TRAVEL_REQUESTS
from seeupo_jax.instruments.bfcl_worlds.user_requests.vehicle_requests import VEHICLE_REQUESTS

REQUESTS = (
    *(*FILE_REQUESTS, *MATH_REQUESTS, *MESSAGE_REQUESTS, *POST_REQUESTS, *TICKET_REQUESTS),
    *(*TRADING_REQUESTS, *TRAVEL_REQUESTS, *VEHICLE_REQUESTS, *CROSS_REQUESTS),
)
CLASSES = tuple(scenarios.SCENARIOS)
PAIR_PROBABILITY = 0.6  # that a conversation uses two simulators, if it can
FOLLOW_PROBABILITY = 0.6  # that a turn follows up on an earlier one, if it can
CARRY_PROBABILITY = 0.5  # that a turn carries data between two simulators, if it can

HELLOS = (
    "",
    "",
    "Hello!",
    "Good morning.",
    "I could use a hand.",
    "Hi there.",
    "A small job first.",
)
LINKS = (
    "",
    "",
    "",
    "Thanks.",
    "Very good.",
    "Now something else.",
    "One more thing.",
    "Next.",
    "Fine.",
)
ENDS = ("", "", "", "No hurry.", "Thanks in advance.", "That would help me a lot.")


@dataclass(frozen=True)
class UserTurn:
    """A user turn. sources: its reference calls as Python source. request: its kind."""

    ask: UserMessage
    sources: tuple[str, ...]
    tools: tuple[str, ...]
    request: RequestKind


@dataclass(frozen=True)
class GeneratedConversation:
    """A complete conversation, before a tool or detail is withheld.

    opening: the first request, without greetings.
    """

    opening: str
    classes: tuple[str, ...]
    scenario: dict[str, Any]
    turns: tuple[UserTurn, ...]


def pairs(classes: Iterable[str]) -> list[tuple[str, str]]:
    """Returns all pairs of different simulators, in the order of `CLASSES`."""
    ordered = [name for name in CLASSES if name in set(classes)]
    return [(a, b) for index, a in enumerate(ordered) for b in ordered[index + 1 :]]


def choose_classes(rng: Random, classes: Sequence[str], turns: int) -> tuple[str, ...]:
    """Draws the simulators of a conversation: one, or two if there are enough turns."""
    if turns > 1 and len(classes) > 1 and rng.random() < PAIR_PROBABILITY:
        return rng.choice(pairs(classes))
    return (rng.choice([name for name in CLASSES if name in classes]),)


def compose(
    rng: Random, classes: tuple[str, ...], turns: int, long_context: bool = False
) -> GeneratedConversation:
    """Composes a conversation with this number of turns on these simulators.

    Raises:
      Infeasible: the drawn world does not allow one.
    """
    scenario = {name: scenarios.SCENARIOS[name](rng) for name in classes if name != scenarios.MATH}
    draft = Draft(rng, classes, scenario, long_context)
    fitting = [request for request in REQUESTS if set(request.classes) <= set(classes)]
    written: list[UserTurn] = []
    untouched, opening = set(classes), ""
    for position in range(turns):
        must = untouched if len(untouched) >= turns - position else set[str]()
        options = [r for r in fitting if not must or must & set(r.classes)]
        request, ask = _write_turn(draft, options)
        untouched -= set(request.classes)
        fitting.remove(request)
        opening = opening or ask.text
        sources = tuple(render_python([call])[1:-1] for call in draft.calls)
        ask = _link(rng, ask, first=position == 0)
        tools = tuple(call.name for call in draft.calls)
        written.append(UserTurn(ask, sources, tools, request))
    if untouched:
        raise Infeasible("a simulator without a turn")
    return GeneratedConversation(opening, classes, scenario, tuple(written))


def _write_turn(draft: Draft, options: list[RequestKind]) -> tuple[RequestKind, UserMessage]:
    """Writes the next turn: the first request, in random order, that is feasible in the world."""
    draft.begin_turn()
    draft.rng.shuffle(options)
    if draft.rng.random() < CARRY_PROBABILITY:
        options.sort(key=lambda request: -len(request.classes))
    if draft.rng.random() < FOLLOW_PROBABILITY:
        options.sort(key=lambda request: request.follows not in draft.facts)
    for request in options:
        if request.follows is not None and request.follows not in draft.facts:
            continue
        try:
            return request, request.write(draft)
        except Infeasible:
            if draft.calls:  # the world has changed already
                raise
    raise Infeasible("no request fits")


def _link(rng: Random, ask: UserMessage, first: bool) -> UserMessage:
    """Adds the phrases before and after a turn's text."""
    prefix, end = rng.choice(HELLOS if first else LINKS), rng.choice(ENDS)
    texts = [
        " ".join(part for part in (prefix, text, end) if part) for text in (ask.text, ask.partial)
    ]
    return UserMessage(texts[0], ask.partial and texts[1], ask.detail)
