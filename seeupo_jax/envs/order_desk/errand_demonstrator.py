"""Demonstrations of level 2, by an oracle or with mistakes about what requests share."""

from __future__ import annotations

import random
from collections.abc import Iterator

from seeupo_jax.envs.order_desk import agenda
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.agenda import Agenda
from seeupo_jax.envs.order_desk.desk import OUTCOMES
from seeupo_jax.envs.order_desk.errands import Errand
from seeupo_jax.envs.tool_calls import render_hermes

# The probability of each mistake at skill 0; at skill 1 it is 0.
ERRAND_SLIPS = {
    "guess": 0.5,  # leaves out the look-ups that decide, and takes one of the possible answers
    "hasty": 0.5,  # serves requests in the order in which they were asked for
    "alone": 0.5,  # serves each request as if it were the only one
    "obey": 0.5,  # does one of them as asked, against the policy
    "wrong_reply": 0.3,  # replies to one of them with another outcome
    "bad_call": 0.2,  # first asks for an order that does not exist
}
_ASKED = {"cancel": "cancelled", "return": "returned", "address": "address_changed"}


def play_errand(errand: Errand, skill: float, rng: random.Random) -> Iterator[str]:
    """The demonstrator's responses at level 2, one per turn.

    The oracle looks up the orders, then what else the errand depends on, acts in an order that
    works, and replies in the order in which the customer asked.
    """
    slip = {name: rng.random() < (1 - skill) * chance for name, chance in ERRAND_SLIPS.items()}
    account = errand.account
    yield render_hermes("find_customer", name=account.name)
    for order in errand.targets:
        listed = {"customer_id": account.customer_id, "item": order.item}
        yield render_hermes("list_orders", **listed)
        yield render_hermes("get_order", order_id=order.order_id)
    if slip["bad_call"]:
        item = rng.choice(errand.targets).item
        taken = {order.order_id for each in errand.accounts for order in each.orders}
        wrong = {item + number for number in world.ORDER_NUMBERS} - taken
        yield render_hermes("get_order", order_id=rng.choice(sorted(wrong)))
    worlds = agenda.possible(errand.alone)
    if slip["guess"]:
        guessed = rng.choice(sorted(worlds, key=lambda each: (each.changes, each.parcels)))
        decided = agenda.solve(errand.alone, guessed)
    else:
        while (look_up := agenda.next_look_up(errand.alone, worlds)) is not None:
            yield _look(errand, look_up)
            worlds = agenda.narrow(worlds, look_up, errand.shared)
        decided = agenda.decide(errand.alone, worlds)
        assert decided is not None
    yield from _carry_out(errand, _mistaken(errand, decided, slip, rng), slip["wrong_reply"], rng)


def _look(errand: Errand, look_up: int) -> str:
    if look_up == agenda.CHANGES:
        return render_hermes("get_customer", customer_id=errand.account.customer_id)
    return render_hermes("get_parcel", order_id=errand.targets[look_up].order_id)


def _mistaken(errand: Errand, right: Agenda, slip: dict[str, bool], rng: random.Random) -> Agenda:
    """The agenda with the mistakes that are due."""
    actions, outcomes = list(right.actions), list(right.outcomes)
    if slip["alone"]:
        outcomes = list(errand.alone)
        actions = [i for i, outcome in enumerate(outcomes) if outcome in agenda.COSTS]
    obeyed = [i for i, request in enumerate(errand.requests) if request.kind in _ASKED]
    if slip["obey"] and obeyed:
        request = rng.choice(obeyed)
        outcomes[request] = _ASKED[errand.requests[request].kind]
        actions += [request] * (request not in actions)
    return Agenda(tuple(sorted(actions) if slip["hasty"] else actions), tuple(outcomes))


def _carry_out(
    errand: Errand, planned: Agenda, wrong_reply: bool, rng: random.Random
) -> Iterator[str]:
    for index in planned.actions:
        order, address = errand.targets[index], errand.requests[index].address
        yield _act(planned.outcomes[index], order.order_id, address)
    wrong = rng.randrange(len(errand.requests)) if wrong_reply else None
    for index, order in enumerate(errand.targets):
        outcome = rng.choice(OUTCOMES) if index == wrong else planned.outcomes[index]
        yield render_hermes("reply", item=order.item, outcome=outcome)


def _act(outcome: str, order_id: str, address: str) -> str:
    if outcome == "address_changed":
        return render_hermes("change_address", order_id=order_id, address=address)
    tool = {"cancelled": "cancel_order", "returned": "return_order"}[outcome]
    return render_hermes(tool, order_id=order_id)
