"""Tasks are many, fixed, unambiguous and of one split; the desk's policy is as it is written."""

import itertools
import json
import re

import pytest

from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.orders import Order, make_task, resolve

ORDER = Order("mug-34", "mug", "processing", "7 Oak Street", changed=False)


@pytest.fixture(scope="module")
def train():
    return [make_task("train", index) for index in range(5000)]


@pytest.fixture(scope="module")
def test():
    return [make_task("test", index) for index in range(world.SPLITS["test"])]


def test_no_task_is_in_two_splits_and_none_comes_twice(train, test):
    validation = [make_task("validation", i) for i in range(world.SPLITS["validation"])]
    contents = [set(map(repr, tasks)) for tasks in (train, validation, test)]
    assert [len(c) for c in contents] == [5000, 2000, 2000]
    assert len(set.union(*contents)) == 9000


def test_a_task_is_the_same_whenever_it_is_asked_for(train):
    assert [make_task("train", index) for index in (4999, 0, 17)] == [
        train[4999],
        train[0],
        train[17],
    ]


def test_a_message_names_one_customer_one_order_and_the_address_asked_for(train):
    for task in train[:1000]:
        customer = task.customers[task.customer]
        assert customer.name in task.message
        words = re.findall(r"\w+", task.message)
        assert [order for order in customer.orders if order.item in words] == [task.target]
        assert (task.address != "") == (task.request == "address")
        assert task.address in task.message
        assert "{" not in task.message


def test_names_and_ids_are_unique_within_a_task(train):
    for task in train[:1000]:
        orders = [order.order_id for customer in task.customers for order in customer.orders]
        customers = [customer.customer_id for customer in task.customers]
        names = [customer.name for customer in task.customers]
        for ids in (orders, customers, names):
            assert len(set(ids)) == len(ids)
        assert min(len(customer.orders) for customer in task.customers) >= 2


def test_every_request_meets_every_status_changed_or_not(train):
    met = {(t.request, t.target.status, t.target.changed) for t in train}
    assert met == set(itertools.product(world.REQUESTS, world.STATUSES, (False, True)))
    assert {t.customer for t in train} == {0, 1, 2}


@pytest.mark.parametrize(
    "asked, processing, shipped, delivered",
    [
        ("cancel", "cancelled", "refused", "returned"),
        ("return", "cancelled", "refused", "returned"),
        ("address", "address_changed", "refused", "refused"),
        ("status", "processing", "shipped", "delivered"),
    ],
)
def test_the_policy_allows_what_it_says(asked, processing, shipped, delivered):
    for status, outcome in zip(world.STATUSES, (processing, shipped, delivered), strict=True):
        order = Order("mug-34", "mug", status, "7 Oak Street", changed=False)
        assert resolve(asked, order) == outcome
        changed = Order("mug-34", "mug", status, "7 Oak Street", changed=True)
        assert resolve(asked, changed) == (status if asked == "status" else "refused")


def test_an_outcome_changes_what_it_says_and_nothing_else():
    def after(outcome):
        return world.carry_out(outcome, ORDER, "9 Elm Street")

    home = "7 Oak Street"
    assert after("cancelled") == Order("mug-34", "mug", "cancelled", home, changed=True)
    assert after("returned") == Order("mug-34", "mug", "returned", home, changed=True)
    moved = Order("mug-34", "mug", "processing", "9 Elm Street", changed=True)
    assert after("address_changed") == moved
    for outcome in ("refused", *world.STATUSES):
        assert after(outcome) is ORDER


def test_a_description_has_what_the_policy_depends_on():
    described = json.loads(world.describe(ORDER))
    wanted = {"order_id": "mug-34", "status": "processing", "changed_before": False}
    assert wanted.items() <= described.items()


@pytest.mark.parametrize(
    "split, index, reason",
    [
        ("dev", 0, "order_desk split: got 'dev'; allowed: train, validation, test"),
        ("test", 2000, "order_desk test task: got 2000; allowed: 0 to 1999"),
        ("train", -1, "order_desk train task: got -1; allowed: 0 to 49999"),
    ],
)
def test_a_task_that_does_not_exist_is_named(split, index, reason):
    with pytest.raises(ValueError, match=reason):
        make_task(split, index)
