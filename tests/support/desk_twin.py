"""The order desk's level 2 again: plain dicts, rules as the policy says them, and brute force.

It takes nothing of the package but the fields of tasks.
"""

import itertools
import json

ACTIONS = {
    "cancelled": "cancel_order",
    "returned": "return_order",
    "address_changed": "change_address",
}


def database(errand):
    """Customers by id, each with changes and orders; parcels as sets of ids."""
    shop = {}
    for account in errand.accounts:
        rows = {
            order.order_id: {
                "item": order.item,
                "status": order.status,
                "address": order.address,
                "changed": order.changed,
                "label": order.sent_to,
                "parcel": [o.order_id for o in account.orders if o.parcel == order.parcel],
            }
            for order in account.orders
        }
        shop[account.customer_id] = {
            "name": account.name,
            "changes": account.changes,
            "lowest": account.changes,
            "orders": rows,
        }
    return shop


def copied(shop):
    return json.loads(json.dumps(shop))


def holder(shop, order_id):
    return next((c for c in shop.values() if order_id in c["orders"]), None)


def do(shop, tool, order_id, address=""):
    """What the software does with an action, whatever the policy says; the answer, or None."""
    customer = holder(shop, order_id)
    if customer is None or customer["orders"][order_id]["status"] in ("cancelled", "returned"):
        return None
    row = customer["orders"][order_id]
    row["changed"] = True
    customer["changes"] += 1 if tool == "cancel_order" else -1
    customer["lowest"] = min(customer["lowest"], customer["changes"])
    if tool == "cancel_order":
        row["status"] = "cancelled"
        for other in row["parcel"]:
            mate = customer["orders"][other]
            if mate["status"] == "processing":
                mate["status"], mate["label"] = "shipped", mate["address"]
    elif tool == "return_order":
        row["status"] = "returned"
    else:
        row["address"] = address
    return {"done": order_id}


def permitted(shop, kind, order_id):
    """The outcome that the policy allows for a request at this moment, or None: refuse."""
    customer = holder(shop, order_id)
    row = customer["orders"][order_id]
    if row["changed"] or row["status"] not in ("processing", "delivered"):
        return None
    if row["status"] == "processing":
        if kind != "address":
            return "cancelled"
        return "address_changed" if customer["changes"] > 0 else None
    return "returned" if kind != "address" and customer["changes"] > 0 else None


def best(errand):
    """The shop and the replies that the policy demands: every permitted course is tried."""
    writer = errand.accounts[errand.customer]
    asked = [(r.kind, writer.orders[r.order].order_id, r.address) for r in errand.requests]
    ends = []
    doable = [index for index, (kind, _, _) in enumerate(asked) if kind != "status"]
    for length in range(len(doable) + 1):
        for course in itertools.permutations(doable, length):
            shop, replies = database(errand), {}
            for index in course:
                kind, order_id, address = asked[index]
                outcome = permitted(shop, kind, order_id)
                if outcome is None:
                    break
                replies[index] = outcome
                do(shop, ACTIONS[outcome], order_id, address)
            else:
                served = [index in replies for index in doable]
                ends.append((sum(served), served, shop, replies))
    most = max(end[:2] for end in ends)
    shops = [(shop, replies) for *reached, shop, replies in ends if tuple(reached) == most]
    shop, done = shops[0]
    assert all(end == shops[0] or same_but_lowest(end, shops[0]) for end in shops)
    replies = []
    for index, (kind, order_id, _) in enumerate(asked):
        now = holder(shop, order_id)["orders"][order_id]["status"]
        replies.append(now if kind == "status" else done.get(index, "refused"))
    return shop, replies


def same_but_lowest(one, other):
    """Whether two ends differ only in how low the changes were meanwhile."""
    shops = [copied(end[0]) for end in (one, other)]
    for shop in shops:
        for customer in shop.values():
            del customer["lowest"]
    return shops[0] == shops[1] and one[1] == other[1]


def won(errand, shop, replies, decided_unseen):
    """Whether a case ended as the policy demands."""
    wanted, outcomes = best(errand)
    overdrawn = any(customer["lowest"] < 0 for customer in shop.values())
    same = same_but_lowest((shop, replies), (wanted, outcomes))
    return same and not overdrawn and not decided_unseen


class Twin:
    """A case, call by call; answers are what the tool message holds, None for a refusal."""

    def __init__(self, errand):
        self.errand, self.shop = errand, database(errand)
        writer = errand.accounts[errand.customer]
        self.items = {writer.orders[r.order].item: writer.orders[r.order] for r in errand.requests}
        self.replies, self.seen, self.unseen = {}, set(), False

    def call(self, tool, arguments):
        if tool == "find_customer":
            found = [i for i, c in self.shop.items() if c["name"] == arguments["name"]]
            return {"customer_id": found[0]} if found else None
        if tool in ("list_orders", "get_customer"):
            customer = self.shop.get(arguments["customer_id"])
            if customer is None:
                return None
            if tool == "get_customer":
                return {"changes": customer["changes"]}
            orders = customer["orders"].items()
            return [i for i, row in orders if row["item"] == arguments["item"]]
        if tool == "reply":
            return self.reply(**arguments)
        order_id = arguments["order_id"]
        customer = holder(self.shop, order_id)
        if customer is None:
            return None
        row = customer["orders"][order_id]
        if tool == "get_parcel":
            return row["parcel"]
        if tool == "get_order":
            self.seen.add(order_id)
            known = {"order_id": order_id, "status": row["status"]}
            return {**known, "changed_before": row["changed"]}
        answer = do(self.shop, tool, order_id, arguments.get("address", ""))
        self.unseen |= answer is not None and order_id not in self.seen
        return answer

    def reply(self, item, outcome):
        allowed = ("cancelled", "returned", "address_changed", "refused")
        allowed += ("processing", "shipped", "delivered")
        if item not in self.items or item in self.replies or outcome not in allowed:
            return None
        self.unseen |= self.items[item].order_id not in self.seen
        self.replies[item] = outcome
        return {"done": item}

    def score(self):
        if len(self.replies) < len(self.items):
            return 0.0
        replies = [self.replies[item] for item in self.items]
        return float(won(self.errand, self.shop, replies, self.unseen))
