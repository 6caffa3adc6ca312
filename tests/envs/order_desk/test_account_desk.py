"""A case of level 2 is won by the right replies and accounts, and its tools do what they say."""

import functools
import json
import random

import pytest
from desk_twin import Twin

from seeupo_jax.envs.order_desk import agenda, errands
from seeupo_jax.envs.order_desk.account_desk import ERRAND_TOOLS, AccountDesk
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.order_desk.desk import OUTCOMES, DeskEpisode
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.order_desk.errands import make_errand
from seeupo_jax.envs.tool_calls import parse_hermes, render_hermes

NAMES = {tool["name"]: tool["parameters"]["required"] for tool in ERRAND_TOOLS}
DO = {"cancelled": "cancel_order", "returned": "return_order", "address_changed": "change_address"}


@functools.cache
def find(alone, changes, parcels):
    """The first training errand whose requests are such, and share such things."""
    wanted = agenda.SharedResources(changes, parcels)
    for index in range(20_000):
        errand = make_errand("train", index)
        if (errand.alone, errand.shared) == (alone, wanted):
            return errand
    raise AssertionError("no such errand")


def act(errand, index, outcome):
    order, request = errand.targets[index], errand.requests[index]
    moved = (request.address,) if outcome == "address_changed" else ()
    return (DO[outcome], order.order_id, *moved)


def play(errand, *calls, outcomes=None, look=True):
    """The score after a look at each order, calls (tool, argument ...), and replies."""
    case = DeskEpisode(AccountDesk(errand))
    looks = [("get_order", order.order_id) for order in errand.targets] if look else []
    reported = zip(errand.targets, outcomes or errands.settle(errand)[0].outcomes, strict=True)
    replies = [("reply", order.item, outcome) for order, outcome in reported]
    for name, *values in (*looks, *calls, *replies):
        result = case.step(render_hermes(name, **dict(zip(NAMES[name], values, strict=True))))
        assert result.info["bad_calls"] == 0
    assert result.done
    return case.score()


def test_an_order_is_moved_before_the_cancellation_that_sends_it_off():
    errand = find(("cancelled", "address_changed"), 1, (0, 0))
    cancel, move = act(errand, 0, "cancelled"), act(errand, 1, "address_changed")
    assert play(errand, move, cancel) == 1.0
    assert play(errand, cancel, move) == 0.0  # it is on its way to the old address
    assert play(errand, cancel, outcomes=("cancelled", "refused")) == 0.0  # both were possible
    assert play(errand, move, cancel, look=False) == 0.0
    assert play(errand, ("get_parcel", move[1]), move, cancel) == 1.0  # looking is free


def test_a_cancellation_pays_for_a_move_that_comes_after_it():
    errand = find(("address_changed", "cancelled", "refused"), 0, (0, 1, 2))
    move, cancel = act(errand, 0, "address_changed"), act(errand, 1, "cancelled")
    assert play(errand, cancel, move) == 1.0
    assert play(errand, move, cancel) == 0.0  # overdrawn in between


def test_only_the_cancellation_that_was_asked_for_first_is_possible_in_a_parcel():
    errand = find(("cancelled", "cancelled", "refused"), 0, (0, 0, 2))
    first, second = act(errand, 0, "cancelled"), act(errand, 1, "cancelled")
    assert play(errand, first) == 1.0
    assert play(errand, first, second, outcomes=("cancelled", "cancelled", "refused")) == 0.0
    assert play(errand, second, outcomes=("refused", "cancelled", "refused")) == 0.0


def test_a_question_is_answered_with_what_is_true_in_the_end():
    errand = find(("processing", "cancelled", "refused"), 0, (0, 0, 2))
    cancel = act(errand, 1, "cancelled")
    assert play(errand, cancel, outcomes=("shipped", "cancelled", "refused")) == 1.0
    assert play(errand, cancel, outcomes=("processing", "cancelled", "refused")) == 0.0


def test_a_change_that_is_not_left_is_refused_although_the_software_would_make_it():
    errand = find(("refused", "address_changed", "returned"), 1, (0, 1, 2))
    move, back = act(errand, 1, "address_changed"), act(errand, 2, "returned")
    assert play(errand, move) == 1.0
    assert play(errand, back, outcomes=("refused", "refused", "returned")) == 0.0
    assert play(errand, move, back, outcomes=("refused", "address_changed", "returned")) == 0.0


def test_other_orders_and_customers_stay_as_they_are():
    errand = find(("cancelled", "address_changed"), 1, (0, 0))
    right = act(errand, 1, "address_changed"), act(errand, 0, "cancelled")
    own = next(o for o in errand.account.orders if o not in errand.targets)
    foreign = errand.accounts[errand.customer - 1].orders[0]
    for other in (own, foreign):
        assert play(errand, *right, ("change_address", other.order_id, "1 Elm Street")) == 0.0


