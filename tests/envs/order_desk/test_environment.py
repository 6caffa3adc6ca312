"""A case is won by the right reply and the right database, and by nothing else."""

import functools
import json

import pytest

from seeupo_jax import envs
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.desk import MAX_TURNS, OUTCOMES, TOOLS
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.tool_calls import render_hermes


@functools.cache
def case(request, status, changed=False):
    """The first training task with such a request about such an order."""
    for index in range(2000):
        task = world.make_task("train", index)
        if (task.request, task.target.status, task.target.changed) == (request, status, changed):
            return f"train/{index}", task
    raise AssertionError("no such task")


def start(task_id):
    desk = OrderDesk()
    desk.reset(task_id, seed=0)
    return desk


def others(task):
    """Another order of the same customer, and one of another customer."""
    mine = next(o for o in task.customers[task.customer].orders if o != task.target)
    return mine, task.customers[task.customer - 1].orders[0]


def play(task_id, *calls, look=True):
    """The score after a look at the order and calls (tool, argument ...), arguments in order."""
    desk = start(task_id)
    if look:
        split, _, index = task_id.partition("/")
        call(desk, "get_order", order_id=world.make_task(split, int(index)).target.order_id)
    names = {tool["name"]: tool["parameters"]["required"] for tool in TOOLS}
    for name, *values in calls:
        result = desk.step(render_hermes(name, **dict(zip(names[name], values, strict=True))))
        assert result.info["bad_calls"] == 0 and all(result.info["executed"])
    return desk.score()


def answer(desk, text):
    (message,) = desk.step(text).observation
    assert message["role"] == "tool"
    return json.loads(message["content"])


def call(desk, name, /, **arguments):
    return answer(desk, render_hermes(name, **arguments))


@pytest.mark.parametrize(
    "asked, status, action, outcome",
    [
        ("cancel", "processing", "cancel_order", "cancelled"),
        ("return", "processing", "cancel_order", "cancelled"),
        ("cancel", "delivered", "return_order", "returned"),
        ("return", "delivered", "return_order", "returned"),
    ],
)
def test_an_order_is_ended_by_the_one_right_action_and_reply(asked, status, action, outcome):
    task_id, task = case(asked, status)
    mine, foreign = others(task)
    target = task.target.order_id
    right, reply = (action, target), ("reply", outcome)
    wrong = {"cancel_order": "return_order", "return_order": "cancel_order"}[action]
    assert play(task_id, right, reply) == 1.0
    assert play(task_id, ("get_order", foreign.order_id), right, reply) == 1.0  # looking is free
    assert play(task_id, reply) == 0.0  # told, not done
    assert play(task_id, right) == 0.0  # done, not told
    assert play(task_id, (wrong, target), reply) == 0.0
    assert play(task_id, (action, mine.order_id), reply) == 0.0
    assert play(task_id, (action, foreign.order_id), reply) == 0.0
    assert play(task_id, right, (action, mine.order_id), reply) == 0.0  # too much
    assert play(task_id, right, (action, foreign.order_id), reply) == 0.0
    assert play(task_id, ("change_address", target, "1 Elm Street"), right, reply) == 0.0
    for other in set(OUTCOMES) - {outcome}:
        assert play(task_id, right, ("reply", other)) == 0.0


@pytest.mark.parametrize("asked", ["cancel", "return"])
@pytest.mark.parametrize("status, changed", [("shipped", False), ("processing", True)])
def test_what_the_policy_forbids_is_refused_although_the_software_would_do_it(
    asked, status, changed
):
    task_id, task = case(asked, status, changed)
    target = task.target.order_id
    assert play(task_id, ("reply", "refused")) == 1.0
    for action, outcome in (("cancel_order", "cancelled"), ("return_order", "returned")):
        assert play(task_id, (action, target), ("reply", outcome)) == 0.0
        assert play(task_id, (action, target), ("reply", "refused")) == 0.0


def test_an_address_is_changed_to_the_one_asked_for():
    task_id, task = case("address", "processing")
    target, reply = task.target.order_id, ("reply", "address_changed")
    mine, foreign = others(task)
    assert play(task_id, ("change_address", target, task.address), reply) == 1.0
    assert play(task_id, reply) == 0.0
    assert play(task_id, ("change_address", target, task.address + "."), reply) == 0.0
    for order in (mine, foreign):
        assert play(task_id, ("change_address", order.order_id, task.address), reply) == 0.0


@pytest.mark.parametrize("status", world.STATUSES)
def test_a_question_is_answered_and_nothing_is_touched(status):
    task_id, task = case("status", status)
    assert play(task_id, ("reply", status)) == 1.0
    assert play(task_id, ("cancel_order", task.target.order_id), ("reply", status)) == 0.0


def test_no_reply_without_a_look_solves_any_case():
    for index in range(100):
        assert not any(play(f"train/{index}", ("reply", o), look=False) for o in OUTCOMES)


