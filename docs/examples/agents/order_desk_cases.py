"""Writes cases of the order desk as tasks for agents: order_desk_cases.py FILE [TRAIN TEST]."""

import json
import sys
from pathlib import Path

from seeupo_jax.envs.order_desk import orders as world


def case_of(task):
    """A case as JSON: the customer's message, the shop's database, and the correct outcome."""
    outcome = world.resolve(task.request, task.target)
    done = world.carry_out(outcome, task.target, task.address)
    rows = [(customer, order) for customer in task.customers for order in customer.orders]
    return {
        "message": task.message,
        "customers": {customer.name: customer.customer_id for customer in task.customers},
        "orders": [row(customer, order) for customer, order in rows],
        "target": task.target.order_id,
        "outcome": outcome,
        "orders_in_the_end": [
            row(customer, done if order is task.target else order) for customer, order in rows
        ],
    }


def row(customer, order):
    return {
        "order_id": order.order_id,
        "customer_id": customer.customer_id,
        "item": order.item,
        "status": order.status,
        "address": order.address,
        "changed_before": order.changed,
    }


def write(file, train=1024, test=64):
    with open(file, "w") as lines:
        for split, count in (("train", train), ("test", test)):
            for index in range(count):
                data = case_of(world.make_task(split, index))
                line = {"task_id": f"{split}/{index}", "split": split, **data}
                lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    write(sys.argv[1], *map(int, sys.argv[2:]))