def test_random_calls_do_what_another_implementation_does():
    won = 0
    for index in range(300):
        errand, rng = make_errand("train", index), random.Random(index)
        case, twin = DeskEpisode(AccountDesk(errand)), Twin(errand)
        shown, _ = demonstrate(f"level2/train/{index}", skill=rng.random())
        said = [m["content"] for m in shown.messages if m["role"] == "assistant"]
        for _ in range(rng.randrange(3)):
            said[rng.randrange(len(said))] = random_call(errand, rng)
        for text in said:
            result = case.step(text)
            (call,) = parse_hermes(text)
            expected = twin.call(call.name, call.arguments)
            assert result.info["executed"][-1] == (expected is not None)
            for message in result.observation:
                reported = json.loads(message["content"])
                assert reported == expected or (expected is None and "error" in reported)
            if result.done:
                break
        assert case.score() == twin.score()
        won += case.score()
    assert 50 < won < 150


def random_call(errand, rng):
    orders = [order for account in errand.accounts for order in account.orders]
    order = rng.choice([*orders, *errand.targets * 3])
    values = {
        "order_id": order.order_id,
        "item": order.item,
        "address": "1 Elm Street",
        "name": rng.choice(errand.accounts).name,
        "customer_id": rng.choice([*(a.customer_id for a in errand.accounts), "C0"]),
        "outcome": rng.choice(OUTCOMES),
    }
    name = rng.choice(list(NAMES))
    return render_hermes(name, **{argument: values[argument] for argument in NAMES[name]})


@pytest.mark.parametrize(
    "text, error",
    [
        (render_hermes("reply", outcome="refused"), "reply takes exactly: item, outcome"),
        (render_hermes("reply", item="piano", outcome="done"), "no request about 'piano'"),
        (render_hermes("reply", item=["mug"], outcome="refused"), "reply takes texts only"),
        (render_hermes("get_customer", customer_id="C0"), "no customer 'C0'"),
        (render_hermes("list_orders", customer_id="", item="mug"), "no customer ''"),
        (render_hermes("find_customer", name="Nobody"), "no customer 'Nobody'"),
        (render_hermes("get_parcel", order_id="mug-0"), "no order 'mug-0'"),
        (render_hermes("get_parcel"), "get_parcel takes exactly: order_id"),
        (render_hermes("cancel_order", order_id=""), "no order ''"),
        (render_hermes("change_address", order_id="x", address="y"), "no order 'x'"),
        (render_hermes("ship_order", order_id="x"), "no tool 'ship_order'; tools: find_customer"),
        ("I cancel it.", "write exactly one <tool_call>, got 0"),
        (render_hermes("get_order", order_id="x") * 2, "write exactly one <tool_call>, got 2"),
        ("<tool_call>{", "every <tool_call> needs its </tool_call>"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "no tool '\\ud800'"),
    ],
)
def test_a_bad_call_is_answered_with_its_reason_and_changes_nothing(text, error):
    errand = find(("cancelled", "address_changed"), 1, (0, 0))
    case = DeskEpisode(AccountDesk(errand))
    result = case.step(text)
    assert (result.reward, result.done) == (0.0, False)
    assert result.info == {"bad_calls": 1, "executed": [False]}
    (message,) = result.observation
    assert json.loads(message["content"])["error"].startswith(error)
    message["content"].encode()
    assert case.desk.accounts == AccountDesk(errand).accounts and not case.desk.replies


def test_a_request_has_one_reply_and_an_ended_order_one_end():
    errand = find(("cancelled", "address_changed"), 1, (0, 0))
    case, (first, _) = DeskEpisode(AccountDesk(errand)), errand.targets

    def said(name, **arguments):
        (message,) = case.step(render_hermes(name, **arguments)).observation
        return json.loads(message["content"])

    assert said("reply", item=first.item, outcome="sold")["error"].startswith("outcome must be one")
    assert said("reply", item=first.item, outcome="refused") == {"done": first.item}
    again = said("reply", item=first.item, outcome="cancelled")
    assert again == {"error": f"{first.item} is already answered"}
    assert said("cancel_order", order_id=first.order_id) == {"done": first.order_id}
    ended = {"error": f"{first.order_id} is already cancelled"}
    for name in ("cancel_order", "return_order"):
        assert said(name, order_id=first.order_id) == ended
    assert said("change_address", order_id=first.order_id, address="x") == ended


def test_the_sixteenth_turn_is_the_last_and_a_done_case_takes_no_further_action():
    desk = OrderDesk(level=2)
    desk.reset("level2/train/0", seed=0)
    for _ in range(15):
        assert not desk.step("Hm.").done
    result = desk.step("Hm.")
    assert (result.observation, result.reward, result.done) == ((), 0.0, True)
    with pytest.raises(ValueError, match="the case is done; reset"):
        desk.step("Hm.")
