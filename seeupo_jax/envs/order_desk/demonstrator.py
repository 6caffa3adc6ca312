"""Demonstrations of the order desk, by an oracle or with random mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from seeupo_jax.envs.base import Demonstration
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.desk import OUTCOMES, DeskEpisode
from seeupo_jax.envs.order_desk.errand_demonstrator import play_errand
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
_ASKED = {"cancel": "cancelled", "return": "returned", "address": "address_changed"}


def demonstrate(task_id: str, *, skill: float = 1.0, seed: int = 0) -> tuple[Demonstration, float]:
    """Plays one case on the real desk; returns the conversation and its score.

    Args:
      skill: 1 is the oracle, which always scores 1; 0 has the mistakes of `SLIPS`.
      seed: of the mistakes; the same arguments give the same conversation.
    """
    if not 0 <= skill <= 1:
        raise ValueError(f"order_desk skill: got {skill}; allowed: a number from 0 to 1.")
    level = LEVELS[level_of(task_id)]
    task = level.find_task(task_id)
    case, messages = DeskEpisode(level.open_desk(task)), level.opening(task)
    rng = random.Random(f"demonstrator/{task_id}/{skill}/{seed}")
    for action in PLAY[level_of(task_id)](task, skill, rng):
        result = case.step(action)
        messages += ({"role": "assistant", "content": action}, *result.observation)
        if result.done:
            break
    return Demonstration(messages, level.tools), case.score()


def play(task: world.Task, skill: float, rng: random.Random) -> Iterator[str]:
    """The demonstrator's responses at level 1, one per turn."""
    slip = {name: rng.random() < (1 - skill) * chance for name, chance in SLIPS.items()}
    customer = task.customers[task.customer]
    order = rng.choice(customer.orders) if slip["wrong_order"] else task.target
    yield render_hermes("find_customer", name=customer.name)
    yield render_hermes("list_orders", customer_id=customer.customer_id, item=order.item)
    if slip["bad_call"]:
        taken = {o.order_id for c in task.customers for o in c.orders}
        wrong = {order.item + number for number in world.ORDER_NUMBERS} - taken
        yield render_hermes("get_order", order_id=rng.choice(sorted(wrong)))
    if slip["guess"]:
        outcome = rng.choice(OUTCOMES)
    else:
        yield render_hermes("get_order", order_id=order.order_id)
        outcome = world.resolve(task.request, order)
        if slip["obey"] and task.request in _ASKED:
            outcome = _ASKED[task.request]
    yield from _act(outcome, order, task.address or order.address)
    yield render_hermes("reply", outcome=rng.choice(OUTCOMES) if slip["wrong_reply"] else outcome)


def _act(outcome: str, order: world.Order, address: str) -> Iterator[str]:
    if outcome == "cancelled":
        yield render_hermes("cancel_order", order_id=order.order_id)
    elif outcome == "returned":
        yield render_hermes("return_order", order_id=order.order_id)
    elif outcome == "address_changed":
        yield render_hermes("change_address", order_id=order.order_id, address=address)


# Level -> what plays a task of it.
PLAY: dict[int, Callable[[Any, float, random.Random], Iterator[str]]] = {1: play, 2: play_errand}
