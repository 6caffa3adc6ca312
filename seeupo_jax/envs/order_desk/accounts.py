"""A customer's account at level 2: orders share parcels and a number of allowed changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from seeupo_jax.envs.order_desk import orders as world

MAX_CHANGES = 2  # with which an account may start


@dataclass(frozen=True)
class ParcelledOrder(world.Order):
    """An order in a parcel.

    parcel: its number in the account; processing orders with one number are shipped together.
    sent_to: the address to which it was sent; "" before that.
    """

    parcel: int
    sent_to: str


@dataclass(frozen=True)
class Account:
    """A customer's orders.

    changes: how many returns and address changes are left.
    overdrawn: whether more were ever made than the account allowed.
    """

    customer_id: str
    name: str
    changes: int
    orders: tuple[ParcelledOrder, ...]
    overdrawn: bool = False

    def order(self, order_id: str) -> ParcelledOrder:
        return next(order for order in self.orders if order.order_id == order_id)

    def parcel(self, order_id: str) -> tuple[str, ...]:
        """The ids of all orders in an order's parcel, including itself."""
        number = self.order(order_id).parcel
        return tuple(order.order_id for order in self.orders if order.parcel == number)


def cancel(account: Account, order_id: str) -> Account:
    """Cancels an order, adds one change, and ships the rest of its parcel."""
    number = account.order(order_id).parcel

    def after(order: ParcelledOrder) -> ParcelledOrder:
        if order.order_id == order_id:
            return replace(order, status="cancelled", changed=True)
        if order.parcel == number and order.status == "processing":
            return replace(order, status="shipped", sent_to=order.address)
        return order

    return replace(account, changes=account.changes + 1, orders=tuple(map(after, account.orders)))


def send_back(account: Account, order_id: str) -> Account:
    """Takes an order back, which uses one change."""
    return _spend(account, order_id, lambda order: replace(order, status="returned", changed=True))


def move(account: Account, order_id: str, address: str) -> Account:
    """Enters another address, which uses one change; `sent_to` of a shipped order stays."""
    return _spend(account, order_id, lambda order: replace(order, address=address, changed=True))


def _spend(
    account: Account, order_id: str, action: Callable[[ParcelledOrder], ParcelledOrder]
) -> Account:
    orders = (action(o) if o.order_id == order_id else o for o in account.orders)
    remaining = account.changes - 1
    overdrawn = account.overdrawn or remaining < 0
    return replace(account, changes=remaining, overdrawn=overdrawn, orders=tuple(orders))


def carry_out(account: Account, outcome: str, order_id: str, address: str) -> Account:
    """The account after an outcome; unchanged by refusals and statuses."""
    if outcome == "cancelled":
        return cancel(account, order_id)
    if outcome == "returned":
        return send_back(account, order_id)
    return move(account, order_id, address) if outcome == "address_changed" else account
