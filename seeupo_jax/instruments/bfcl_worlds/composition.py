"""Conversations: which simulators, which requests in which order, and the words between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from seeupo_jax.envs.tool_calls import render_python
from seeupo_jax.instruments.bfcl_worlds import scenarios
from seeupo_jax.instruments.bfcl_worlds.draft import Ask, Draft, RequestKind, Unfit
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
PAIRED = 0.6  # of the conversations that could be over two simulators
FOLLOWED = 0.6  # how often a turn follows up on an earlier one where it could
CARRIED = 0.5  # how often it carries something between two simulators where it could

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
    """A user turn. sources: its reference calls as Python. request: its kind."""

    ask: Ask
    sources: tuple[str, ...]
    tools: tuple[str, ...]
    request: RequestKind


@dataclass(frozen=True)
class GeneratedConversation:
    """A complete conversation, before anything is withheld from it.

    opening: the first request, without greetings.
    """

    opening: str
    classes: tuple[str, ...]
    scenario: dict[str, Any]
    turns: tuple[UserTurn, ...]


def pairs(classes: Iterable[str]) -> list[tuple[str, str]]:
    """Two different simulators, of which one has a state, in the order of `CLASSES`."""
    ordered = [name for name in CLASSES if name in set(classes)]
    return [(a, b) for index, a in enumerate(ordered) for b in ordered[index + 1 :]]


def choose_classes(rng: Random, classes: Sequence[str], turns: int) -> tuple[str, ...]:
    """The simulators of a conversation: one, or two where both can have their turn."""
    if turns > 1 and len(classes) > 1 and rng.random() < PAIRED:
        return rng.choice(pairs(classes))
    return (rng.choice([name for name in CLASSES if name in classes]),)


def compose(
    rng: Random, classes: tuple[str, ...], turns: int, long_context: bool = False
) -> GeneratedConversation:
    """A conversation of so many turns over these simulators.

    Raises:
      Unfit: this world does not lend itself to one.
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
        raise Unfit("a simulator without a turn")
    return GeneratedConversation(opening, classes, scenario, tuple(written))


def _write_turn(draft: Draft, options: list[RequestKind]) -> tuple[RequestKind, Ask]:
    """The next turn: the first request, in random order, that the world has a place for."""
    draft.begin_turn()
    draft.rng.shuffle(options)
    if draft.rng.random() < CARRIED:
        options.sort(key=lambda request: -len(request.classes))
    if draft.rng.random() < FOLLOWED:
        options.sort(key=lambda request: request.follows not in draft.facts)
    for request in options:
        if request.follows is not None and request.follows not in draft.facts:
            continue
        try:
            return request, request.write(draft)
        except Unfit:
            if draft.calls:  # the world has changed already
                raise
    raise Unfit("no request fits")


def _link(rng: Random, ask: Ask, first: bool) -> Ask:
    """The words of a turn with those that lead to it and end it."""
    prefix, end = rng.choice(HELLOS if first else LINKS), rng.choice(ENDS)
    texts = [
        " ".join(part for part in (prefix, text, end) if part) for text in (ask.text, ask.partial)
    ]
    return Ask(texts[0], ask.partial and texts[1], ask.detail)
