"""The tasks of level 2: one customer with two or three requests that depend on each other."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from seeupo_jax.envs.order_desk import accounts, agenda
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.accounts import Account, ParcelledOrder
from seeupo_jax.envs.order_desk.agenda import Agenda, SharedResources

MAX_TURNS = 16
MIN_TURNS = 10  # of the oracle

POLICY = """You work at an online shop's order desk. Use the tools; reply once to each request.
- Look an order up before you decide about it.
- A processing order is cancelled, never returned. A delivered order is returned, never cancelled.
- A shipped order is neither cancelled nor returned: refuse.
- The address changes only while the order is processing; otherwise refuse.
- An order that was changed before is not changed again: refuse any second request.
- A return or a new address takes one of the customer's changes, a cancellation gives one back. \
Without a change left, refuse.
- A cancellation sends off whatever else is processing in the order's parcel: that is shipped then.
- Carry out as many requests as you can, in any order. If not all can be, those asked first count.
- To a question reply the status that the order has in the end.
- Touch no order but those that the customer means. Actions cannot be undone."""


@dataclass(frozen=True)
class DeskRequest:
    """One request of a customer.

    kind: one of `orders.REQUESTS`. order: an index into the customer's orders. address: the new
    address, or "".
    """

    kind: str
    order: int
    address: str


@dataclass(frozen=True)
class Errand:
    """A shop's accounts, a customer's message, and its requests in order."""

    message: str
    accounts: tuple[Account, ...]
    customer: int  # index of the writer
    requests: tuple[DeskRequest, ...]

    @property
    def account(self) -> Account:
        return self.accounts[self.customer]

    @property
    def targets(self) -> tuple[ParcelledOrder, ...]:
        return tuple(self.account.orders[request.order] for request in self.requests)

    @property
    def alone(self) -> tuple[str, ...]:
        """The outcome that each request would have if it were the only one."""
        pairs = zip(self.requests, self.targets, strict=True)
        return tuple(world.resolve(request.kind, order) for request, order in pairs)

    @property
    def shared(self) -> SharedResources:
        """The changes and parcels that the requests share."""
        numbers = [order.parcel for order in self.targets]
        return agenda.shared_resources(self.alone, self.account.changes, numbers)


def solve_errand(errand: Errand) -> tuple[Agenda, Account]:
    """The correct solution: the agenda, and the customer's account after it."""
    settled, account = agenda.solve(errand.alone, errand.shared), errand.account
    for index in settled.actions:
        order_id, address = errand.targets[index].order_id, errand.requests[index].address
        account = accounts.carry_out(account, settled.outcomes[index], order_id, address)
    return settled, account


def plan_look_ups(errand: Errand) -> tuple[tuple[int, ...], Agenda]:
    """The look-ups that decide the errand (see `agenda`), and the resulting agenda."""
    worlds, look_ups = agenda.possible_resources(errand.alone), list[int]()
    while (look_up := agenda.next_look_up(errand.alone, worlds)) is not None:
        look_ups.append(look_up)
        worlds = agenda.narrow(worlds, look_up, errand.shared)
    decided = agenda.decide(errand.alone, worlds)
    assert decided is not None
    return tuple(look_ups), decided


def count_turns(errand: Errand) -> int:
    """The number of turns that the oracle takes: it finds, lists, looks up, acts and replies."""
    look_ups, decided = plan_look_ups(errand)
    return 1 + 3 * len(errand.requests) + len(look_ups) + len(decided.actions)


def make_errand(split: str, index: int) -> Errand:
    """Makes the errand `split/index`; the same arguments always give the same errand.

    An errand's content decides whether it is held out, as at level 1. Errands whose requests do not
    depend on each other are rejected.

    Raises:
      ValueError: the split is unknown or the index out of range.
    """
    world.check_task(split, index)
    rng = random.Random(f"order_desk/level2/{split}/{index}")
    while True:
        errand = _draw(rng)
        held_out = zlib.crc32(_content(errand)) % 8 == 0
        if held_out == (split != "train") and rng.random() < _share_kept(errand):
            return errand


def _content(errand: Errand) -> bytes:
    """An errand as bytes, which decide its split."""
    # The name that the class had when the splits were published: another one would change them.
    return repr(errand).replace("DeskRequest(", "Request(").encode()


def order_matters(errand: Errand) -> bool:
    """Whether serving the requests in the order asked fails."""
    asked = tuple(i for i, outcome in enumerate(errand.alone) if outcome in agenda.COSTS)
    served = agenda.serve(errand.alone, errand.shared, asked)
    return served.outcomes != solve_errand(errand)[0].outcomes


def _share_kept(errand: Errand) -> float:
    """The probability of keeping a drawn errand: most are easy, so that hard ones are kept more."""
    look_ups, decided = plan_look_ups(errand)
    reordered = decided.actions != tuple(sorted(decided.actions))
    if not (look_ups or reordered) or not MIN_TURNS <= count_turns(errand) <= MAX_TURNS:
        return 0.0
    if order_matters(errand):
        return 1.0
    return 0.15 if solve_errand(errand)[0].outcomes == errand.alone else 0.3


def _draw(rng: random.Random) -> Errand:
    count = 3
    names = [f"{rng.choice(world.FIRST_NAMES)} {n}" for n in rng.sample(world.LAST_NAMES, count)]
    ids, numbers = rng.sample(world.CUSTOMER_IDS, count), rng.sample(world.ORDER_NUMBERS, count)
    drawn = tuple(
        Account(ids[c], names[c], rng.choice((0, 0, 1, 1, 2)), _draw_orders(rng, numbers[c]))
        for c in range(count)
    )
    customer = rng.randrange(count)
    orders = rng.sample(range(len(drawn[customer].orders)), rng.choice((2, 3, 3)))
    requests = tuple(_draw_request(rng, order) for order in orders)
    sentences = [rng.choice(world.GREETINGS)]
    for request in requests:
        item = drawn[customer].orders[request.order].item
        phrase = rng.choice(world.PHRASES[request.kind])
        sentences.append(phrase.format(item=item, address=request.address))
    message = f"{' '.join(sentences)}{rng.choice(world.CLOSINGS)}"
    message = message.replace("{name}", names[customer])
    return Errand(message, drawn, customer, requests)


def _draw_request(rng: random.Random, order: int) -> DeskRequest:
    kind = rng.choice(world.REQUESTS)
    return DeskRequest(kind, order, _draw_address(rng) if kind == "address" else "")


def _draw_orders(rng: random.Random, number: str) -> tuple[ParcelledOrder, ...]:
    """Draws a customer's orders, whose ids all end in the same number."""
    drawn = list[ParcelledOrder]()
    for place, item in enumerate(rng.sample(world.ITEMS, rng.randint(3, 4))):
        status = rng.choice((*("processing",) * 4, "shipped", "delivered"))
        address, changed = _draw_address(rng), rng.random() < 0.1
        inside = status == "processing"
        parcel = rng.randrange(2) if inside else 2 + place  # shipped orders were shipped alone
        order_id, sent_to = item + number, "" if inside else address
        drawn.append(ParcelledOrder(order_id, item, status, address, changed, parcel, sent_to))
    return tuple(drawn)


def _draw_address(rng: random.Random) -> str:
    """Draws an address with one digit: small policies should not have to copy long numbers."""
    return f"{rng.randint(1, 9)} {rng.choice(world.STREETS)} Street"
