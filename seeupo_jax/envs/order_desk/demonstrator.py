"""Demonstrations of the order desk at both levels, by an oracle or with random mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from seeupo_jax.envs.base import Demonstration
from seeupo_jax.envs.order_desk import agenda
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.agenda import Agenda
from seeupo_jax.envs.order_desk.desk import OUTCOMES, DeskEpisode
from seeupo_jax.envs.order_desk.errands import Errand
from seeupo_jax.envs.order_desk.levels import LEVELS, level_of
from seeupo_jax.envs.tool_calls import render_hermes

# The probability of each mistake at skill 0 at level 1; at skill 1 it is 0.
SLIPS = {
    "guess": 0.5,  # acts without looking the order up
    "wrong_order": 0.4,  # takes another of the customer's orders
    "obey": 0.6,  # does as asked, against the policy
    "wrong_reply": 0.25,  # replies with another outcome
    "bad_call": 0.15,  # first asks for an order that does not exist
}
# The same at level 2.
ERRAND_SLIPS = {
    "guess": 0.5,  # omits the look-ups that decide, and picks one of the possible agendas
    "hasty": 0.5,  # serves requests in the order in which they were made
    "alone": 0.5,  # serves each request as if it were the only one
    "obey": 0.5,  # serves one of them as asked, against the policy
    "wrong_reply": 0.3,  # replies to one of them with another outcome
    "bad_call": 0.2,  # first asks for an order that does not exist
}
_ASKED = {"cancel": "cancelled", "return": "returned", "address": "address_changed"}


def demonstrate(task_id: str, *, skill: float = 1.0, seed: int = 0) -> tuple[Demonstration, float]:
    """Plays one task on the real desk; returns the conversation and its score.

    Args:
      skill: 1 is the oracle, which always scores 1; 0 makes the mistakes of `SLIPS` with their full
        probabilities.
      seed: of the mistakes; the same arguments give the same conversation.
    """
    if not 0 <= skill <= 1:
        raise ValueError(f"order_desk skill: got {skill}; allowed: a number from 0 to 1.")
    level = LEVELS[level_of(task_id)]
    task = level.find_task(task_id)
    episode, messages = DeskEpisode(level.open_desk(task)), level.opening(task)
    rng = random.Random(f"demonstrator/{task_id}/{skill}/{seed}")
    for action in PLAY[level_of(task_id)](task, skill, rng):
        result = episode.step(action)
        messages += ({"role": "assistant", "content": action}, *result.observation)
        if result.done:
            break
    return Demonstration(messages, level.tools), episode.score()


def play(task: world.Task, skill: float, rng: random.Random) -> Iterator[str]:
    """The demonstrator's responses at level 1, one per turn."""
    slip = {name: rng.random() < (1 - skill) * chance for name, chance in SLIPS.items()}
    customer = task.customers[task.customer]
    order = rng.choice(customer.orders) if slip["wrong_order"] else task.target
    yield render_hermes("find_customer", name=customer.name)
    yield render_hermes("list_orders", customer_id=customer.customer_id, item=order.item)
    if slip["bad_call"]:
        yield _unknown_order(order.item, [o for c in task.customers for o in c.orders], rng)
    if slip["guess"]:
        outcome = rng.choice(OUTCOMES)
    else:
        yield render_hermes("get_order", order_id=order.order_id)
        outcome = world.resolve(task.request, order)
        if slip["obey"] and task.request in _ASKED:
            outcome = _ASKED[task.request]
    yield from _act(outcome, order.order_id, task.address or order.address)
    yield render_hermes("reply", outcome=rng.choice(OUTCOMES) if slip["wrong_reply"] else outcome)


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
        yield _unknown_order(item, [o for each in errand.accounts for o in each.orders], rng)
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
    planned = _mistaken(errand, decided, slip, rng)
    for index in planned.actions:
        order, address = errand.targets[index], errand.requests[index].address
        yield from _act(planned.outcomes[index], order.order_id, address)
    wrong = rng.randrange(len(errand.requests)) if slip["wrong_reply"] else None
    for index, order in enumerate(errand.targets):
        outcome = rng.choice(OUTCOMES) if index == wrong else planned.outcomes[index]
        yield render_hermes("reply", item=order.item, outcome=outcome)


def _unknown_order(item: str, orders: list[world.Order], rng: random.Random) -> str:
    """A look-up of an order that does not exist."""
    wrong = {item + number for number in world.ORDER_NUMBERS} - {o.order_id for o in orders}
    return render_hermes("get_order", order_id=rng.choice(sorted(wrong)))


def _look(errand: Errand, look_up: int) -> str:
    if look_up == agenda.CHANGES:
        return render_hermes("get_customer", customer_id=errand.account.customer_id)
    return render_hermes("get_parcel", order_id=errand.targets[look_up].order_id)


def _mistaken(errand: Errand, right: Agenda, slip: dict[str, bool], rng: random.Random) -> Agenda:
    """The agenda with the mistakes that were drawn."""
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


def _act(outcome: str, order_id: str, address: str) -> Iterator[str]:
    """The call that brings an outcome about; none for refusals and statuses."""
    if outcome == "cancelled":
        yield render_hermes("cancel_order", order_id=order_id)
    elif outcome == "returned":
        yield render_hermes("return_order", order_id=order_id)
    elif outcome == "address_changed":
        yield render_hermes("change_address", order_id=order_id, address=address)


# Plays a task, by level.
PLAY: dict[int, Callable[[Any, float, random.Random], Iterator[str]]] = {1: play, 2: play_errand}
