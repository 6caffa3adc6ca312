"""Outcomes of several requests of one customer, a feasible order, and the look-ups they require.

A request is represented by the outcome that it would have alone (`orders.resolve`). Outcomes
cancelled, address_changed and processing belong to orders in the warehouse, which share parcels;
the others depend on no parcel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from seeupo_jax.envs.order_desk.accounts import MAX_CHANGES

# Changes of the account that an action uses.
COSTS = {"cancelled": -1, "returned": 1, "address_changed": 1}
_IN_WAREHOUSE = ("cancelled", "address_changed", "processing")
CHANGES = -1  # the look-up of the account's changes; other look-ups: a request's index, its parcel


@dataclass(frozen=True)
class Agenda:
    """The requests that are carried out, in this order, and the outcome of each request."""

    actions: tuple[int, ...]
    outcomes: tuple[str, ...]


@dataclass(frozen=True)
class SharedResources:
    """The changes and parcels that requests share.

    changes: left in the account.
    parcels: each request's parcel, named by the first request in the warehouse with that parcel.
    """

    changes: int
    parcels: tuple[int, ...]


def share(alone: tuple[str, ...], changes: int, numbers: Sequence[int]) -> SharedResources:
    """Returns what requests share; `numbers` are the parcel numbers of their orders."""
    inside = [request for request, outcome in enumerate(alone) if outcome in _IN_WAREHOUSE]
    first = {numbers[request]: request for request in reversed(inside)}
    parcels = (first[n] if r in inside else r for r, n in enumerate(numbers))
    return SharedResources(changes, tuple(parcels))


def serve(alone: tuple[str, ...], shared: SharedResources, order: tuple[int, ...]) -> Agenda:
    """Serves requests in an order: each if the rules still allow it, otherwise it is refused."""
    changes, sent, actions = shared.changes, set[int](), list[int]()
    for request in order:
        gone = alone[request] in _IN_WAREHOUSE and shared.parcels[request] in sent
        if gone or changes < COSTS[alone[request]]:
            continue
        actions.append(request)
        changes -= COSTS[alone[request]]
        if alone[request] == "cancelled":
            sent.add(shared.parcels[request])

    def outcome(request: int) -> str:
        if alone[request] in COSTS:
            return alone[request] if request in actions else "refused"
        gone = alone[request] == "processing" and shared.parcels[request] in sent
        return "shipped" if gone else alone[request]

    return Agenda(tuple(actions), tuple(map(outcome, range(len(alone)))))


@functools.cache
def solve(alone: tuple[str, ...], shared: SharedResources) -> Agenda:
    """Serves as many requests as any order allows; ties go to the requests asked first."""
    asked = [request for request, outcome in enumerate(alone) if outcome in COSTS]
    agendas = (serve(alone, shared, order) for order in itertools.permutations(asked))
    return max(agendas, key=lambda a: (len(a.actions), [r in a.actions for r in asked]))


@functools.cache
def possible(alone: tuple[str, ...]) -> frozenset[SharedResources]:
    """All possible combinations of changes and of parcels that requests may share."""
    return frozenset(
        share(alone, changes, numbers)
        for changes in range(MAX_CHANGES + 1)
        for numbers in itertools.product(range(2), repeat=len(alone))
    )


def answer(shared: SharedResources, look_up: int) -> object:
    """The result of a look-up: the changes, or which requests share the parcel."""
    if look_up == CHANGES:
        return shared.changes
    return tuple(parcel == shared.parcels[look_up] for parcel in shared.parcels)


def narrow(
    worlds: frozenset[SharedResources], look_up: int, truth: SharedResources
) -> frozenset[SharedResources]:
    """The possibilities that remain after a look-up."""
    return frozenset(w for w in worlds if answer(w, look_up) == answer(truth, look_up))


@functools.cache
def decide(alone: tuple[str, ...], worlds: frozenset[SharedResources]) -> Agenda | None:
    """An agenda that is right in every possible world; None: there is none."""
    solved = {solve(alone, world) for world in worlds}
    if len({agenda.outcomes for agenda in solved}) != 1:
        return None
    outcomes = next(iter(solved)).outcomes
    actions = sorted(next(iter(solved)).actions)
    for order in itertools.permutations(actions):
        wanted = Agenda(order, outcomes)
        if all(serve(alone, world, order) == wanted for world in worlds):
            return wanted
    return None


@functools.cache
def next_look_up(alone: tuple[str, ...], worlds: frozenset[SharedResources]) -> int | None:
    """The look-up after which the fewest are left in the worst case; None: none is needed.

    Ties go to the changes, then to the parcels of orders that would be cancelled.
    """
    return None if decide(alone, worlds) else _best(alone, worlds)[1]


@functools.cache
def _best(alone: tuple[str, ...], worlds: frozenset[SharedResources]) -> tuple[int, int]:
    """The number of look-ups in the worst case, and the first one."""
    if decide(alone, worlds):
        return 0, CHANGES
    options = list[tuple[int, int]]()
    cancelled_first = sorted(range(len(alone)), key=lambda request: alone[request] != "cancelled")
    for look_up in (CHANGES, *cancelled_first):
        rest = {narrow(worlds, look_up, world) for world in worlds}
        if len(rest) > 1:
            options.append((1 + max(_best(alone, each)[0] for each in rest), look_up))
    return min(options, key=lambda option: option[0])
