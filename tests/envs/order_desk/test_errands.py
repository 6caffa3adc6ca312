"""Errands are many, fixed and entangled, and demand what brute force finds."""

import json
import re
from collections import Counter

import desk_twin
import pytest

from seeupo_jax.envs.order_desk import errands
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.errands import make_errand


@pytest.fixture(scope="module")
def train():
    return [make_errand("train", index) for index in range(1500)]


@pytest.mark.exhaustive
def test_no_errand_is_in_two_splits_and_none_comes_twice(train):
    held_out = [[make_errand(split, i) for i in range(500)] for split in ("validation", "test")]
    contents = [set(map(repr, each)) for each in (train, *held_out)]
    assert [len(c) for c in contents] == [1500, 500, 500]
    assert len(set.union(*contents)) == 2500


def test_an_errand_is_the_same_whenever_it_is_asked_for(train):
    assert [make_errand("train", index) for index in (1499, 0, 17)] == [
        train[1499],
        train[0],
        train[17],
    ]


def test_a_message_names_one_customer_and_its_orders_in_the_order_of_the_requests(train):
    for errand in train[:500]:
        assert errand.account.name in errand.message and "{" not in errand.message
        words = re.findall(r"\w+", errand.message)
        asked = [order.item for order in errand.targets]
        named = [word for word in words if word in {o.item for o in errand.account.orders}]
        assert named == asked and len(set(asked)) == len(asked) in (2, 3)
        for request in errand.requests:
            assert (request.address != "") == (request.kind == "address")
            assert request.address in errand.message


def test_names_and_ids_are_unique_and_sent_orders_have_a_parcel_of_their_own(train):
    for errand in train[:500]:
        rows = [order for account in errand.accounts for order in account.orders]
        for ids in (
            [order.order_id for order in rows],
            [account.customer_id for account in errand.accounts],
            [account.name for account in errand.accounts],
        ):
            assert len(set(ids)) == len(ids)
        for account in errand.accounts:
            assert not account.overdrawn and 0 <= account.changes <= 2
            for order in account.orders:
                sent = order.status != "processing"
                assert order.sent_to == (order.address if sent else "")
                assert not sent or account.parcel(order.order_id) == (order.order_id,)


def test_the_policy_demands_what_brute_force_over_all_permitted_courses_finds(train):
    for errand in train[:800]:
        settled, account = errands.solve_errand(errand)
        shop, replies = desk_twin.best(errand)
        assert list(settled.outcomes) == replies
        wanted = shop[account.customer_id]
        assert account.changes == wanted["changes"] and not account.overdrawn
        for order in account.orders:
            row = wanted["orders"][order.order_id]
            reported = {"status": order.status, "address": order.address, "changed": order.changed}
            assert {**reported, "label": order.sent_to}.items() <= row.items()


def test_plans_take_10_to_16_turns_and_requests_depend_on_each_other(train):
    turns = Counter(map(errands.count_turns, train))
    assert min(turns) == errands.MIN_TURNS == 10 and max(turns) <= errands.MAX_TURNS == 16
    assert all(turns[count] > 50 for count in range(10, 16))
    matters = sum(map(errands.order_matters, train)) / len(train)
    alone = sum(errands.solve_errand(e)[0].outcomes == e.alone for e in train) / len(train)
    assert 0.3 < matters < 0.5 and 0.4 < alone < 0.6
    look_ups = Counter(len(errands.plan_look_ups(errand)[0]) for errand in train)
    assert set(look_ups) == {0, 1, 2} and min(look_ups.values()) > 40


def test_looking_everything_up_does_not_always_leave_time_for_what_is_asked(train):
    def turns(errand):
        inside = sum(order.status == "processing" for order in errand.targets)
        actions = len(errands.solve_errand(errand)[0].actions)
        return 1 + 3 * len(errand.requests) + 1 + inside + actions

    late = sum(turns(errand) > errands.MAX_TURNS for errand in train) / len(train)
    assert late > 0.05


def test_every_kind_of_request_and_every_outcome_comes_in_every_place(train):
    three = [errand for errand in train if len(errand.requests) == 3]
    for place in range(3):
        assert {errand.requests[place].kind for errand in three} == set(world.REQUESTS)
        outcomes = {errands.solve_errand(errand)[0].outcomes[place] for errand in three}
        assert len(outcomes) == 7
    assert {errand.customer for errand in train} == {0, 1, 2}


@pytest.mark.parametrize(
    "split, index, reason",
    [
        ("dev", 0, "order_desk split: got 'dev'; allowed: train, validation, test"),
        ("test", 2000, "order_desk test task: got 2000; allowed: 0 to 1999"),
        ("train", -1, "order_desk train task: got -1; allowed: 0 to 49999"),
    ],
)
def test_an_errand_that_does_not_exist_is_named(split, index, reason):
    with pytest.raises(ValueError, match=reason):
        make_errand(split, index)


def test_a_description_is_that_of_level_1(train):
    order = train[0].targets[0]
    assert json.loads(world.describe(order)) == {
        "order_id": order.order_id,
        "status": order.status,
        "changed_before": order.changed,
    }