def test_the_opening_is_the_policy_and_the_customers_message():
    task_id, task = case("cancel", "processing")
    messages, tools = OrderDesk().reset(task_id, seed=0)
    assert messages == (
        {"role": "system", "content": world.POLICY},
        {"role": "user", "content": task.message},
    )
    assert tools == TOOLS


def test_tools_show_the_database():
    task_id, task = case("cancel", "processing")
    customer, desk = task.customers[task.customer], start(task_id)
    found = call(desk, "find_customer", name=customer.name)
    assert found == {"customer_id": customer.customer_id}
    ids = {"customer_id": customer.customer_id, "item": task.target.item}
    assert call(desk, "list_orders", **ids) == [task.target.order_id]
    shown = call(desk, "get_order", order_id=task.target.order_id)
    assert shown["status"] == "processing" and shown["changed_before"] is False
    assert call(desk, "cancel_order", order_id=task.target.order_id) == {
        "done": task.target.order_id
    }
    shown = call(desk, "get_order", order_id=task.target.order_id)
    assert shown["status"] == "cancelled" and shown["changed_before"] is True


@pytest.mark.parametrize(
    "text, error",
    [
        (
            render_hermes("refund", order_id="x"),
            "no tool 'refund'; tools: find_customer, list_orders",
        ),
        (render_hermes("get_order"), "get_order takes exactly: order_id"),
        (render_hermes("get_order", order_id="x", item="mug"), "get_order takes exactly: order_id"),
        (render_hermes("get_order", order=1), "get_order takes exactly: order_id"),
        (
            render_hermes("change_address", order_id="x"),
            "change_address takes exactly: order_id, address",
        ),
        (render_hermes("get_order", order_id=34), "get_order takes texts only"),
        (render_hermes("reply", outcome=["refused"]), "reply takes texts only"),
        (render_hermes("reply", outcome=None), "reply takes texts only"),
        (render_hermes("find_customer", name="Nobody"), "no customer 'Nobody'"),
        (render_hermes("list_orders", customer_id="C0", item="mug"), "no customer 'C0'"),
        (render_hermes("get_order", order_id="mug-0"), "no order 'mug-0'"),
        (render_hermes("cancel_order", order_id="mug-0"), "no order 'mug-0'"),
        (render_hermes("return_order", order_id=""), "no order ''"),
        (render_hermes("change_address", order_id="mug-0", address="y"), "no order 'mug-0'"),
        (render_hermes("reply", outcome="done"), "outcome must be one of: cancelled, returned, "),
        ("I cancel it.", "write exactly one <tool_call>, got 0"),
        ("", "write exactly one <tool_call>, got 0"),
        (render_hermes("get_order", order_id="x") * 2, "write exactly one <tool_call>, got 2"),
        (render_hermes("reply", outcome="refused") + " Bye.", "nothing may follow the last"),
        ("<tool_call>{", "every <tool_call> needs its </tool_call>"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "no tool '\\ud800'"),
    ],
)
def test_a_bad_call_is_answered_with_its_reason_and_changes_nothing(text, error):
    task_id, task = case("cancel", "shipped")
    desk = start(task_id)
    result = desk.step(text)
    reported = {"bad_calls": 1, "executed": [False]}
    assert (result.reward, result.done, result.info) == (0.0, False, reported)
    ((role, content),) = [(m["role"], m["content"]) for m in result.observation]
    assert role == "tool" and json.loads(content)["error"].startswith(error)
    content.encode()  # every tokenizer takes it
    call(desk, "get_order", order_id=task.target.order_id)
    last = desk.step(render_hermes("reply", outcome="refused"))
    assert (last.reward, last.done) == (1.0, True)
    assert last.info["executed"] == [False, True, True] and result.info == reported


def test_an_ended_order_is_not_acted_on_again():
    task_id, task = case("cancel", "processing")
    mine, _ = others(task)
    for first, status in (("cancel_order", "cancelled"), ("return_order", "returned")):
        desk = start(task_id)
        call(desk, first, order_id=task.target.order_id)
        for again in ("cancel_order", "return_order"):
            reported = call(desk, again, order_id=task.target.order_id)
            assert reported == {"error": f"{task.target.order_id} is already {status}"}
        reported = call(
            desk, "change_address", order_id=task.target.order_id, address="1 Elm Street"
        )
        assert reported == {"error": f"{task.target.order_id} is already {status}"}


def test_text_before_a_call_is_allowed():
    task_id, task = case("cancel", "shipped")
    desk = start(task_id)
    desk.step("First: " + render_hermes("get_order", order_id=task.target.order_id))
    result = desk.step("It is shipped. " + render_hermes("reply", outcome="refused"))
    reported = {"bad_calls": 0, "executed": [True, True]}
    assert (result.reward, result.done, result.info) == (1.0, True, reported)


