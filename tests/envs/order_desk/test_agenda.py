"""Requests that share parcels and changes: cases worked out by hand, and what must be known."""

import itertools

import pytest

from seeupo_jax.envs.order_desk import agenda
from seeupo_jax.envs.order_desk.agenda import CHANGES, Agenda, SharedResources

C, R, A, Q, X = "cancelled", "returned", "address_changed", "processing", "refused"
EVERY = [
    alone
    for count in (2, 3)
    for alone in itertools.product((C, R, A, Q, X, "shipped", "delivered"), repeat=count)
]


@pytest.mark.parametrize(
    "alone, changes, parcels, actions, outcomes",
    [
        ((C, A), 1, (0, 0), (1, 0), (C, A)),  # moved before the rest of the parcel is sent
        ((C, A), 0, (0, 0), (0,), (C, X)),  # no change left for the move, and then it is gone
        ((C, A), 0, (0, 1), (0, 1), (C, A)),  # the cancellation pays for the move
        ((A, C), 0, (0, 1), (1, 0), (A, C)),
        ((R, C), 0, (0, 1), (1, 0), (R, C)),
        ((C, C), 0, (0, 0), (0,), (C, X)),  # the one asked first
        ((C, C), 0, (0, 1), (0, 1), (C, C)),
        ((R, A), 1, (0, 1), (0,), (R, X)),
        ((R, A), 2, (0, 1), (0, 1), (R, A)),
        ((Q, C), 0, (0, 0), (1,), ("shipped", C)),  # true when the case ends
        ((Q, C), 0, (0, 1), (1,), (Q, C)),
        ((R, A, C), 1, (0, 1, 1), (1, 2, 0), (R, A, C)),
        ((C, A, C), 0, (0, 0, 2), (2, 1, 0), (C, A, C)),
        ((A, A, C), 0, (0, 1, 2), (2, 0), (A, X, C)),
        ((X, "shipped", "delivered"), 2, (0, 1, 2), (), (X, "shipped", "delivered")),
    ],
)
def test_as_many_requests_as_any_order_allows_are_served(
    alone, changes, parcels, actions, outcomes
):
    assert agenda.solve(alone, SharedResources(changes, parcels)) == Agenda(actions, outcomes)


def test_serving_refuses_what_the_rules_forbid_by_then():
    hasty = agenda.serve((C, A), SharedResources(1, (0, 0)), (0, 1))
    assert hasty == Agenda((0,), (C, X))
    assert agenda.serve((A, C), SharedResources(0, (0, 1)), (0, 1)) == Agenda((1,), (X, C))


def test_parcels_are_named_by_their_first_request_in_the_warehouse():
    assert agenda.share((X, C, A), 1, [7, 7, 7]) == SharedResources(1, (0, 1, 1))
    assert agenda.share((C, R, Q), 0, [3, 5, 3]) == SharedResources(0, (0, 1, 0))
    assert all(len(agenda.possible(alone)) % 3 == 0 for alone in EVERY)
    assert len(agenda.possible((C, A, Q))) == 3 * 4 and len(agenda.possible((R, X))) == 3


@pytest.mark.parametrize(
    "alone, look_up",
    [
        ((R, A), CHANGES),
        ((C, A), CHANGES),  # with one left, the move comes first whatever the parcel
        ((C, C), 0),  # the parcel of either
        ((Q, C), 1),  # what does the cancellation send off?
        ((C, R), None),  # the cancellation pays, and comes first
        ((C, X), None),
        ((Q, A), CHANGES),
    ],
)
def test_what_decides_is_looked_up_and_nothing_else(alone, look_up):
    assert agenda.next_look_up(alone, agenda.possible(alone)) == look_up


def test_the_look_ups_lead_to_what_is_right_in_every_world_and_each_of_them_is_needed():
    for alone in EVERY:
        for truth in agenda.possible(alone):
            worlds = agenda.possible(alone)
            while (look_up := agenda.next_look_up(alone, worlds)) is not None:
                assert agenda.decide(alone, worlds) is None  # without it the errand is open
                fewer = agenda.narrow(worlds, look_up, truth)
                assert truth in fewer < worlds
                worlds = fewer
            decided = agenda.decide(alone, worlds)
            for world in worlds:
                assert agenda.serve(alone, world, decided.actions) == decided
                assert agenda.solve(alone, world).outcomes == decided.outcomes
