"""The world of `order_desk`: customers, orders, requests, and the desk's policy on them."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from seeupo_jax.envs.base import check_choice

FIRST_NAMES = tuple(
    "Ada Amir Anna Ben Chen Clara Dana Diego Elif Emma Finn Grace Hana Hugo Ines Ivan"
    " Jana Jonas Kofi Lea Liam Luca Maya Mila Noah Nora Omar Pia Rosa Sara Tom Zoe".split()
)
LAST_NAMES = tuple(
    "Adler Brown Costa Diaz Evans Fischer Garcia Haddad Ito Jansen Keller Lopez"
    " Mori Novak Okafor Park Quinn Reed Silva Tanaka Usman Vogel Weber Young".split()
)
ITEMS = tuple(
    "kettle lamp jacket mug desk chair tent bike drill camera piano mirror rug blender"
    " clock sofa guitar helmet toaster ladder backpack keyboard monitor heater".split()
)
STREETS = tuple("Oak Elm Maple Cedar Birch Willow Park Lake Hill River Mill Church".split())
CUSTOMER_IDS = tuple(f"C{number}" for number in range(10, 70))
ORDER_NUMBERS = tuple(f"-{number}" for number in range(10, 70))  # mug-34: a mug's order

REQUESTS = ("cancel", "return", "address", "status")
STATUSES = ("processing", "shipped", "delivered")
SPLITS = {"train": 50_000, "validation": 2_000, "test": 2_000}

POLICY = """You work at an online shop's order desk. Use the tools; end with one reply.
- Look an order up before you decide about it.
- A processing order is cancelled, never returned. A delivered order is returned, never cancelled.
- A shipped order is neither cancelled nor returned: refuse.
- The address changes only while the order is processing; otherwise refuse.
- An order that was changed before is not changed again: refuse any second request.
- Touch no order but the one that the customer means. Actions cannot be undone."""

# Customers' phrases by request; {item}, {name} and {address} are filled in.
PHRASES = {
    "cancel": (
        "Please cancel my {item}.",
        "I no longer need the {item}, can you cancel it?",
        "I want to cancel the order for the {item}.",
        "Can you stop the {item} order?",
        "The {item} was a mistake, cancel it please.",
    ),
    "return": (
        "I want to return the {item}.",
        "The {item} does not fit, I would like to send it back.",
        "Can I return my {item}?",
        "Please take the {item} back.",
        "The {item} is broken, I want to return it.",
    ),
    "address": (
        "Please send the {item} to {address}.",
        "I moved to {address}, change it for the {item}.",
        "Can the {item} go to {address} instead?",
        "My new address for the {item} is {address}.",
        "Deliver the {item} to {address} please.",
    ),
    "status": (
        "Where is my {item}?",
        "What is the status of my {item}?",
        "Has the {item} shipped yet?",
        "When will I get the {item}?",
        "Any news about my {item}?",
    ),
}
GREETINGS = ("Hi, this is {name}.", "{name} here.", "Hello, I am {name}.", "My name is {name}.")
CLOSINGS = ("", " Thanks!", " Thank you.", " Best, {name}.")


@dataclass(frozen=True)
class Order:
    """One order. changed: a request about it has already been carried out."""

    order_id: str
    item: str
    status: str
    address: str
    changed: bool


@dataclass(frozen=True)
class Customer:
    customer_id: str
    name: str
    orders: tuple[Order, ...]


@dataclass(frozen=True)
class Task:
    """A shop's database, a customer's message, and the request hidden in it."""

    message: str
    customers: tuple[Customer, ...]
    customer: int  # index of the writer
    order: int  # index of the order that is meant, among the writer's
    request: str
    address: str  # the address asked for; "" unless request is address

    @property
    def target(self) -> Order:
        return self.customers[self.customer].orders[self.order]


def cancel(order: Order) -> Order:
    return replace(order, status="cancelled", changed=True)


def send_back(order: Order) -> Order:
    return replace(order, status="returned", changed=True)


def move(order: Order, address: str) -> Order:
    return replace(order, address=address, changed=True)


def resolve(request: str, order: Order) -> str:
    """The outcome by the policy: cancelled, returned, address_changed, refused, or the status."""
    if request == "status":
        return order.status
    if order.changed:
        return "refused"
    allowed = {
        ("cancel", "processing"): "cancelled",
        ("return", "processing"): "cancelled",
        ("cancel", "delivered"): "returned",
        ("return", "delivered"): "returned",
        ("address", "processing"): "address_changed",
    }
    return allowed.get((request, order.status), "refused")


def carry_out(outcome: str, order: Order, address: str) -> Order:
    """The order after an outcome; refusals and statuses do not change it."""
    actions: dict[str, Callable[[], Order]] = {
        "cancelled": lambda: cancel(order),
        "returned": lambda: send_back(order),
        "address_changed": lambda: move(order, address),
    }
    return actions[outcome]() if outcome in actions else order


def check_task(split: str, index: int) -> None:
    """Raises ValueError if there is no such split, or the split has no task with this index."""
    check_choice("order_desk split", split, SPLITS)
    if not 0 <= index < SPLITS[split]:
        raise ValueError(
            f"order_desk {split} task: got {index}; allowed: 0 to {SPLITS[split] - 1}."
        )


def make_task(split: str, index: int) -> Task:
    """Makes the task `split/index`; the same arguments always give the same task.

    A task's content decides whether it is held out (one in eight is), so no training task is a
    validation or test task.

    Raises:
      ValueError: the split is unknown or the index out of range.
    """
    check_task(split, index)
    rng = random.Random(f"order_desk/{split}/{index}")
    while True:
        task = _draw(rng)
        if (zlib.crc32(repr(task).encode()) % 8 == 0) == (split != "train"):
            return task


def _draw(rng: random.Random) -> Task:
    count = 3
    names = [f"{rng.choice(FIRST_NAMES)} {last}" for last in rng.sample(LAST_NAMES, count)]
    customer_ids = rng.sample(CUSTOMER_IDS, count)
    numbers = rng.sample(ORDER_NUMBERS, 4 * count)
    customers = tuple(
        Customer(customer_ids[c], names[c], _draw_orders(rng, numbers[4 * c : 4 * c + 4]))
        for c in range(count)
    )
    customer = rng.randrange(count)
    order = rng.randrange(len(customers[customer].orders))
    request = rng.choice(REQUESTS)
    address = draw_address(rng) if request == "address" else ""
    phrase = f"{rng.choice(GREETINGS)} {rng.choice(PHRASES[request])}{rng.choice(CLOSINGS)}"
    item = customers[customer].orders[order].item
    message = phrase.format(name=names[customer], item=item, address=address)
    return Task(message, customers, customer, order, request, address)


def _draw_orders(rng: random.Random, numbers: list[str]) -> tuple[Order, ...]:
    items = rng.sample(ITEMS, rng.randint(2, 4))
    return tuple(
        Order(item + number, item, rng.choice(STATUSES), draw_address(rng), rng.random() < 0.15)
        for item, number in zip(items, numbers, strict=False)
    )


def draw_address(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(STREETS)} Street"


def describe(order: Order) -> str:
    """The answer of `get_order`."""
    return json.dumps(
        {
            "order_id": order.order_id,
            "status": order.status,
            "changed_before": order.changed,
        }
    )