def test_a_right_guess_without_looking_fails():
    task_id, task = case("cancel", "shipped")
    mine, _ = others(task)
    assert play(task_id, ("reply", "refused")) == 1.0
    assert play(task_id, ("reply", "refused"), look=False) == 0.0
    assert play(task_id, ("get_order", mine.order_id), ("reply", "refused"), look=False) == 0.0


def test_a_look_after_the_action_does_not_justify_it():
    task_id, task = case("cancel", "processing")
    order_id = task.target.order_id
    act, look, reply = ("cancel_order", order_id), ("get_order", order_id), ("reply", "cancelled")
    assert play(task_id, act, look, reply, look=False) == 0
    assert play(task_id, look, act, look, reply, look=False) == 1


def test_the_reply_ends_the_case_with_its_score_and_without_an_observation():
    task_id, task = case("cancel", "shipped")
    for outcome, reward in (("refused", 1.0), ("cancelled", 0.0)):
        desk = start(task_id)
        call(desk, "get_order", order_id=task.target.order_id)
        result = desk.step(render_hermes("reply", outcome=outcome))
        assert (result.observation, result.reward, result.done) == ((), reward, True)


@pytest.mark.parametrize("last, reward", [("refused", 1.0), (None, 0.0)])
def test_the_sixth_turn_is_the_last(last, reward):
    task_id, task = case("cancel", "shipped")
    desk = start(task_id)
    call(desk, "get_order", order_id=task.target.order_id)
    for _ in range(MAX_TURNS - 2):
        result = desk.step("Hm.")
        assert not result.done and result.reward == 0.0
    result = desk.step(render_hermes("reply", outcome=last) if last else "Hm.")
    assert (result.observation, result.reward, result.done) == ((), reward, True)
    assert MAX_TURNS == 6


def test_a_done_case_takes_no_further_action():
    task_id, _ = case("cancel", "shipped")
    desk = start(task_id)
    desk.step(render_hermes("reply", outcome="cancelled"))
    with pytest.raises(ValueError, match="the case is done; reset"):
        desk.step(render_hermes("reply", outcome="refused"))
    assert desk.score() == 0.0
    desk.reset(task_id, seed=0)
    assert not desk.step(render_hermes("reply", outcome="refused")).reward  # not looked up again


def test_desks_and_episodes_share_nothing():
    task_id, task = case("cancel", "processing")
    one, two = start(task_id), start(task_id)
    call(one, "cancel_order", order_id=task.target.order_id)
    assert call(two, "get_order", order_id=task.target.order_id)["status"] == "processing"
    one.reset(task_id, seed=1)
    assert call(one, "get_order", order_id=task.target.order_id)["status"] == "processing"


def test_task_ids_are_the_splits_and_a_mistake_is_named():
    desk = envs.make("order_desk")
    assert desk.task_ids("test")[:2] == ["test/0", "test/1"]
    assert len(desk.task_ids("train")) == 50_000
    with pytest.raises(
        ValueError, match="order_desk split: got 'dev'; allowed: train, validation, test"
    ):
        desk.task_ids("dev")
    for task_id in ("train", "train/x", "train/-1", "train/²", "train/٣", "/", ""):
        with pytest.raises(ValueError, match=f"order_desk task: got '{task_id}'; allowed: SPLIT/"):
            desk.reset(task_id, seed=0)
    with pytest.raises(ValueError, match="order_desk split: got 'dev'"):
        desk.reset("dev/1", seed=0)


def test_a_desk_without_a_case_says_so():
    desk = start("train/0")
    desk.close()
    for use in (lambda: desk.step(""), desk.score):
        with pytest.raises(ValueError, match="reset.. must come before step.. and score"):
            use()


def test_an_unknown_environment_or_option_is_named():
    with pytest.raises(ValueError, match="env.name: got 'desk'; allowed: order_desk, bfcl"):
        envs.make("desk")
    with pytest.raises(ValueError, match="env.options: order_desk refused {'size': 3}"):
        envs.make("order_desk", size=3)


def test_the_vocabulary_names_each_word_once_and_all_that_ids_are_made_of():
    words = OrderDesk().vocabulary()
    assert len(set(words)) == len(words)
    for index in range(50):
        task = world.make_task("test", index)
        for customer in task.customers:
            first, last = customer.name.split()
            assert {first, f" {last}", customer.customer_id} <= set(words)
            for order in customer.orders:
                assert order.item in words
                assert order.order_id.removeprefix(order.item) in words
    assert set(OUTCOMES) <= set(words)


def test_a_task_is_labelled_with_what_its_customer_wants():
    desk = OrderDesk()
    assert isinstance(desk, envs.Labelled)
    for request in world.REQUESTS:
        task_id, _ = case(request, "shipped")
        assert desk.labels(task_id) == {"request": request}
    with pytest.raises(ValueError, match="order_desk task: got 'test'; allowed: SPLIT/NUMBER"):
        desk.labels("test")
