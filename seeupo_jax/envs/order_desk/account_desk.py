"""The desk at level 2: its tools on accounts, and the check that an errand is solved."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar

from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.order_desk import accounts, errands
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.accounts import Account, ParcelledOrder
from seeupo_jax.envs.order_desk.desk import OUTCOMES, TOOLS, DeskRefusal, check_call, tool
from seeupo_jax.envs.order_desk.errands import Errand
from seeupo_jax.envs.tool_calls import ToolCall

ERRAND_TOOLS: tuple[Tool, ...] = (
    *(each for each in TOOLS if each["name"] != "reply"),
    tool("get_customer", "How many changes a customer has left.", customer_id="Such as C12."),
    tool("get_parcel", "The ids of all orders in an order's parcel.", order_id="Such as mug-34."),
    tool(
        "reply",
        "Answers one request; after the last one the case ends.",
        item="What the request is about, such as mug.",
        outcome="|".join(OUTCOMES),
    ),
)


class AccountDesk:
    """The accounts of one errand and the replies to the customer.

    hasty: whether an action or a reply concerned an order that had not been looked up.
    """

    max_turns: ClassVar[int] = errands.MAX_TURNS

    def __init__(self, errand: Errand):
        self.errand = errand
        self.accounts = {account.customer_id: account for account in errand.accounts}
        self.items = {order.item: order.order_id for order in errand.targets}
        self.looked_up: set[str] = set()  # order ids
        self.replies: dict[str, str] = {}  # outcomes by item
        self.hasty = False

    @property
    def finished(self) -> bool:
        return len(self.replies) == len(self.items)

    def call(self, call: ToolCall) -> str:
        """Executes a tool call; returns the tool's answer.

        Raises:
          DeskRefusal: unknown tool, wrong arguments, unknown name or id, or a second reply.
        """
        check_call(call, ERRAND_TOOLS)
        tools: dict[str, Callable[..., str]] = {
            "find_customer": self._find_customer,
            "list_orders": self._list_orders,
            "get_order": self._get_order,
            "get_customer": lambda customer_id: json.dumps(
                {"changes": self._account(customer_id).changes}
            ),
            "get_parcel": lambda order_id: json.dumps(self._holder(order_id).parcel(order_id)),
            "cancel_order": lambda order_id: self._change(order_id, accounts.cancel),
            "return_order": lambda order_id: self._change(order_id, accounts.send_back),
            "change_address": lambda order_id, address: self._change(
                order_id, lambda account, moved: accounts.move(account, moved, address)
            ),
            "reply": self._reply,
        }
        return tools[call.name](**call.arguments)

    def solved(self) -> bool:
        """Whether replies and accounts follow the policy, and every decided order was looked up."""
        settled, account = errands.settle(self.errand)
        wanted = {each.customer_id: each for each in self.errand.accounts}
        wanted[account.customer_id] = account
        replies = dict(zip(self.items, settled.outcomes, strict=True))
        return not self.hasty and self.replies == replies and self.accounts == wanted

    def _find_customer(self, name: str) -> str:
        for account in self.accounts.values():
            if account.name == name:
                return json.dumps({"customer_id": account.customer_id})
        raise DeskRefusal(f"no customer {name!r}")

    def _list_orders(self, customer_id: str, item: str) -> str:
        orders = self._account(customer_id).orders
        return json.dumps([order.order_id for order in orders if order.item == item])

    def _get_order(self, order_id: str) -> str:
        answer = world.describe(self._order(order_id))
        self.looked_up.add(order_id)
        return answer

    def _account(self, customer_id: str) -> Account:
        if customer_id not in self.accounts:
            raise DeskRefusal(f"no customer {customer_id!r}")
        return self.accounts[customer_id]

    def _holder(self, order_id: str) -> Account:
        for account in self.accounts.values():
            if any(order.order_id == order_id for order in account.orders):
                return account
        raise DeskRefusal(f"no order {order_id!r}")

    def _order(self, order_id: str) -> ParcelledOrder:
        return self._holder(order_id).order(order_id)

    def _change(self, order_id: str, action: Callable[[Account, str], Account]) -> str:
        order = self._order(order_id)
        if order.status in ("cancelled", "returned"):
            raise DeskRefusal(f"{order_id} is already {order.status}")
        account = action(self._holder(order_id), order_id)
        self.accounts[account.customer_id] = account
        self.hasty |= order_id not in self.looked_up
        return json.dumps({"done": order_id})

    def _reply(self, item: str, outcome: str) -> str:
        if item not in self.items:
            raise DeskRefusal(f"no request about {item!r}")
        if item in self.replies:
            raise DeskRefusal(f"{item} is already answered")
        if outcome not in OUTCOMES:
            raise DeskRefusal(f"outcome must be one of: {', '.join(OUTCOMES)}")
        self.hasty |= self.items[item] not in self.looked_up
        self.replies[item] = outcome
        return json.dumps({"done": item})
