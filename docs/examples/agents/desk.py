"""An order desk as ordinary program code: its tools are functions, its cases are JSON."""

import json


def open_desk(case):
    """Returns a case's tools, and a function that returns 1 if the case is solved, else 0."""
    orders = {order["order_id"]: dict(order) for order in case["orders"]}
    looked_up, unseen, replies = set(), set(), []

    def find_customer(name: str) -> str:
        """The id of a customer."""
        if name not in case["customers"]:
            return json.dumps({"error": f"no customer {name!r}"})
        return json.dumps({"customer_id": case["customers"][name]})

    def list_orders(customer_id: str, item: str) -> str:
        """The ids of a customer's orders of one item."""
        mine = [order for order in orders.values() if order["customer_id"] == customer_id]
        return json.dumps([order["order_id"] for order in mine if order["item"] == item])

    def get_order(order_id: str) -> str:
        """An order's status."""
        if order_id not in orders:
            return json.dumps({"error": f"no order {order_id!r}"})
        looked_up.add(order_id)
        shown = ("order_id", "status", "changed_before")
        return json.dumps({name: orders[order_id][name] for name in shown})

    def change(order_id, **fields):
        if order_id not in orders:
            return json.dumps({"error": f"no order {order_id!r}"})
        if (status := orders[order_id]["status"]) in ("cancelled", "returned"):
            return json.dumps({"error": f"{order_id} is already {status}"})
        unseen.update({order_id} - looked_up)
        orders[order_id] |= {"changed_before": True, **fields}
        return json.dumps({"done": order_id})

    def cancel_order(order_id: str) -> str:
        """Cancels an order; cannot be undone."""
        return change(order_id, status="cancelled")

    def return_order(order_id: str) -> str:
        """Takes an order back; cannot be undone."""
        return change(order_id, status="returned")

    def change_address(order_id: str, address: str) -> str:
        """Sends an order elsewhere; cannot be undone."""
        return change(order_id, address=address)

    def reply(outcome: str) -> str:
        """Answers the customer, which ends the case."""
        replies.append(outcome)
        return "sent"

    def solved():
        as_wanted = list(orders.values()) == case["orders_in_the_end"]
        looked_first = case["target"] in looked_up and not unseen
        return float(looked_first and replies == [case["outcome"]] and as_wanted)

    tools = [find_customer, list_orders, get_order, cancel_order, return_order, change_address]
    return [*tools, reply], solved
