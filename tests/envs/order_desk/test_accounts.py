"""What an action does to an account: to its order, to the parcel, and to the changes left."""

from seeupo_jax.envs.order_desk import accounts
from seeupo_jax.envs.order_desk.accounts import Account, ParcelledOrder

HOME, NEW = "7 Oak Street", "9 Elm Street"
ACCOUNT = Account(
    "C12",
    "Ada Reed",
    1,
    (
        ParcelledOrder("mug-10", "mug", "processing", HOME, False, 0, ""),
        ParcelledOrder("lamp-11", "lamp", "processing", HOME, False, 0, ""),
        ParcelledOrder("rug-12", "rug", "processing", HOME, False, 1, ""),
        ParcelledOrder("tent-13", "tent", "delivered", HOME, False, 5, HOME),
    ),
)


def rows(account):
    return [(order.status, order.address, order.changed, order.sent_to) for order in account.orders]


def test_a_cancellation_sends_off_the_rest_of_its_parcel_and_gives_a_change():
    after = accounts.cancel(ACCOUNT, "mug-10")
    assert after.changes == 2 and not after.overdrawn
    assert rows(after)[:2] == [("cancelled", HOME, True, ""), ("shipped", HOME, False, HOME)]
    assert rows(after)[2:] == rows(ACCOUNT)[2:]


def test_what_moved_before_it_was_sent_has_its_new_address_and_what_moved_later_has_not():
    before = accounts.cancel(accounts.move(ACCOUNT, "lamp-11", NEW), "mug-10")
    assert rows(before)[1] == ("shipped", NEW, True, NEW)
    after = accounts.move(accounts.cancel(ACCOUNT, "mug-10"), "lamp-11", NEW)
    assert rows(after)[1] == ("shipped", NEW, True, HOME)
    assert before.changes == after.changes == 1


def test_a_return_and_a_move_take_a_change_and_an_account_remembers_that_it_was_overdrawn():
    once = accounts.send_back(ACCOUNT, "tent-13")
    assert (once.changes, once.overdrawn) == (0, False)
    assert rows(once)[3] == ("returned", HOME, True, HOME)
    twice = accounts.move(once, "rug-12", NEW)
    assert (twice.changes, twice.overdrawn) == (-1, True)
    again = accounts.cancel(twice, "mug-10")
    assert (again.changes, again.overdrawn) == (0, True)
    paid = accounts.move(accounts.cancel(again, "lamp-11"), "rug-12", NEW)
    assert (paid.changes, paid.overdrawn) == (0, True)


def test_an_outcome_does_what_it_says():
    def after(outcome):
        return accounts.carry_out(ACCOUNT, outcome, "mug-10", NEW)

    assert after("cancelled") == accounts.cancel(ACCOUNT, "mug-10")
    assert after("returned") == accounts.send_back(ACCOUNT, "mug-10")
    assert after("address_changed") == accounts.move(ACCOUNT, "mug-10", NEW)
    for outcome in ("refused", "processing", "shipped", "delivered"):
        assert after(outcome) is ACCOUNT


def test_a_parcel_is_listed_from_each_of_its_orders():
    assert ACCOUNT.parcel("mug-10") == ACCOUNT.parcel("lamp-11") == ("mug-10", "lamp-11")
    assert ACCOUNT.parcel("tent-13") == ("tent-13",)
